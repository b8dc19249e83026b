"""Misuse that once gave wrong results without a word. More is in `tests/data/test_silent_results.py`, and in
`test_copies_in_processes.py` and `test_outside_labels.py` of `tests/schedule`."""

import copy
import gc
import linecache
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from seqwarm_kernels import (
    BatchBuffers,
    SequenceLengthScheduler,
    alibi_attention,
    alibi_attention_varlen,
    alibi_slopes,
    cyclic,
    resize_batch,
)
from seqwarm_kernels.schedule import lost_labels
from seqwarm_kernels.schedule import scheduler as scheduler_module

BATCH = {"input_ids": torch.arange(64).view(2, 32)}


@pytest.mark.parametrize("unit", ["token", "sample"])
def test_a_schedule_of_tokens_is_not_stepped_by_one(unit):
    scheduler = SequenceLengthScheduler(8, 32, duration=1000, unit=unit)
    with pytest.raises(ValueError, match=f"n must be the number of {unit}s of the step"):
        scheduler.step()
    assert scheduler.progress == 0
    scheduler.step(1)
    assert scheduler.progress == 1


def test_a_duration_is_no_share_of_the_training():
    with pytest.raises(ValueError, match=r"duration=0.3 \* total_steps"):
        SequenceLengthScheduler(8, 32, duration=0.3)


class Identity(nn.Module):
    def forward(self, input_ids):
        return input_ids


def resize_often(scheduler, batches):
    for _ in range(batches):
        scheduler.resize(BATCH, copy=False)


def resize_and_count_nothing(scheduler, batches):
    for _ in range(batches):
        scheduler.resize(BATCH, copy=False)
        scheduler.step(0)


def forward_often(scheduler, batches):
    model = Identity()
    attachment = scheduler.attach(model)
    for _ in range(batches):
        model(BATCH["input_ids"])
    attachment.remove()


@pytest.mark.parametrize("use", [resize_often, forward_often])
def test_a_scheduler_that_nobody_steps(use):
    scheduler = SequenceLengthScheduler(16, 32, duration=1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use(scheduler, 499)
    copies = [copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))]
    for unstepped in (scheduler, *copies):
        with pytest.warns(
            UserWarning,
            match=r"the length is still 16 after 500 batches: call scheduler.step\(\) after each optimizer step",
        ) as caught:
            use(unstepped, 1)
        line = linecache.getline(caught[0].filename, caught[0].lineno)
        assert ("model(" if use is forward_often else "scheduler.resize(") in line
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            use(unstepped, 600)


def test_no_warning_of_a_scheduler_that_somebody_steps():
    stepped, loaded, moved, without_ramp, full = (
        SequenceLengthScheduler(16, longest, duration=duration, unit="token")
        for longest, duration in ((32, 1000), (32, 1000), (32, 1000), (16, 1000), (32, 0))
    )
    state = loaded.state_dict()
    stepped.step(1)
    loaded.load_state_dict({**state, "progress": 1000})  # the ramp is over
    moved.progress = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scheduler in (stepped, loaded, moved, without_ramp, full):
            resize_often(scheduler, 600)


@pytest.mark.parametrize("use", [resize_often, resize_and_count_nothing])
def test_a_resumed_scheduler_that_nobody_steps(use):
    saved, scheduler = (SequenceLengthScheduler(16, 32, duration=1000) for _ in range(2))
    saved.step(500)
    scheduler.step(1)
    scheduler.load_state_dict(saved.state_dict())
    with pytest.warns(UserWarning, match="the length is still 24 after 500 batches: call scheduler.step"):
        use(scheduler, 600)
    scheduler.load_state_dict(saved.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resize_often(scheduler, 499)
        scheduler.step()
        resize_often(scheduler, 600)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("x", TypeError, "progress must be an int, got str"),
        (2.5, TypeError, "progress must be an int, got float"),
        (True, TypeError, "progress must be an int, got bool"),
        (-5, ValueError, "progress must be at least 0, got -5"),
        (2**63, ValueError, "progress must fit into 64 bits, got an int of 64 bits"),
    ],
)
def test_progress_that_is_assigned_is_checked(value, error, message):
    scheduler = SequenceLengthScheduler(8, 32, duration=10)
    scheduler.step(3)
    with pytest.raises(error, match=message):
        scheduler.progress = value
    assert scheduler.progress == 3


