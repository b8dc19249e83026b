"""Parts of batches: the parts of all ranks make up the batch, with labels that were shifted before."""

import dataclasses

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

from seqwarm_kernels import resize_batch
from seqwarm_kernels.parallel import shard_sequence

from ..support.ranks import one_rank

RANKS = 4


@pytest.fixture(scope="module")
def mesh():
    with one_rank():
        yield init_device_mesh("cpu", (1,))


@pytest.fixture
def parts(mesh, monkeypatch):
    """shard_sequence on every rank of four: only the rank and size of the mesh differ."""

    def sharded(batch, **options):
        found = []
        for rank in range(RANKS):
            with monkeypatch.context() as patch:
                patch.setattr(mesh, "size", lambda mesh_dim=None: RANKS)
                patch.setattr(mesh, "get_local_rank", lambda mesh_dim=None, rank=rank: rank)
                found.append(shard_sequence(batch, mesh, **options))
        return found

    return sharded


def batch(rows=4, length=16):
    torch.manual_seed(0)
    input_ids = torch.randint(1, 50, (rows, length))
    mask = torch.ones_like(input_ids)
    mask[1, -3:] = 0
    labels = input_ids.masked_fill(mask == 0, -100)
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "labels": labels,
        "ids": list("abcd"),
        "weight": torch.rand(rows),
    }


@dataclasses.dataclass
class Rows:
    """Takes no more entries."""

    ids: torch.Tensor


def joined(found, name, dim=1):
    return torch.cat([part[name] for part in found], dim)


def test_tokens(parts):
    whole = batch()
    found = parts(whole)
    for name in ("input_ids", "attention_mask", "labels"):
        assert torch.equal(joined(found, name), whole[name])
        assert found[1][name].is_contiguous()
    shifted = joined(found, "shift_labels")
    assert torch.equal(shifted[:, :-1], whole["labels"][:, 1:])
    assert (shifted[:, -1] == -100).all()
    counted = (whole["labels"][:, 1:] != -100).sum()
    assert all(torch.equal(part["num_items_in_batch"], counted / RANKS) for part in found)
    assert all(part["ids"] is whole["ids"] and part["weight"] is whole["weight"] for part in found)
    assert whole.keys() == {"input_ids", "attention_mask", "labels", "ids", "weight"}  # not changed
    assert parts(whole, shift_labels=False)[0].keys() == whole.keys() | {"context_part"}


def test_rows(parts):
    whole = batch(rows=8) | {"ids": list("abcdefgh")}
    found = parts(whole, by="rows")
    for name in ("input_ids", "attention_mask", "labels", "weight"):
        assert torch.equal(joined(found, name, 0), whole[name])
        assert found[1][name].is_contiguous()  # models of transformers take views of their labels
    assert [part["ids"] for part in found] == [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]
    assert torch.equal(joined(found, "shift_labels", 0)[:, :-1], whole["labels"][:, 1:])


def test_rows_are_resized_before_labels_are_shifted(parts):
    whole = batch()
    found = parts(whole, seq_len=8)  # padded to 4 tokens on each rank
    assert torch.equal(joined(found, "input_ids")[:, :8], whole["input_ids"][:, :8])
    assert (joined(found, "shift_labels")[:, 7:] == -100).all()
    reshaped = parts(resize_batch({"labels": whole["labels"]}, 8, mode="reshape"), by="rows")
    assert torch.equal(joined(reshaped, "labels", 0), whole["labels"].view(8, 8))


def test_lengths_that_the_ranks_do_not_divide_are_padded(parts):
    whole = batch(rows=3, length=18)
    found = parts(whole)
    assert [part["input_ids"].shape for part in found] == [(3, 8)] * RANKS  # a multiple of 4 on each rank
    expected = whole | {"shift_labels": torch.nn.functional.pad(whole["labels"], (0, 1), value=-100)[:, 1:]}
    for name, padding in (("input_ids", 0), ("attention_mask", 0), ("labels", -100), ("shift_labels", -100)):
        tokens = joined(found, name)
        assert torch.equal(tokens[:, :18], expected[name])
        assert (tokens[:, 18:] == padding).all()
    assert found[0]["num_items_in_batch"] == (whole["labels"][:, 1:] != -100).sum() / RANKS


