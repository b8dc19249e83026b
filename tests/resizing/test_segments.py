"""mode="segments" and mode="window": shapes stay, and segments are those of lists that are cut by hand."""

from collections import UserDict
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seqwarm_kernels import SequenceLengthScheduler, resize_batch
from tests.support.cut_tokens import pieces_of
from tests.support.tiers import examples

IGNORED = -100
ADDED = {
    "position_ids": {"use_cache"},
    "cu_seq_lens": {"use_cache", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"},
    "segment_length": {"segment_length", "attention_mask"},
}


@st.composite
def rows_of_runs(draw):
    """Rows of one length, each a list of (number of tokens, is padding): padding, documents, padding."""
    length = draw(st.integers(1, 12))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        left = draw(st.integers(0, length - 1))
        right = draw(st.integers(0, length - 1 - left))
        ends = draw(st.sets(st.integers(1, length - left - right), max_size=3)) | {length - left - right}
        sizes = [end - start for start, end in zip([0, *sorted(ends)], sorted(ends), strict=False)]
        runs = [(left, True), *((size, False) for size in sizes), (right, True)]
        rows.append([run for run in runs if run[0]])
    return rows


def batch_of(rows, told_by):
    """A batch of rows, whose documents are told by an entry of this name."""
    mask = torch.tensor([[not padding for size, padding in row for _ in range(size)] for row in rows]).long()
    ids = torch.arange(100, 100 + mask.numel()).view_as(mask)
    batch = {"input_ids": ids, "labels": ids.clone(), "shift_labels": ids + 1, "attention_mask": mask}
    if told_by == "position_ids":
        batch[told_by] = torch.tensor([[place for size, _ in row for place in range(size)] for row in rows])
    elif told_by == "seq_idx":
        numbers = [[number for number, (size, _) in enumerate(row) for _ in range(size)] for row in rows]
        batch[told_by] = torch.tensor(numbers, dtype=torch.int32)
    else:
        sizes = [size for row in rows for size, _ in row]
        batch[told_by] = torch.tensor([0, *sizes, 0]).cumsum(0).int()  # one that is not used
    return batch


@examples(50)
@given(rows_of_runs(), st.integers(1, 14), st.sampled_from(["position_ids", "seq_idx", "cu_seqlens"]), st.booleans())
def test_segments_are_those_of_lists_cut_by_hand(rows, length, told_by, keeps_first):
    batch = batch_of(rows, told_by)
    before = {name: value.clone() for name, value in batch.items()}
    options = {"boundaries": "cu_seq_lens", "documents": 5, "keep_first_labels": keeps_first}
    resized, info = resize_batch(batch, length, mode="segments", return_info=True, **options)
    runs = [run for row in rows for run in row]
    pieces = [(len(piece), padding) for size, padding in runs for piece in pieces_of(range(size), length)]
    shape = batch["input_ids"].shape

    places = torch.tensor([place for size, _ in pieces for place in range(size)]).view(shape)
    is_padding = torch.tensor([padding for size, padding in pieces for _ in range(size)]).view(shape)
    assert torch.equal(resized["position_ids"], places)
    assert torch.equal(resized["input_ids"], before["input_ids"])
    is_hidden = is_padding if keeps_first else is_padding | (places == 0)
    assert torch.equal(resized["labels"], before["labels"].masked_fill(is_hidden, IGNORED))
    assert torch.equal(resized["shift_labels"], before["shift_labels"].masked_fill(is_padding, IGNORED))
    assert "attention_mask" not in resized

    ends = torch.tensor([size for size, _ in pieces]).cumsum(0).tolist()
    bounds = resized["cu_seq_lens_q"].tolist()
    assert bounds[: len(ends) + 1] == [0, *ends]
    assert set(bounds[len(ends) :]) == {places.numel()}
    assert resized["cu_seq_lens_k"] is resized["cu_seq_lens_q"]
    if told_by == "cu_seqlens":
        assert resized[told_by].tolist() == bounds
    elif told_by == "seq_idx":  # equal in a segment, and different on both sides of a boundary
        assert torch.equal(resized[told_by].diff() != 0, (places == 0)[:, 1:])

    assert info.valid_lengths.tolist() == (~is_padding).sum(1).tolist()
    assert info.num_valid_tokens == (~is_padding).sum()
    assert torch.equal(info.position_ids, places)
    assert all(torch.equal(batch[name], before[name]) for name in before)


@pytest.mark.parametrize("boundaries", ADDED)
def test_what_is_added_for_each_kind_of_boundaries(boundaries):
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "name": "a"}
    resized = resize_batch(batch, 5, mode="segments", boundaries=boundaries)
    assert resized.keys() == {"input_ids", "labels", "name", "position_ids"} | ADDED[boundaries]
    assert resized["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]] * 2
    assert resized["labels"][0].tolist() == [IGNORED, 1, 2, 3, 4, IGNORED, 6, 7, 8, 9, IGNORED, 11]
    assert resized.get("use_cache", False) is False
    assert resized.get("segment_length", 5) == 5


def test_sizes_are_those_of_all_lengths():
    """Of a schedule's shortest and longest length: a compiled model sees no other shape or number."""
    schedule = SequenceLengthScheduler(3, 9, duration=6, step_size=1)
    ids = torch.arange(24).view(2, 12)
    seen = set()
    for _ in range(8):
        resized = schedule.resize({"input_ids": ids}, mode="segments", boundaries="cu_seq_lens", documents=2)
        seen.add((len(resized["cu_seq_lens_q"]), resized["max_length_q"], resized["max_length_k"]))
        schedule.step()
    assert seen == {(2 * (4 + 2) + 1, 9, 9)}


def test_more_documents_than_there_is_room_for_are_an_error():
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "position_ids": torch.tensor([[0, 1] * 4])}
    options = {"mode": "segments", "boundaries": "cu_seq_lens"}
    with pytest.raises(ValueError, match="documents must be more: a batch has room for 2 segments"):
        resize_batch(batch, 8, **options)
    assert resize_batch(batch, 8, documents=3, **options)["cu_seq_lens_q"].tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"targets": 1}, {"targets": [1, 1, 1, 1]}),
        ({"label_ids": 1}, {"label_ids": [IGNORED, 1, IGNORED, 1]}),
        ({"labels": 1, "loss_mask": 1}, {"labels": [IGNORED, 1, IGNORED, 1], "loss_mask": [0, 1, 0, 1]}),
        ({"targets": 1, "loss_mask": 1}, {"targets": [1, 1, 1, 1], "loss_mask": [1, 1, 1, 1]}),
    ],
)
def test_labels_by_their_names(labels, expected):
    batch = {name: torch.full((1, 4), value) for name, value in {"input_ids": 5, **labels}.items()}
    resized = resize_batch(batch, 2, mode="segments")
    assert {name: resized[name][0].tolist() for name in expected} == expected
    name = next(iter(labels))
    given = resize_batch(batch, 2, mode="segments", pad_values={name: -1})[name][0].tolist()
    assert given == [-1 if value == IGNORED else value for value in expected[name]]


