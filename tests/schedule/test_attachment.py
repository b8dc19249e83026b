"""scheduler.attach: a model in training mode gets batches of the scheduled length, inside any wrapper."""

import collections
import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from seqwarm_kernels import BatchBuffers, SequenceLengthScheduler

from ..support.ranks import mean_of_two_ranks
from ..support.schedules import IDS, WIDTH, WORDS, Model, compiled_in_place, scheduler, tokens
from ..support.tiers import first_fast

pytestmark = pytest.mark.filterwarnings("ignore:the inputs of the model were cut")  # losses are not what is tested


def test_batches_are_resized_in_training_mode_only():
    model, schedule = Model(), scheduler()
    attachment = schedule.attach(model)
    lengths = [(model(tokens()).shape[1], schedule.step())[0] for _ in range(5)]
    assert lengths == [4, 8, 12, 16, 16]
    assert attachment.seq_length == 16
    schedule.progress = 0
    model.eval()
    assert model(tokens()).shape[1] == 16
    model.train()
    attachment.remove()
    attachment.remove()
    assert model(tokens()).shape[1] == 16


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_counts_a_batch_once(use_reentrant):
    model = Model()
    attachment = scheduler().attach(model)
    ids, scale = tokens(), torch.ones((), requires_grad=True)
    model(ids)
    once = attachment.take_seen()
    result = checkpoint(lambda ids, scale: model(ids) * scale, ids, scale, use_reentrant=use_reentrant)
    result.sum().backward()
    assert attachment.take_seen() == once


def test_only_the_current_attachment_is_removed():
    model, schedule = Model(), scheduler()
    older = schedule.attach(model)
    older.remove()
    newer = schedule.attach(model)
    older.remove()
    assert model(tokens()).shape[1] == 4
    newer.remove()
    assert model(tokens()).shape[1] == 16


@pytest.mark.parametrize("options", [{}, {"mode": "reshape"}, {"mode": "flatten", "copy": False}])
def test_the_loss_is_that_of_the_resized_batch(options):
    model, schedule = Model(), scheduler()
    batch = {"input_ids": tokens(3), "labels": tokens(3)}
    expected = model(**schedule.resize(batch, **options))
    schedule.attach(model, **options)
    torch.testing.assert_close(model(**batch), expected)
    torch.testing.assert_close(model(batch["input_ids"], batch["labels"]), expected)


def test_a_batch_in_one_mapping_is_resized_whole():
    class Whole(nn.Module):
        def forward(self, batch, power=1):
            return batch["input_ids"] ** power

    model, batch = Whole(), {"input_ids": tokens()}
    scheduler().attach(model)
    assert model(batch).equal(batch["input_ids"][:, :4])
    assert model(batch, 2).equal(batch["input_ids"][:, :4] ** 2)
    assert batch["input_ids"].shape == (2, 16)


def test_positional_arguments_without_names():
    class Any(nn.Module):
        def forward(self, first, *others, scale=1):
            return [tensor.shape[1] * scale for tensor in (first, *others)]

    model = Any()
    scheduler().attach(model)
    assert model(tokens()) == [4]
    assert model(tokens(), tokens(), tokens(), scale=2) == [8, 8, 8]


def test_positional_arguments_without_names_are_not_padded_with_labels():
    """Labels were padded with 0."""

    class Any(nn.Module):
        def forward(self, *batch):
            return batch

    ids, options = tokens(1, 10), {"mode": "reshape", "remainder": "pad"}
    for arguments in ((ids,), (ids, ids)):
        scheduler().attach(model := Any(), **options)
        with pytest.raises(ValueError, match=r"pad_values must have a value for '0' \(torch.int64\), which may hold"):
            model(*arguments)
        scheduler().attach(model := Any(), **options, pad_values={str(place): -100 for place in range(len(arguments))})
        assert model(*arguments)[-1][2].tolist() == [*ids[0, 8:].tolist(), -100, -100]
    scheduler().attach(model := Any(), mode="reshape", remainder="overlap")
    assert model(ids)[0].shape == (3, 4)
    with pytest.raises(ValueError, match=r"remainder must be 'drop' or 'pad' with .* entries have no names"):
        model(ids, ids)