def test_progress_of_numpy_is_saved_as_a_plain_int(tmp_path):
    scheduler = SequenceLengthScheduler(8, 32, duration=10)
    scheduler.progress = np.int64(3)
    torch.save(scheduler.state_dict(), tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True)["progress"] == 3


def test_a_step_beyond_what_a_state_may_hold_counts_nothing():
    scheduler, loaded = (SequenceLengthScheduler(8, 32, duration=10, unit="token") for _ in range(2))
    scheduler.step(2**62)
    with pytest.raises(ValueError, match="progress must fit into 64 bits"):
        scheduler.step(2**62)
    loaded.load_state_dict(scheduler.state_dict())
    assert loaded.progress == scheduler.progress == 2**62


def test_an_iterator_of_names_is_not_used_up_in_silence():
    batch = {**BATCH, "allowed": torch.ones(2, 32, 32, dtype=torch.bool)}
    with pytest.raises(TypeError, match="mask_keys must be a collection of names, such as a list, got generator"):
        resize_batch(batch, 8, mask_keys=(name for name in ["allowed"]))


class MeanOfPrefix(nn.Module):
    """Predicts a label from the mean of the valid tokens up to it."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, input_ids, attention_mask, labels):
        valid = attention_mask[..., None].float()
        means = (self.embedding(input_ids) * valid).cumsum(1) / valid.cumsum(1)  # NaN before the first valid token
        return nn.functional.cross_entropy(self.head(means).flatten(0, 1), labels.flatten())


def padded_batch(rows, length, side):
    batch = {
        "input_ids": torch.zeros(len(rows), length, dtype=torch.int64),
        "attention_mask": torch.zeros(len(rows), length, dtype=torch.int64),
        "labels": torch.full((len(rows), length), -100),
    }
    for index, row in enumerate(rows):
        where = slice(len(row)) if side == "right" else slice(length - len(row), length)
        for name, value in {"input_ids": row, "attention_mask": 1, "labels": row}.items():
            batch[name][index, where] = value
    return batch


@pytest.mark.parametrize("attached", [False, True])
def test_a_batch_padded_on_the_left_trains_on_its_tokens(attached):
    torch.manual_seed(0)
    model = MeanOfPrefix()
    rows = [torch.randint(50, (length,)) for length in (20, 12, 5)]
    losses = {}
    for side in ("right", "left"):
        batch = padded_batch(rows, 24, side)
        scheduler = SequenceLengthScheduler(8, 24, duration=2)
        attachment = scheduler.attach(model) if attached else None
        losses[side] = []
        for tokens in (8 + 8 + 5, 16 + 12 + 5, 20 + 12 + 5):
            losses[side].append(model(**batch) if attached else model(**scheduler.resize(batch)))
            assert attachment is None or attachment.take_seen().tokens == tokens
            scheduler.step()
        if attachment is not None:
            attachment.remove()
    torch.testing.assert_close(losses["left"], losses["right"])
    assert torch.stack(losses["left"]).isfinite().all()


IDS = torch.arange(101, 109).repeat(2, 1)
LATE = torch.cat([torch.full((2, 4), -100), IDS[:, 4:]], 1)
LEFT, RIGHT = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1], [1] * 8]), torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [1] * 8])


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize(
    ("batch", "begins_masked"),
    [
        (
            {"input_ids": IDS, "attention_mask": LEFT, "decoder_input_ids": IDS, "decoder_attention_mask": RIGHT},
            "attention_mask",
        ),
        (
            {
                "encoder": {"input_ids": IDS, "attention_mask": RIGHT},
                "decoder": {"input_ids": IDS, "attention_mask": LEFT},
            },
            "decoder.attention_mask",
        ),
        ({"prompt_input_ids": IDS, "prompt_attention_mask": LEFT}, "prompt_attention_mask"),
    ],
    ids=["two masks", "nested", "another name"],
)
def test_one_mask_does_not_move_the_tokens_of_another(batch, begins_masked, copy):
    for _ in range(2):  # the second call is a known one
        with pytest.raises(ValueError, match=rf"batch\['{begins_masked}'\] must begin with a valid token in each row"):
            resize_batch(batch, 3, copy=copy)
    assert resize_batch(batch, 8, copy=copy).keys() == batch.keys()  # nothing is cut


def test_batches_of_two_masks_that_begin_with_tokens():
    batch = {"input_ids": IDS, "attention_mask": RIGHT, "decoder_input_ids": IDS, "decoder_attention_mask": RIGHT}
    for tensor in (resized := resize_batch(batch, 3)).values():
        assert tensor.shape == (2, 3)
    assert torch.equal(resized["decoder_input_ids"], IDS[:, :3])


def test_a_mask_to_be_added_is_not_read_as_its_opposite():
    first = {"input_ids": IDS, "attention_mask": torch.zeros(2, 8)}
    resize_batch(first, 3)
    with pytest.raises(ValueError, match=r"must be 0 where a token is hidden, got torch\.float32 with -inf"):
        resize_batch({**first, "attention_mask": torch.where(RIGHT == 1, 0.0, -torch.inf)}, 3)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize("as_mapping", [False, True])
def test_a_batch_without_a_label_left(as_mapping, on_host, monkeypatch):
    if not on_host:
        monkeypatch.setattr(lost_labels, "_is_on_host", lambda labels: False)

    class Model(nn.Module):
        def forward(self, input_ids, labels=None):
            return input_ids

    scheduler, model = SequenceLengthScheduler(8, 32, duration=10), Model()
    attachment = scheduler.attach(model)
    ids = torch.arange(64).view(2, 32)
    some, none, late = ids.clone(), torch.full_like(ids, -100), ids.clone()
    late[:, :16] = -100

    def forward(*micro_batches):
        for labels in micro_batches:
            batch = {"input_ids": ids, "labels": labels}
            model(batch) if as_mapping else model(**batch)
        attachment.take_seen()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for labels in (some, none):  # a batch that had none lost none
            forward(labels)
    with pytest.warns(UserWarning, match="no label of a batch is left after resizing to 8 tokens") as caught:
        forward(late, some)
    assert caught[0].filename == __file__  # the caller's line
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(late)  # it was said


class TakesTargets(nn.Module):
    def forward(self, idx, targets):
        return idx


@pytest.mark.parametrize("on_host", [True, False])
def test_positional_targets_without_one_left(on_host, monkeypatch):
    if not on_host:
        monkeypatch.setattr(lost_labels, "_is_on_host", lambda labels: False)
    model = TakesTargets()
    attachment = SequenceLengthScheduler(4, 8, duration=10).attach(model)

    def forward():
        model(IDS, LATE)
        attachment.take_seen()

    with pytest.warns(UserWarning, match="no label of a batch is left after resizing to 4 tokens"):
        forward()


@pytest.mark.parametrize("name", ["labels", "targets", "target", "label", "label_ids", "decoder_labels", "lm_labels"])
@pytest.mark.parametrize("nested", [False, True])
def test_labels_of_other_names_without_one_left(name, nested):
    batch = {"input_ids": IDS, name: LATE}
    with pytest.warns(UserWarning, match="no label of a batch is left after resizing to 4 tokens"):
        SequenceLengthScheduler(4, 8, duration=10).resize({"a": batch} if nested else batch)


@pytest.mark.parametrize("late", ["chosen", "rejected"])
def test_one_of_two_entries_without_a_label_left(late):
    batch = {name: {"input_ids": IDS, "labels": LATE if name == late else IDS} for name in ("chosen", "rejected")}
    with pytest.warns(UserWarning, match="no label of a batch is left"):
        SequenceLengthScheduler(4, 8, duration=10).resize(batch)


@pytest.mark.parametrize(
    "other", [{"is_target": LATE}, {"targets": LATE.float()}, {"labels": LATE.to(torch.complex64)}, {"labels": None}]
)
def test_entries_that_are_no_labels_are_not_looked_at(other):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SequenceLengthScheduler(4, 8, duration=10).resize({"input_ids": IDS, **other})


@pytest.mark.parametrize("on_host", [True, False])
def test_a_warning_for_trainers(on_host, monkeypatch):
    if not on_host:
        monkeypatch.setattr(lost_labels, "_is_on_host", lambda labels: False)
    for labels in (IDS, LATE, torch.full_like(IDS, -100)):
        batch = {"input_ids": IDS, "targets": labels}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert lost_labels.warn_of_lost_labels(batch, resize_batch(batch, 4), 4) is (labels is LATE)
        assert [str(warning.message)[:28] for warning in caught] == ["no label of a batch is left "] * (labels is LATE)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert lost_labels.warn_of_lost_labels(batch, resize_batch(batch, 4), 4) is False


@pytest.mark.parametrize("name", ["loss_mask", "completion_mask", "assistant_masks"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_loss_mask_that_leaves_out_all_tokens(name, dtype):
    """The sum of the mask, by which the loss is divided, was 0."""
    mask = (torch.arange(8) >= 4).to(dtype).repeat(2, 1)
    with pytest.warns(UserWarning, match="no label of a batch is left after resizing to 4 tokens, .* loss mask is 0"):
        SequenceLengthScheduler(4, 8, duration=10).resize({"tokens": IDS, name: mask})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SequenceLengthScheduler(5, 8, duration=10).resize({"tokens": IDS, name: mask})
        SequenceLengthScheduler(4, 8, duration=10).resize({"tokens": IDS, name: torch.zeros_like(mask)})
        SequenceLengthScheduler(4, 8, duration=10).resize({"tokens": IDS, name: mask.to(torch.uint16)})


def test_other_negative_labels():
    """Such as the -1 of nanoGPT."""
    with pytest.warns(UserWarning, match="no label of a batch is left"):
        SequenceLengthScheduler(4, 8, duration=10).resize({"x": IDS, "targets": LATE.clamp(min=-1)})


def test_labels_are_looked_at_where_they_are():
    batch, on_meta = ({"labels": LATE.to(device)} for device in ("cpu", "meta"))
    assert lost_labels.lost_labels_on_device(batch, resize_batch(batch, 4)) is None
    assert not lost_labels.has_lost_labels_on_host(on_meta, {"labels": on_meta["labels"][:, :4]})


def test_an_attached_model_that_is_never_called(monkeypatch):
    """Hooks do not run in other methods than `__call__`."""
    monkeypatch.setattr(scheduler_module, "_BATCHES_BEFORE_WARNING", 3)
    model, called = nn.Embedding(128, 2), nn.Embedding(128, 2)
    scheduler, other = (SequenceLengthScheduler(4, 8, duration=10) for _ in range(2))
    scheduler.attach(model)
    other.attach(called)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model.forward(IDS)
            scheduler.step()
    with pytest.warns(
        UserWarning, match=r"^step\(\) was called 3 times, and no batch has gone through the attached model"
    ):
        scheduler.step()
    called(IDS)
    removed, deleted = (SequenceLengthScheduler(4, 8, duration=10) for _ in range(2))
    removed.attach(nn.Embedding(2, 2)).remove()
    deleted.attach(nn.Embedding(2, 2))
    gc.collect()
    copied = copy.deepcopy(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for schedule in (scheduler, other, removed, deleted, copied, pickle.loads(pickle.dumps(other))):
            schedule.step(4)
            for _ in range(4):
                schedule.step()


def test_labels_are_looked_at_in_the_first_batches_only(monkeypatch):
    """Since each look takes time."""
    monkeypatch.setattr(scheduler_module, "LABEL_CHECKS", 3)
    scheduler = SequenceLengthScheduler(4, 8, duration=10)
    lost = {"input_ids": IDS, "labels": LATE}
    for _ in range(3):
        scheduler.resize({"input_ids": IDS, "labels": IDS})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.resize(lost)


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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["targets", "target", "label", "label_ids", "decoder_targets", "token_labels"])
def test_labels_of_other_names_are_neither_padding_nor_trained_twice(name, packed):
    """An entry of another name than "labels" was padded with 0, and repeated tokens kept their labels."""
    tokens = torch.arange(10, 20)[None]
    batch = {"idx": tokens, name: tokens}
    if packed:
        batch["cu_seqlens"] = torch.tensor([0, 10])
    overlapping = resize_batch(batch, 4, mode="reshape", remainder="overlap")[name].flatten()
    assert overlapping.tolist() == [10, 11, 12, 13, 14, 15, 16, 17, -100, -100, 18, 19]
    if not packed:  # a packed batch is not padded
        padded = resize_batch(batch, 4, mode="reshape", remainder="pad")[name]
        assert padded[2].tolist() == [18, 19, -100, -100]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "dtype"), [("target", torch.bool), ("label", torch.uint8), ("y", torch.bool)])
def test_entries_that_cannot_hold_ignored_labels_are_repeated_as_others(name, dtype, packed):
    tokens = torch.arange(10)[None]
    batch = {"idx": tokens, name: tokens % 2 == 0 if dtype is torch.bool else tokens.to(dtype)}
    if packed:
        batch["cu_seqlens"] = torch.tensor([0, 10])
    resized = resize_batch(batch, 4, mode="reshape", remainder="overlap")
    expected = batch[name][0][resized["idx"]]
    assert resized[name].equal(expected)


@pytest.mark.parametrize("remainder", ["pad", "overlap"])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("y", torch.int64), ("target_ids", torch.int64), ("targets", torch.float32), ("label", torch.float16)],
)
def test_padding_of_what_may_be_labels_is_asked_for(name, dtype, remainder):
    batch = {"idx": torch.arange(10)[None], name: torch.arange(10, dtype=dtype)[None]}
    options = {"mode": "reshape", "remainder": remainder}
    message = rf"^pad_values must have a value for '{name}' \({dtype}\), which may hold labels: .* with -100; rename"
    with pytest.raises(ValueError, match=message):
        resize_batch(batch, 4, **options)
    filled = resize_batch(batch, 4, **options, pad_values={name: -1})[name]
    assert (filled[2] == -1).sum() == 2
    resize_batch(batch, 4, mode="reshape")  # nothing is filled


class LengthOfInput(nn.Module):
    def forward(self, input_ids):
        return input_ids.shape[1]


def test_a_copied_or_saved_model_has_no_frozen_schedule(tmp_path):
    """tests/schedule/test_attachment.py has all kinds of copies."""
    model, scheduler = LengthOfInput(), SequenceLengthScheduler(8, 32, duration=3)
    attachment = scheduler.attach(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for length in (8, 16, 24, 32):
        assert model(BATCH["input_ids"]) == average(BATCH["input_ids"]) == length
        scheduler.step()
    scheduler.progress = 0
    with pytest.warns(UserWarning, match="the model was pickled while a SequenceLengthScheduler was attached"):
        assert loaded(BATCH["input_ids"]) == 32
    attachment.remove()
    assert model(BATCH["input_ids"]) == average(BATCH["input_ids"]) == 32


def functions_of_one_name():
    def of(exponent):
        def growth(x):
            return float(x) ** exponent

        return growth

    return of(1), of(2)


@pytest.mark.parametrize("wrap", [lambda pacing: pacing, lambda pacing: cyclic(pacing, 2)])
def test_two_pacings_of_one_name(wrap):
    first, second = (
        SequenceLengthScheduler(8, 1024, duration=100, pacing=wrap(pacing)) for pacing in functions_of_one_name()
    )
    first.step(30)
    second.step(20)
    state = first.state_dict()
    with pytest.raises(ValueError, match="pacing_lengths is"):
        second.load_state_dict(state)
    assert second.progress == 20


def late_labels():
    ids = torch.arange(64).view(2, 32)
    late = ids.clone()
    late[:, :16] = -100
    return {"input_ids": ids, "labels": late}


@pytest.mark.parametrize(
    "options",
    [{}, {"return_info": True}, {"copy": False}, {"mode": "reshape", "keys": ["input_ids", "labels"]}],
    ids=["plain", "info", "views", "reshape"],
)
def test_a_plain_loop_says_that_no_label_is_left(options):
    batch, scheduler = late_labels(), SequenceLengthScheduler(12, 32, duration=10)
    if options.get("mode") == "reshape":  # only the dropped end of each row has labels
        batch["labels"][:, :24] = -100
    none = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    first = {**batch, "labels": none["labels"].clone()}
    first["labels"][0, 0] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for harmless in (none, first, {**batch, "labels": batch["labels"].float()}):
            scheduler.resize(harmless, **options)
    with pytest.warns(UserWarning, match="^no label of a batch .* to 12 tokens, .* with mode='reshape'$") as caught:
        scheduler.resize(batch, **options)
    assert "scheduler.resize(" in linecache.getline(caught[0].filename, caught[0].lineno)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.resize(batch, **options)


@pytest.mark.parametrize("rows", [0, 2, 64])
def test_labels_of_one_row_are_enough(rows):
    labels = torch.full((rows, 128), -100)
    labels[:1, 3] = 1
    labels[:, 100:] = 1
    scheduler = SequenceLengthScheduler(64, 128, duration=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.resize({"labels": labels})
    labels[:1, 3] = -100
    if rows:
        with pytest.warns(UserWarning, match="no label of a batch is left"):
            scheduler.resize({"labels": labels})


@pytest.mark.parametrize(
    ("ends", "longest", "message"),
    [
        ([0, 8, 20], 12, "cu_seqlens_q must end within the 12 tokens of query, got 20"),
        ([0, 12, 8], 12, "cu_seqlens_q must not decrease, got 8 after 12"),
        ([4, 8, 12], 12, "cu_seqlens_q must start with 0, got 4"),
        ([0, 8, 12], 4, "max_seqlen_q must be at least 8, the length of the longest sequence, got 4"),
    ],
)
def test_boundaries_of_no_packed_sequences(ends, longest, message):
    """Those of another batch, lengths in place of boundaries, or the length of another batch's longest sequence."""
    query = torch.randn(12, 2, 8, requires_grad=True)
    good, bad = (torch.tensor(values, dtype=torch.int32) for values in ([0, 2, 4], ends))
    alibi_attention_varlen(query, query, query, good, good, longest, longest).sum().backward()
    with pytest.raises(ValueError, match=message):  # a known call
        alibi_attention_varlen(query, query, query, bad, bad, longest, longest)


