"""Batches that lose all their labels by resizing: a warning says so once."""

import linecache
import warnings

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from seqwarm_kernels import SequenceLengthScheduler, resize_batch
from seqwarm_kernels.schedule import lost_labels
from seqwarm_kernels.schedule import scheduler as scheduler_module

from ..support.schedules import IDS

#: Labels of which the first half is ignored.
LATE = torch.cat([torch.full((2, 4), -100), IDS[:, 4:]], 1)


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