def test_an_argument_that_is_given_twice():
    model = Model()
    scheduler().attach(model)
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model(tokens(), input_ids=tokens())


def test_tokens_and_samples_are_counted():
    model, mask = Model(), torch.ones(2, 16, dtype=torch.int64)
    mask[1, 3:] = 0
    attachment = scheduler().attach(model)
    assert attachment.has_unseen is False
    model(tokens(), attention_mask=mask)
    model(tokens())
    assert attachment.has_unseen is True
    assert attachment.take_seen() == (7 + 8, 4)
    assert attachment.has_unseen is False
    assert attachment.take_seen() == (0, 0)


@pytest.mark.parametrize(("mode", "tokens_and_samples"), [("truncate", (7, 2)), ("reshape", (11, 3))])
def test_sequences_of_a_packed_batch_are_cut_and_counted(mode, tokens_and_samples):
    """Sequences of 3 and 8 tokens at length 4. The first label of a sequence does not count."""
    model, schedule = Model(), scheduler()
    ids, positions = tokens(1, 11), torch.tensor([[0, 1, 2, *range(8)]])
    labels = ids.where(positions != 0, -100)
    attachment = schedule.attach(model, mode=mode, keys=["input_ids", "labels"])
    rows = [ids[:, :3], ids[:, 3 : tokens_and_samples[0]]]  # a piece's first label is predicted from the piece before
    sums = [
        nn.functional.cross_entropy(model.head(model.embedding(row))[0, :-1], row[0, 1:], reduction="sum")
        for row in rows
    ]
    kept = tokens_and_samples[0] - len(rows)
    model.forward = lambda position_ids, **batch: Model.forward(model, **batch)
    found = model(input_ids=ids, labels=labels, position_ids=positions, num_items_in_batch=torch.tensor(9.0))
    torch.testing.assert_close(found, sum(sums) / kept)
    assert attachment.take_seen() == tokens_and_samples
    assert attachment.seq_length == 4


def test_tokens_of_batches_in_buffers():
    """A batch is counted before the next one is written to the same memory."""
    batches = [
        {"input_ids": IDS, "attention_mask": (torch.arange(8) < length).long().repeat(2, 1)} for length in (3, 5)
    ]

    class Model(nn.Module):
        def forward(self, input_ids, attention_mask):
            return input_ids

    model = Model()
    attachment = SequenceLengthScheduler(6, 8, duration=10).attach(model, out=BatchBuffers(batches[0], 8))
    for batch in batches:
        model(**batch)
    assert attachment.take_seen().tokens == 2 * 3 + 2 * 5


def test_a_loss_that_is_divided_outside_is_refused():
    model = Model()
    scheduler().attach(model)
    with pytest.raises(ValueError, match="fused_lm_head must not be passed to the model: TRL divides its loss"):
        model(tokens(), labels=tokens(), fused_lm_head=True)


def test_num_items_in_batch_of_none_is_passed_on():
    model, schedule = Model(), scheduler()
    batch = {"input_ids": tokens(), "labels": tokens()}
    expected = model(**schedule.resize(batch))
    schedule.attach(model)
    torch.testing.assert_close(model(batch["input_ids"], batch["labels"], None, None), expected)
    torch.testing.assert_close(model(**batch, num_items_in_batch=None), expected)


def test_num_items_in_batch_is_scaled_by_the_share_of_kept_labels():
    """Two accumulated batches: the sum of their losses is divided by the number of their kept labels."""
    model, schedule = Model(), scheduler()
    batches = [{"input_ids": tokens(), "labels": tokens()} for _ in range(2)]
    cut = [schedule.resize(batch) for batch in batches]
    expected = sum(model(**batch) for batch in cut) / 2
    attachment = schedule.attach(model)
    count = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
    torch.testing.assert_close(sum(model(**batch, num_items_in_batch=count) for batch in batches), expected)
    torch.testing.assert_close(attachment.take_shares(), [torch.tensor(3 / 15)] * 2)
    assert attachment.take_shares() == []
    ignored = torch.full((2, 16), -100)
    assert model(tokens(), ignored, num_items_in_batch=torch.tensor(3)) == 0
    ignored[0, 10] = 1  # is cut
    assert model(tokens(), ignored, num_items_in_batch=torch.tensor(3)) == 0
    assert attachment.take_shares() == [1, 0]