def test_entries_go_beside_the_tokens():
    ids = torch.arange(8).view(2, 4)
    inner = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    resized = resize_batch({"model": UserDict(inner), "labels": ids}, 2, mode="segments")
    assert resized["model"].keys() == {"input_ids", "position_ids", "use_cache"}
    assert inner.keys() == {"input_ids", "attention_mask"}
    assert resized.keys() == {"model", "labels"}
    assert resize_batch({"model.input_ids": ids}, 2, mode="segments").keys() == {
        *("model.input_ids", "model.position_ids", "model.use_cache")
    }
    pair = resize_batch({"a": dict(inner), "b": dict(inner)}, 2, mode="segments")
    assert all(pair[name].keys() == {"input_ids", "position_ids", "use_cache"} for name in "ab")


@dataclass
class Batch:
    input_ids: Tensor


IDS = torch.arange(8).view(2, 4)
SQUARE = {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 4, 4)}
SHORT = {"input_ids": IDS, "attention_mask": torch.tensor([[0, 1, 1, 1]] * 2)}


@pytest.mark.parametrize(
    ("batch", "options", "error", "message"),
    [
        ({"input_ids": IDS}, {"boundaries": "mask"}, ValueError, "boundaries must be one of"),
        ({"input_ids": IDS}, {"mode": "flatten", "boundaries": "position_ids"}, ValueError, "needs mode='segments'"),
        ({"input_ids": IDS}, {"documents": 0}, ValueError, "documents must be at least 1"),
        ({"input_ids": IDS}, {"seq_dim": 0}, ValueError, "seq_dim must be 1 with mode='segments'"),
        ({"input_ids": IDS}, {"mode": "window", "out": {"input_ids": IDS}}, ValueError, "out must be None"),
        (SQUARE, {}, ValueError, "needs one attention_mask"),
        ({"input_ids": IDS, "position_ids": torch.zeros(3, 2, 4)}, {}, ValueError, "needs batch.'position_ids'"),
        (SHORT, {"boundaries": "segment_length"}, ValueError, "must begin with a valid token"),
        (
            {"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 0, 1]])},
            {"boundaries": "segment_length"},
            ValueError,
            "rows of one document",
        ),
        (Batch(IDS), {}, TypeError, "batch must be a mapping to get 'position_ids'"),
    ],
)
def test_bad_input(batch, options, error, message):
    with pytest.raises(error, match=message):
        resize_batch(batch, 2, **{"mode": "segments", **options})


def test_positions_that_go_on_are_not_documents():
    """Of rows of one document, position ids may begin anywhere. `segment_length` then holds for all rows."""
    resized = resize_batch({"input_ids": IDS, "position_ids": IDS}, 3, mode="segments", boundaries="segment_length")
    assert resized["position_ids"].tolist() == [[0, 1, 2, 0]] * 2


def test_a_window_changes_nothing_else():
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "attention_mask": (ids % 12 > 1).long()}
    resized, info = resize_batch(batch, 4, mode="window", return_info=True)
    assert resized == {**batch, "window": 3}
    assert info.num_valid_tokens == 20
    assert info.position_ids[1].tolist() == [0, 0, *range(10)]