@pytest.mark.parametrize("told_by", ["position_ids", "cu_seq_lens_q"])
def test_packed(parts, told_by):
    lengths, total = [5, 9, 3], 17
    starts = torch.tensor([0, 5, 14, 17], dtype=torch.int32)
    input_ids = torch.arange(1, total + 1)[None]
    told = {"position_ids": torch.cat([torch.arange(length) for length in lengths])[None], "cu_seq_lens_q": starts}
    found = parts({"input_ids": input_ids, "labels": input_ids.clone(), told_by: told[told_by]})
    assert [part["input_ids"].shape for part in found] == [(1, 8)] * RANKS  # a multiple of 4 on each rank
    assert torch.equal(joined(found, "input_ids")[:, :total], input_ids)
    assert not joined(found, "input_ids")[:, total:].any()
    shifted = joined(found, "shift_labels")[0]
    expected = torch.arange(2, total + 2)
    expected[16] = -100
    assert torch.equal(shifted[:total], expected)
    assert (shifted[total:] == -100).all()
    assert (joined(found, "labels")[0, total:] == -100).all()
    assert found[0]["num_items_in_batch"] == 16 / RANKS
    assert all(torch.equal(part["cu_seq_lens_q"], starts) for part in found)
    if told_by == "position_ids":
        assert all(part["cu_seq_lens_k"].dtype == torch.int32 and part["max_length_q"] == 9 for part in found)


def test_the_part_says_what_it_is(parts):
    """Where the batch can take more entries."""
    for by in ("tokens", "rows"):
        assert all(part["context_part"] == by for part in parts(batch(), by=by))
        (of_encoding, *_) = parts(transformers.BatchEncoding(batch()), by=by)
        assert of_encoding["context_part"] == by
        assert type(of_encoding) is transformers.BatchEncoding
        assert parts(Rows(torch.zeros(4, 16)), by=by)[0].ids.shape == {"tokens": (4, 4), "rows": (1, 16)}[by]


@pytest.mark.parametrize("make", [batch, lambda: {"a": batch(), "b": batch()}])
def test_a_part_is_not_resized(parts, make):
    for by in ("tokens", "rows"):
        with pytest.raises(ValueError, match="context_part"):
            resize_batch(parts(make(), by=by, shift_labels=False)[0], 2)


@pytest.mark.parametrize("shape", [(16,), (1, 16), (3, 4, 16)])
def test_position_ids_of_other_shapes(parts, shape):
    """Each rank has the positions of its tokens, or of its rows."""
    positions = torch.arange(torch.Size(shape).numel()).view(shape)
    found = parts({"input_ids": torch.zeros(4, 16, dtype=torch.long), "position_ids": positions})
    assert torch.equal(joined(found, "position_ids", -1), positions)
    by_rows = parts({"input_ids": torch.zeros(4, 16, dtype=torch.long), "position_ids": positions}, by="rows")
    if len(shape) == 3:
        assert torch.equal(joined(by_rows, "position_ids", 1), positions)
    else:
        assert all(torch.equal(part["position_ids"], positions) for part in by_rows)


def test_keys_leave_others_whole(parts):
    whole = batch() | {"pixels": torch.rand(4, 3, 5, 5)}
    found = parts(whole, keys=["input_ids", "labels"])
    assert found[2]["pixels"] is whole["pixels"]
    assert found[2]["attention_mask"] is whole["attention_mask"]
    assert torch.equal(joined(found, "shift_labels")[:, :-1], whole["labels"][:, 1:])


PACKED = {"cu_seqlens": torch.tensor([0, 8, 16])}


@pytest.mark.parametrize(
    ("rows", "changes", "options", "name"),
    [
        (3, {}, {"by": "rows"}, "batch"),
        (1, PACKED, {"by": "rows"}, "by"),
        (4, {"attention_mask": None}, {"seq_len": 6}, "batch"),
        (4, {"attention_mask": torch.ones(4, 1, 16, 16)}, {}, "attention_mask"),
        (4, {"labels": torch.zeros(4, dtype=torch.long)}, {}, "labels"),
    ],
)
def test_what_cannot_be_sharded(parts, rows, changes, options, name):
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        parts({"input_ids": torch.zeros(rows, 16), **changes}, **options)