@pytest.mark.parametrize("first", ["attach", "compile"])
@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_models(first, in_place):
    plain, schedule = Model(), scheduler()
    expected = copy.deepcopy(plain)
    model = plain
    fullgraph = first == "compile"

    def compiled(module):
        if not in_place:
            return torch.compile(module, backend="aot_eager", fullgraph=fullgraph)
        module.compile(backend="aot_eager", fullgraph=fullgraph)
        return module

    if first == "compile":
        model = compiled(model)
    attachment = schedule.attach(model)
    if first == "attach":
        model = compiled(model)
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


def train_rank(rank, wrapping, world_size=2):
    torch.manual_seed(0)
    model, schedule = Model(), scheduler()
    if wrapping == "attach, ddp":
        schedule.attach(model)
    if wrapping == "fsdp":
        trained = fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (world_size,)))
    else:
        trained = DistributedDataParallel(model)
    if wrapping != "attach, ddp":
        schedule.attach(trained)
    return train(trained, schedule, lambda batch: batch.chunk(world_size)[rank])


def train(model, schedule, share):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(4):
        batch = share(torch.randint(WORDS, (4, 16)))
        loss = model(input_ids=batch, labels=batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses)


WRAPPINGS = ["attach, ddp", "ddp, attach", "fsdp"]


def train_plain():
    torch.manual_seed(0)
    model, schedule = Model(), scheduler()
    return train(model, schedule, lambda batch: batch[:, : schedule.seq_length])


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_wrapped_model_trains_as_without(wrapping):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        torch.testing.assert_close(train_rank(0, wrapping, world_size=1), train_plain())
    finally:
        gc.collect()  # a wrapped model that outlives its process group would abort the process
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapping", first_fast(WRAPPINGS))
def test_two_processes_train_as_one(wrapping):
    torch.testing.assert_close(mean_of_two_ranks(train_rank, wrapping), train_plain())


def test_bad_input():
    model, schedule = Model(), scheduler()
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got function"):
        schedule.attach(tokens)
    with pytest.raises(TypeError, match="resize_options must not hold return_info"):
        schedule.attach(model, return_info=True)
    schedule.attach(model)
    with pytest.raises(ValueError, match="model has a scheduler attached already"):
        schedule.attach(model)


@pytest.mark.parametrize("prepared", [lambda model: model, compiled_in_place])
def test_a_warning_names_the_line_of_the_caller(prepared):
    model, labels = prepared(Model()), torch.full((2, 16), -100)
    labels[:, 10:] = 1
    scheduler().attach(model)
    with pytest.warns(UserWarning, match="no label of a batch is left") as caught:
        model(tokens(), labels)
    assert caught[0].filename == __file__


def test_the_length_of_a_batch_shorter_than_scheduled():
    schedule = scheduler()
    attachment = schedule.attach(model := Model())
    model(tokens(2, 3))
    assert attachment.seq_length == 3


def test_the_first_label_does_not_count_if_the_loss_shifts_them():
    model, schedule = Model(), scheduler()
    attachment = schedule.attach(model)
    model(input_ids=tokens(), labels=tokens(), num_items_in_batch=30)
    torch.testing.assert_close(attachment.take_shares(), [torch.tensor(3 / 15)])


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("container", [dict, collections.UserDict])
def test_the_count_in_a_batch_of_one_mapping_is_scaled(container, by_name):
    """The loss was a share of what it is."""

    class Whole(Model):
        def forward(self, batch, num_items_in_batch=None):
            return super().forward(**{"num_items_in_batch": num_items_in_batch, **batch})

    model, schedule = Whole(), scheduler()
    batch = {"input_ids": tokens(), "labels": tokens()}
    expected = model(schedule.resize(batch))
    attachment = schedule.attach(model)
    counted = container({**batch, "num_items_in_batch": torch.tensor(30)})
    torch.testing.assert_close(model(batch=counted) if by_name else model(counted), expected)
    torch.testing.assert_close(model(container(batch), num_items_in_batch=30), expected)
    torch.testing.assert_close(attachment.take_shares(), [torch.tensor(3 / 15)] * 2)
    assert counted["num_items_in_batch"] == 30
    with pytest.raises(ValueError, match="labels must be passed to the model with num_items_in_batch, got input_ids"):
        model({"input_ids": tokens(), "num_items_in_batch": 30})
    with pytest.raises(ValueError, match="labels must be passed to the model with num_items_in_batch, got input_ids"):
        model({"input_ids": tokens()}, num_items_in_batch=30)


