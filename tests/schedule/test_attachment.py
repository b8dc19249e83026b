"""scheduler.attach: a model in training mode gets batches of the scheduled length, inside any wrapper."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from seqwarm_kernels import BatchBuffers, SequenceLengthScheduler
from seqwarm_kernels.schedule.attachment import paused_attachments

from ..support.ranks import one_rank
from ..support.same import assert_same
from ..support.schedules import WORDS, Model, compiled_in_place, scheduler, tokens


def test_batches_are_resized_in_training_only():
    """A validation without gradients needs no `model.eval()`. Its tokens are not counted."""
    model, schedule = Model(), scheduler()
    attachment = schedule.attach(model)
    lengths = [(model(tokens()).shape[1], schedule.step())[0] for _ in range(5)]
    assert lengths == [4, 8, 12, 16, 16]
    assert attachment.seq_length == 16
    schedule.progress = 0
    attachment.take_seen()
    for block in (torch.no_grad, torch.inference_mode):
        with block():
            assert model(tokens()).shape[1] == 16
    model.eval()
    assert model(tokens()).shape[1] == 16
    assert attachment.take_seen() == (0, 0)
    model.train()
    assert model(tokens(2, 3)).shape[1] == attachment.seq_length == 3
    assert model(tokens()).shape[1] == attachment.seq_length == 4


def test_activation_checkpointing_counts_a_batch_once():
    model = Model()
    attachment = scheduler().attach(model)
    ids, scale = tokens(), torch.ones((), requires_grad=True)
    model(ids)
    once = attachment.take_seen()
    result = checkpoint(lambda ids, scale: model(ids) * scale, ids, scale, use_reentrant=False)
    with torch.no_grad():
        model(ids)  # as a validation between forward and backward
    result.sum().backward()
    assert attachment.take_seen() == once


def test_a_reentrant_checkpoint_around_an_attached_model_is_an_error():
    """Its first forward has no gradients and is not resized: the loss was that of whole rows, the gradient was not."""
    model, ids = Model(), tokens()
    scheduler().attach(model)
    result = checkpoint(model, ids, ids, torch.ones(2, 16, requires_grad=True), use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant must be False"):
        result.backward()
    assert model(ids).shape[1] == 4


@pytest.mark.parametrize("options", [{}, {"mode": "reshape"}, {"mode": "flatten", "copy": False}])
def test_the_loss_is_that_of_the_resized_batch(options):
    model, schedule = Model(), scheduler()
    batch = {"input_ids": tokens(3), "labels": tokens(3)}
    expected = model(**schedule.resize(batch, **options))
    schedule.attach(model, **options)
    torch.testing.assert_close(model(**batch), expected)
    torch.testing.assert_close(model(batch["input_ids"], batch["labels"]), expected)


class Whole(nn.Module):
    """Takes a batch, and other arguments beside it."""

    def forward(self, batch, power=1, labels=None, num_items_in_batch=None, fused_lm_head=False):
        return batch["input_ids"] ** power, labels


class Any(nn.Module):
    def forward(self, *batch, scale=1):
        return batch


def test_a_batch_in_one_mapping_is_resized_whole():
    model, batch = Whole(), {"input_ids": tokens()}
    cut = batch["input_ids"][:, :4]
    attachment = scheduler().attach(model)
    assert model(batch)[0].equal(cut)
    assert model(batch, 2)[0].equal(cut**2)
    assert model(batch, power=2)[0].equal(cut**2)
    assert model(batch, 1, batch["input_ids"])[1].equal(cut)  # labels beside a mapping are cut with it
    assert model(batch, labels=batch["input_ids"])[1].equal(cut)
    assert batch["input_ids"].shape == (2, 16)
    model.forward = lambda batches: batches
    assert model({"a": {"input_ids": tokens(1, 3)}, "b": batch})["b"]["input_ids"].equal(cut)  # two batches in one
    assert attachment.seq_length == 4


def test_tensors_in_a_tuple_beside_a_tensor_are_refused():
    """They kept their length, or were repeated as if they were one for each row."""
    ids = tokens()
    for options in ({}, {"mode": "reshape"}):
        scheduler().attach(model := Any(), **options)
        for pair in ((ids, ids), [ids] * 3):
            with pytest.raises(TypeError, match=r"batch\['0'\] must be a tensor to be resized, got (tuple|list)"):
                model(pair, ids)


def test_a_model_that_is_compiled_again_stays_so():
    model = compiled_in_place(Model())
    attachment = scheduler().attach(model)
    model.compile(backend="eager")
    compiled_call = model._compiled_call_impl
    attachment.remove()
    assert model._compiled_call_impl is compiled_call


def test_positional_arguments_without_names_are_not_padded_with_labels():
    """Labels were padded with 0."""
    ids, options = tokens(1, 10), {"mode": "reshape", "remainder": "pad"}
    scheduler().attach(model := Any())
    assert [each.shape for each in model(ids, ids, ids, scale=2)] == [(1, 4)] * 3
    for arguments in ((ids,), (ids, ids)):
        scheduler().attach(model := Any(), **options)
        with pytest.raises(ValueError, match="pad_values must have a value for the unnamed tensor '0'"):
            model(*arguments)
        scheduler().attach(model := Any(), **options, pad_values={str(place): -100 for place in range(len(arguments))})
        assert model(*arguments)[-1][2].tolist() == [*ids[0, 8:].tolist(), -100, -100]
    scheduler().attach(model := Any(), **options, keys=["0"], pad_values={"0": 0})
    assert [entry.shape[1] for entry in model(ids, ids)] == [4, 10]
    scheduler().attach(model := Any(), **options, pad_values={"0": 0})
    assert model(ids, torch.tensor([7]))[1].tolist() == [7, 7, 7]  # one entry for each row
    scheduler().attach(model := Any(), mode="reshape", remainder="overlap")
    assert model(ids)[0].shape == (3, 4)
    with pytest.raises(ValueError, match="remainder must be 'drop' or 'pad' for unnamed"):
        model(ids, ids)


@pytest.mark.parametrize(("mode", "tokens_and_samples"), [("truncate", (7, 2)), ("reshape", (11, 3))])
def test_sequences_of_a_packed_batch_are_cut_and_counted(mode, tokens_and_samples):
    """Sequences of 3 and 8 tokens at length 4."""
    model, schedule = Model(), scheduler()
    model.forward = lambda **batch: batch
    batch = {"input_ids": tokens(1, 11), "position_ids": torch.tensor([[0, 1, 2, *range(8)]])}
    attachment = schedule.attach(model, mode=mode, keys=["input_ids"])
    assert_same(model(**batch), schedule.resize(batch, mode=mode, keys=["input_ids"]))
    assert attachment.take_seen() == tokens_and_samples
    assert attachment.seq_length == 4


def test_tokens_of_batches_in_buffers():
    """A batch is counted before the next one is written to the same memory."""
    masks = [(torch.arange(8) < length).long().repeat(2, 1) for length in (3, 5)]
    model, batches = Model(), [{"input_ids": tokens(2, 8), "attention_mask": mask} for mask in masks]
    attachment = SequenceLengthScheduler(6, 8, duration=10).attach(model, out=BatchBuffers(batches[0], 8))
    for batch in batches:
        model(**batch)
    assert attachment.take_seen() == (2 * 3 + 2 * 5, 4)
    assert attachment.take_seen() == (0, 0)


@pytest.mark.parametrize("is_compiled_first", [False, True])
def test_compiled_models(is_compiled_first):
    model, schedule = Model(), scheduler()
    expected = copy.deepcopy(model)
    model = torch.compile(model, backend="eager", fullgraph=True) if is_compiled_first else model
    attachment = schedule.attach(model)
    if not is_compiled_first:
        compiled_in_place(model)
    for length in (4, 8, 12, 16):
        batch = tokens()
        torch.testing.assert_close(model(batch), expected(batch[:, :length]))
        schedule.step()
    schedule.progress = 0
    model.eval()
    assert model(tokens()).shape[1] == 16
    model.train()
    attachment.remove()
    assert model(tokens()).shape[1] == 16


def train(model, schedule, lengths_of=lambda batch: batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(4):
        batch = lengths_of(torch.randint(WORDS, (4, 16)))
        loss = model(input_ids=batch, labels=batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("wrapping", ["attach, ddp", "ddp, attach", "fsdp"])
def test_a_wrapped_model_trains_as_without(wrapping):
    model, schedule = Model(), scheduler()
    plain, its_schedule = copy.deepcopy(model), scheduler()
    torch.manual_seed(0)
    expected = train(plain, its_schedule, lambda batch: batch[:, : its_schedule.seq_length])
    torch.manual_seed(0)
    with one_rank():
        if wrapping == "attach, ddp":
            schedule.attach(model)
            trained = DistributedDataParallel(model)
        else:
            trained = fully_shard(model) if wrapping == "fsdp" else DistributedDataParallel(model)
            schedule.attach(trained)
        found = train(trained, schedule)
        del trained
    torch.testing.assert_close(found, expected)


def test_a_model_has_one_scheduler():
    scheduler().attach(model := Model())
    with pytest.raises(ValueError, match="model has a scheduler attached already"):
        scheduler().attach(model)


def test_an_argument_that_is_given_twice_is_refused_by_the_model():
    scheduler().attach(model := Model())
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model(tokens(), input_ids=tokens())


@pytest.mark.parametrize("count", [{"num_items_in_batch": 30}, {"fused_lm_head": True}])
def test_a_count_of_labels_before_cutting_is_refused(count):
    """The Trainers of Hugging Face and TRL would divide the loss of the cut batch by the labels of the whole one."""

    model, whole = Model(), Whole()
    for each in (model, whole):
        scheduler().attach(each)
    for call in (
        lambda: model(tokens(), labels=tokens(), **count),
        lambda: whole({"input_ids": tokens()}, **count),
        lambda: whole(batch={"input_ids": tokens()}, **count),
    ):
        with pytest.raises(ValueError, match=rf"^{next(iter(count))} must not .* SequenceLengthWarmup.*add_to"):
            call()
    assert whole({"input_ids": tokens()}, fused_lm_head=False)[0].shape[1] == 4
    assert model(tokens(), None, None, None).shape[1] == model(tokens(), num_items_in_batch=None).shape[1] == 4


@pytest.mark.parametrize(
    ("copied", "prepared"),
    [(copy.deepcopy, lambda model: model), (lambda model: pickle.loads(pickle.dumps(model)), compiled_in_place)],
)
def test_a_copied_model_keeps_full_lengths_and_can_be_attached(copied, prepared):
    model, schedule = prepared(Model()), scheduler()
    attachment = schedule.attach(model)
    other = copied(model)
    assert other(tokens()).shape[1] == 16
    assert model(tokens()).shape[1] == 4
    assert attachment.take_seen() == (8, 2)
    again = scheduler().attach(other)
    assert other(tokens()).shape[1] == 4
    attachment.remove()
    assert other(tokens()).shape[1] == 4
    newer = schedule.attach(model)
    attachment.remove()  # is not the current one
    assert model(tokens()).shape[1] == 4
    newer.remove()
    again.remove()
    assert [each(tokens()).shape[1] for each in (model, other, copied(other))] == [16] * 3


def test_a_paused_attachment_neither_resizes_nor_counts():
    outer, schedule = nn.Sequential(Model()), scheduler()
    attachment = schedule.attach(outer[0])
    with pytest.raises(TypeError), paused_attachments(outer):
        outer(outer(tokens()).shape[1] == 16)  # an error in the block
    assert attachment.take_seen() == (0, 0)
    assert outer(tokens()).shape[1] == 4