def test_positions_in_a_tensor_have_the_bounds_of_an_int():
    """A position of 2**62 was taken for 2**60."""
    query = torch.randn(1, 2, 3, 8)
    for start in (torch.tensor(2**62), 2**62):
        with pytest.raises(ValueError, match=r"query_start must be from -2\*\*60 to 2\*\*60, got 4611686018427387904"):
            alibi_attention(query, query, query, query_start=start)


@pytest.mark.parametrize(("shape", "warns"), [((1, 129, 2, 8), True), ((1, 128, 2, 8), False), ((1, 2, 129, 8), False)])
def test_tokens_before_heads(shape, warns):
    query = torch.randn(shape)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        alibi_attention(query, query, query)
        alibi_attention(query, query, query, alibi_slopes(shape[1]))
    assert [str(warning.message) for warning in caught] == warns * [
        "query (1, 129, 2, 8) has 129 heads of 2 tokens; if it is (batch, length, heads, head_dim), transpose query, "
        "key and value, else pass slopes"
    ]
    assert all(warning.filename == __file__ for warning in caught)


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("mode", ["truncate", "reshape"])
def test_a_schedule_that_cuts_nothing(mode, attached):
    scheduler, model = SequenceLengthScheduler(64, 128, duration=10000), Identity()
    if attached:
        scheduler.attach(model, mode=mode)

    def train(steps):
        for _ in range(steps):
            model(BATCH["input_ids"]) if attached else scheduler.resize(BATCH, mode=mode)
            scheduler.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(499)
    with pytest.warns(UserWarning, match="none of 500 batches was cut: .* the current length of 64 tokens") as caught:
        train(1)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(600)