def test_labels_that_are_shifted_already_all_count():
    model, shifted = Model(), tokens()
    shifted[:, -1] = -100
    attachment = scheduler().attach(model)
    model.forward = lambda input_ids, labels, shift_labels, num_items_in_batch: num_items_in_batch
    count = model(input_ids=tokens(), labels=tokens(), shift_labels=shifted, num_items_in_batch=30)
    torch.testing.assert_close(count, torch.tensor(8.0))
    torch.testing.assert_close(attachment.take_shares(), [torch.tensor(4 / 15)])


def test_calls_with_one_main_input_count_once_from_the_beginning_of_a_batch():
    model, ids = Model(), tokens()
    attachment = scheduler().attach(model)
    for _ in range(2):
        model(ids)
    assert attachment.take_seen() == (2 * 8, 4)
    for _ in range(2):
        attachment.begin_batch()
        for batch in (ids, other := tokens(), ids, other):
            model(batch)
    assert attachment.take_seen() == (2 * 16, 8)
    model(ids)
    assert attachment.has_unseen is False


def test_a_batch_without_the_main_input_counts():
    class TakesEmbeddings(Model):
        def forward(self, input_ids=None, inputs_embeds=None):
            return self.head(self.embedding(input_ids) if inputs_embeds is None else inputs_embeds)

    model = TakesEmbeddings()
    attachment = scheduler().attach(model)
    attachment.begin_batch()
    model(tokens())  # does not live on
    for _ in range(2):
        model(inputs_embeds=torch.randn(2, 16, WIDTH))
    assert attachment.take_seen() == (3 * 8, 6)


@pytest.mark.parametrize("count", [torch.tensor([[30]]), torch.tensor([[30], [30]]), torch.tensor([30, 30]), 30])
def test_counts_of_labels_of_any_shape(count):
    """Those for several devices of nn.DataParallel have two dimensions."""
    model, ids = Model(), tokens()
    scheduler().attach(model)
    model.forward = lambda input_ids, labels, num_items_in_batch: num_items_in_batch
    scaled = model(input_ids=ids, labels=ids, num_items_in_batch=count)
    torch.testing.assert_close(scaled, torch.as_tensor(count) * torch.tensor(3 / 15))


def test_the_main_input_of_a_model_has_another_name():
    class Named(Model):
        main_input_name = "frames"

        def forward(self, frames, input_ids):
            return super().forward(frames)

    model = Named()
    attachment = scheduler().attach(model)
    attachment.begin_batch()
    frames = tokens()
    for _ in range(3):
        model(frames, tokens())
    assert attachment.take_seen() == (2 * 4, 2)


def test_all_labels_count_if_the_loss_does_not_shift_them():
    model = Model()
    model.loss_type = "ForMaskedLM"
    scheduler().attach(model)
    counts = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: counts.append(kwargs["num_items_in_batch"]), with_kwargs=True
    )
    labels = tokens()
    model(input_ids=labels, labels=labels, num_items_in_batch=32)
    assert counts == [8]
    with pytest.raises(ValueError, match=r"labels must be passed to the model with num_items_in_batch, got input_ids"):
        model(input_ids=labels, num_items_in_batch=32)
    model(input_ids=labels, labels=torch.full_like(labels, -100), num_items_in_batch=32)
    assert counts == [8, 32]