def test_a_schedule_that_cuts_some_batches():
    some, full = SequenceLengthScheduler(16, 32, duration=10000), SequenceLengthScheduler(16, 32, duration=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        some.resize(BATCH)
        for scheduler in (some, full):
            for _ in range(600):
                scheduler.resize({"input_ids": torch.zeros(1, 9)}, copy=False)
                scheduler.step()


LAYER = {"d_model": 8, "nhead": 2, "dim_feedforward": 8}
OF_TOKENS_FIRST = {
    "MultiheadAttention": lambda **options: nn.MultiheadAttention(8, 2, **options),
    "TransformerEncoderLayer": lambda **options: nn.TransformerEncoderLayer(**LAYER, **options),
    "TransformerDecoderLayer": lambda **options: nn.TransformerDecoderLayer(**LAYER, **options),
    "TransformerEncoder": lambda **options: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**LAYER, **options), 1, enable_nested_tensor=False
    ),
    "TransformerDecoder": lambda **options: nn.TransformerDecoder(nn.TransformerDecoderLayer(**LAYER, **options), 1),
    "Transformer": lambda **options: nn.Transformer(**LAYER, num_encoder_layers=1, num_decoder_layers=1, **options),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", OF_TOKENS_FIRST)
def test_a_model_of_tokens_before_rows(name):
    """Rows were cut instead of tokens."""
    scheduler, model = SequenceLengthScheduler(4, 8, duration=10), OF_TOKENS_FIRST[name]()
    for wrapped in (model, torch.compile(model)):
        with pytest.raises(ValueError, match=rf"batch_first must be True in {name}, .* seq_dim=0"):
            scheduler.attach(wrapped)
    scheduler.attach(model, seq_dim=0)
    scheduler.attach(OF_TOKENS_FIRST[name](batch_first=True))
    scheduler.attach(nn.Sequential(OF_TOKENS_FIRST[name]()))  # it may turn its inputs
