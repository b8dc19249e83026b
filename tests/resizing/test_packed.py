"""Packed batches: each sequence is cut on its own, against lists cut in plain Python."""

from copy import deepcopy
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from seqwarm_kernels import resize_batch
from seqwarm_kernels.data import PackedCollator
from tests.support.cut_tokens import METHODS as METHODS_OF_ROWS
from tests.support.cut_tokens import cut_sequences, taken
from tests.support.same import assert_same
from tests.support.tiers import examples

METHODS = [method for method in METHODS_OF_ROWS if "keep_last_token" not in method]
INDICES = ["seq_idx", "sequence_id", "document_id", "document_ids", "doc_ids"]
BOUNDARIES = ["cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"]
BOUNDARIES += ["cu_seq_q", "cu_seq_k", "cu_doc_lens"]
#: Names of the length of the longest sequence.
LONGEST = ["max_length_q", "max_length_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_q", "max_k"]
LONGEST += ["max_doc_len"]
#: tests/ops/test_resize_packed.py has the others.
BACKENDS = [None, "reference"]


def row(values):
    return torch.tensor(values)[None]


def bounds_of(lengths, dtype=torch.int64):
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


@pytest.mark.parametrize("name", BOUNDARIES)
def test_every_name_of_boundaries(name):
    resized = resize_batch({"input_ids": row(range(8)), name: bounds_of([5, 3])}, 4)
    assert resized["input_ids"].tolist() == [[0, 1, 2, 3, 5, 6, 7]]
    assert resized[name].tolist() == [0, 4, 7]


@pytest.mark.parametrize("name", LONGEST)
def test_every_name_of_the_longest_sequence(name):
    batch = {"input_ids": row(range(8)), "cu_seqlens": bounds_of([5, 3])}
    assert resize_batch(batch | {name: 5}, 4)[name] == 4
    assert resize_batch(batch | {name: torch.tensor(5)}, 4)[name].equal(torch.tensor(4))


def flat(entries):
    """Without the dimension of the one row."""
    return {name: value[0] if getattr(value, "ndim", 0) > 1 else value for name, value in entries.items()}


@examples(40)
@given(
    lengths=st.lists(st.integers(0, 13), min_size=1, max_size=6).filter(
        lambda lengths: len(lengths) != sum(lengths) > 0
    ),
    seq_len=st.integers(1, 15) | st.just(2**63 - 1),
    method=st.sampled_from(METHODS),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    is_flat=st.booleans(),
    copy=st.booleans(),
    backend=st.sampled_from(BACKENDS),
)
def test_each_sequence_is_cut_on_its_own(lengths, seq_len, method, dtype, is_flat, copy, backend):
    bounds, ids, olds = bounds_of(lengths, dtype), row(range(sum(lengths))), torch.arange(len(lengths))
    rows = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": None,
        "max_length_q": max(lengths),
        "input_ids": ids,
        "labels": (ids + 1000).to(dtype),
        "position_ids": torch.cat([torch.arange(2, length + 2, dtype=dtype) for length in lengths])[None],
        "seq_idx": olds.int().repeat_interleave(torch.tensor(lengths))[None],
        "attention_mask": ids % 3 > 0,
        "features": torch.stack([ids, -1.5 * ids], dim=-1),
        "weights": olds + 0.5,
        "images": tuple({"id": old} for old in range(len(lengths))),
        "scale": torch.tensor(3.0),
    }
    batch = flat(rows) if is_flat else rows
    before = deepcopy(batch)

    sources, pieces = cut_sequences(lengths, seq_len, **method)
    new_lengths = [len(piece) for piece in pieces]
    slots = [(0, int(bounds[old]) + place, again) for piece in pieces for old, place, again in piece]
    at_start = [(0, int(bounds[old]) + slot, False) for piece in pieces for slot, (old, *_) in enumerate(piece)]
    expected = rows | {
        **{name: taken(rows[name], [slots], seq_len) for name in ("input_ids", "attention_mask", "features")},
        "cu_seq_lens_q": bounds_of(new_lengths, dtype),
        "max_length_q": max(new_lengths),
        "labels": taken(rows["labels"], [slots], seq_len, fill_value=-100, fill_repeats=True),
        "position_ids": taken(rows["position_ids"], [at_start], seq_len),
        "seq_idx": row([number for number, piece in enumerate(pieces) for _ in piece]).int(),
        "weights": rows["weights"][sources],
        "images": tuple(rows["images"][old] for old in sources),
    }

    resized, info = resize_batch(batch, seq_len, copy=copy, return_info=True, backend=backend, **method)

    assert list(resized) == list(batch)
    assert all(resized[name].dtype == value.dtype for name, value in batch.items() if isinstance(value, torch.Tensor))
    assert_same(resized, flat(expected) if is_flat else expected)
    assert_same(batch, before)
    valid = expected["attention_mask"][0].split(new_lengths)
    assert info.valid_lengths.tolist() == [piece.sum() for piece in valid]
    assert info.position_ids.equal(torch.cat([(piece.cumsum(0) - 1) * piece for piece in valid])[None])
    assert info.num_valid_tokens == sum(info.valid_lengths)
    assert (resized["features"].data_ptr() == batch["features"].data_ptr()) == (not copy and seq_len >= max(lengths))


@examples(30)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=5).filter(lambda lengths: max(lengths) > 1),
    seq_len=st.integers(1, 10),
    method=st.sampled_from(METHODS),
    names=st.sampled_from([["position_ids"], ["seq_idx", "position_ids"], *([name] for name in INDICES)]),
    seq_dim=st.sampled_from([0, 1]),
    has_mask=st.booleans(),
)
def test_sequences_are_found_by_positions(lengths, seq_len, method, names, seq_dim, has_mask):
    """The result is that of the same batch with boundaries."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    numbers = 7 - torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
    batch = {"input_ids": row(range(sum(lengths)))}
    batch |= {name: positions if name == "position_ids" else numbers for name in names}
    if has_mask:
        batch["attention_mask"] = torch.ones_like(positions)
    if seq_dim == 0:
        batch = {name: value.T for name, value in batch.items()}
    expected = resize_batch(batch | {"cu_seqlens": bounds_of(lengths)}, seq_len, seq_dim=seq_dim, **method)
    del expected["cu_seqlens"]
    assert_same(resize_batch(batch, seq_len, seq_dim=seq_dim, **method), expected)


def test_a_batch_without_tokens_stays():
    batch = {"input_ids": torch.zeros(1, 0, dtype=torch.int64), "max_seqlen": 0}
    for bounds in ([0], [0, 0]):
        assert_same(
            resize_batch(batch | {"cu_seqlens": torch.tensor(bounds)}, 3), {**batch, "cu_seqlens": torch.tensor(bounds)}
        )


def collated():
    return PackedCollator()([[1, 2, 3, 4, 5], [6, 7, 8], [9]])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32], ids=str)
def test_positions_and_indices_of_other_dtypes(dtype):
    """In uint8, 0 follows 255, but a position does not."""
    positions = torch.tensor([[*range(256), 0, 1, 2]]).to(dtype)
    for more in ({}, {"attention_mask": torch.ones(1, 259)}):
        resized = resize_batch({"input_ids": torch.arange(259)[None], "position_ids": positions, **more}, 200)
        assert resized["input_ids"].tolist() == [[*range(200), 256, 257, 258]]
    if not dtype.is_floating_point:
        indices = torch.tensor([[255, 255, 255, 0, 0, 1]]).to(dtype)
        resized = resize_batch({"input_ids": torch.arange(6)[None], "seq_idx": indices}, 1)
        assert resized["input_ids"].tolist() == [[0, 3, 5]]


@pytest.mark.parametrize(
    "entry",
    [{"cu_seqlens": torch.tensor([0, 5, 15])}, {"position_ids": torch.tensor([[*range(5), *range(10)]])}],
    ids=["boundaries", "positions"],
)
def test_a_trace_refuses_values_that_it_would_keep(entry):
    def resized(ids, values):
        return resize_batch({"input_ids": ids, name: values}, 4)["input_ids"]

    ((name, values),) = entry.items()
    with pytest.raises(RuntimeError, match="get value out of a tracing tensor"):
        make_fx(resized)(torch.arange(15)[None], values)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(DataDependentOutputException):
        resized(torch.arange(15)[None], values)


def test_boundaries_of_several_names_share_no_memory():
    """Unless they shared it before."""
    bounds = torch.tensor([0, 5, 15])
    batch = {"input_ids": torch.arange(15)[None], "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.clone()}
    resized = resize_batch(batch, 4)
    resized["cu_seq_lens_q"].fill_(-1)
    assert resized["cu_seq_lens_k"].tolist() == [0, 4, 8]
    resized = resize_batch(batch | {"cu_seq_lens_k": bounds}, 4)
    assert resized["cu_seq_lens_k"] is resized["cu_seq_lens_q"]


def test_tensors_that_keys_does_not_name_pass_through():
    images, row_weight = torch.zeros(4, 3, 8, 8), torch.tensor([7])
    resized = resize_batch(collated() | {"pixel_values": images}, 2, keys=["input_ids", "labels"])
    assert resized.pop("pixel_values") is images
    assert_same(resized, resize_batch(collated(), 2))
    assert resize_batch(collated() | {"row_weight": row_weight}, 2)["row_weight"] is row_weight


@pytest.mark.parametrize("backend", BACKENDS)
def test_features_carry_gradients(backend):
    features, weights = torch.ones(1, 9, 2, requires_grad=True), torch.ones(3, requires_grad=True)
    batch = collated() | {"features": features, "weights": weights}
    resized = resize_batch(batch, 2, backend=backend)
    assert resized["input_ids"].tolist() == [[1, 2, 6, 7, 9]]
    (resized["features"].sum() + resized["weights"] @ torch.arange(3.0)).backward()
    assert features.grad[0, :, 0].tolist() == [1, 1, 0, 0, 0, 1, 1, 0, 1]
    assert weights.grad.tolist() == [0, 1, 2]
    with torch.no_grad():
        assert not resize_batch(batch, 2, backend=backend)["features"].requires_grad


PADDED = {"input_ids": torch.arange(12).view(2, 6), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 5 + [0]])}
NOT_PACKED = [
    {"input_ids": row(range(6)), "position_ids": row(range(6))},
    {"input_ids": torch.arange(12).view(2, 6), "position_ids": torch.arange(6).expand(2, 6)},
    {"input_ids": torch.arange(12).view(2, 6), "position_ids": torch.arange(6)},
    PADDED | {"position_ids": torch.tensor([[1, 1, 0, 1, 2, 3], [2, 3, 4, 5, 6, 1]])},  # of generation, of RoBERTa
    PADDED | {"position_ids": torch.tensor([[0, 0, 0, 1, 2, 3], [0, 1, 3, 4, 5, 0]])},
    {"input_ids": torch.arange(12).view(2, 6), "position_ids": torch.arange(3).repeat(2, 2)},  # of several sequences
    {"input_ids": torch.arange(12).view(2, 6), "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)},
    {"input_ids": torch.arange(12).view(2, 6), "position_ids": None, "cu_seq_lens_q": None},
    {"input_ids": torch.arange(36).view(6, 6), "position_ids": torch.arange(6)},
    {"input_ids": torch.arange(12).view(2, 6), "document_ids": torch.tensor([3, 5])},  # an entry for each row
    {"input_ids": row(range(6)), "labels": torch.tensor([1]), "document_ids": torch.tensor([3])},
    {"input_ids": torch.rand(6, 6), "position_ids": torch.arange(6)},
    {"input_ids": torch.arange(12).view(2, 6), "position_ids": torch.arange(5)},
    {"input_ids": row(range(6)), "position_ids": row(range(6)), "attention_mask": row([0, 0, 1, 1, 1, 1])},
    {"input_ids": row(range(6)), "position_ids": row(range(6)), "attention_mask": row([1, 1, 0, 1, 1, 1])},
]


@pytest.mark.parametrize("batch", NOT_PACKED)
def test_other_batches_are_rows(batch):
    assert resize_batch(batch, 4)["input_ids"].shape == (len(batch["input_ids"]), 4)


@pytest.mark.parametrize("flat", [{"input_ids": torch.arange(8)}, {"inputs_embeds": torch.arange(32.0).view(8, 4)}])
def test_flat_tensors_with_position_ids_are_one_sequence(flat):
    (name,) = flat
    resized = resize_batch(flat | {"position_ids": torch.arange(8)}, 2)
    assert_same(resized, {name: flat[name][:2], "position_ids": torch.arange(2)})


@pytest.mark.parametrize("positions", [[0] * 8, [0, 1, 2, 0, 0, 0, 1, 0]])
def test_new_position_ids_are_those_at_the_start_of_a_sequence(positions):
    """A difference to the piece's own first position would be negative where positions do not follow one another."""
    batch = {"input_ids": row(range(8)), "position_ids": row(positions), "cu_seqlens": torch.tensor([0, 5, 8])}
    if any(positions):
        batch["attention_mask"] = row([1, 1, 1, 0, 0, 1, 1, 0])
    resized = resize_batch(batch, 3, mode="reshape", remainder="pad")
    assert resized["position_ids"].tolist() == [[*positions[:3], *positions[:2], *positions[5:]]]


HALVES, THIRD = row([0, 1, 2, 3, 0, 1, 2, 3]), row([0, 1, 2, 0, 1, 2, 3, 4])
TRUSTED = [
    ({"position_ids": THIRD, "seq_idx": row([0] * 4 + [1] * 4)}, [0, 1, 4, 5]),
    ({"position_ids": THIRD, "cu_seqlens": torch.tensor([0, 4, 8])}, [0, 1, 4, 5]),
    ({"position_ids": HALVES, "cu_seqlens": torch.tensor([0, 8])}, [0, 1]),
    ({"seq_idx": row([0] * 3 + [1] * 5), "cu_seqlens": torch.tensor([0, 4, 8])}, [0, 1, 4, 5]),
    ({"position_ids": HALVES, "seq_idx": row([0] * 8)}, [0, 1]),
    ({"position_ids": row(range(8)), "cu_seqlens": torch.tensor([0, 4, 8])}, [0, 1, 4, 5]),
    ({"position_ids": row([0] * 8), "cu_seqlens": torch.tensor([0, 5, 8])}, [0, 1, 5, 6]),
    ({"position_ids": HALVES, "decoder_position_ids": THIRD}, [0, 1, 4, 5]),
    ({"position_ids": row([0, 1, 2, 3, 10, 11, 12, 13])}, [0, 1, 4, 5]),
    ({"position_ids": row([0, 1, 2, 3, 10, 11, 12, 13]), "attention_mask": row([1] * 8)}, [0, 1, 4, 5]),
    # padding between sequences joins the sequence before it
    ({"position_ids": row([0, 1, 2, 0, 0, 1, 0, 0]), "attention_mask": row([1, 1, 1, 0, 1, 1, 0, 0])}, [0, 1, 4, 5]),
]


@pytest.mark.parametrize(("names", "kept"), TRUSTED)
def test_boundaries_are_trusted_before_indices_before_position_ids(names, kept):
    for options in ({}, {"keys": ["input_ids"]}):
        assert resize_batch({"input_ids": row(range(8)), **names}, 2, **options)["input_ids"].tolist() == [kept]


def test_a_decoder_of_other_length():
    """It passes through, as `keys` says."""
    batch = {"input_ids": row(range(8)), "position_ids": HALVES, "decoder_position_ids": row(range(5))}
    assert resize_batch(batch, 2, keys=["input_ids"])["decoder_position_ids"] is batch["decoder_position_ids"]
    with pytest.raises(ValueError, match=r"'decoder_position_ids'\] must have one row of 8 tokens, got \(1, 5\)"):
        resize_batch(batch, 2)


IDS, BOUNDS = row(range(9)), torch.tensor([0, 5, 9])
REFUSED = [
    ({"cu_seqlens": torch.tensor([0.0, 9.0])}, {}, TypeError, "'cu_seqlens'.* int32 or int64"),
    ({"cu_seqlens": torch.tensor([[0, 5, 9]])}, {}, TypeError, "'cu_seqlens'.* of one row"),
    ({"cu_seqlens": torch.tensor([1, 5, 9])}, {}, ValueError, "must begin with 0 and not fall"),
    ({"cu_seqlens": torch.tensor([0, 6, 5, 9])}, {}, ValueError, "must begin with 0 and not fall"),
    ({"cu_seqlens": torch.tensor([0, 5, 8])}, {}, ValueError, r"'input_ids'\] must have one row of 8 tokens"),
    ({"cu_seqlens_k": torch.tensor([0, 4, 9])}, {}, ValueError, "'cu_seqlens_k'"),
    ({"labels": row(range(8))}, {}, ValueError, r"'labels'\] must have one row of 9 tokens"),
    ({"input_ids": torch.arange(18).view(2, 9)}, {}, ValueError, r"'input_ids'\] must have one row of 9 tokens"),
    ({"position_ids": torch.arange(27).view(3, 1, 9)}, {}, ValueError, r"'position_ids'\] must have one row"),
    ({"input_ids": None}, {}, ValueError, "batch must hold a tensor of the 9 packed tokens"),
    ({"x_mask": torch.ones(1, 1, 9, 9)}, {}, ValueError, "'x_mask'.* pairs of tokens"),
    ({"x": IDS.to_sparse()}, {}, TypeError, r"batch\['x'\] must be a dense tensor"),
    ({"x": IDS.to("meta")}, {}, ValueError, "must be on one device"),
    ({}, {"keep_last_token": True}, ValueError, "keep_last_token"),
    ({}, {"out": {}}, ValueError, "out must be None"),
    ({}, {"keys": ["nothing"]}, ValueError, "keys names 'nothing'"),
    ({}, {"mode": "reshape", "remainder": "overlap", "pad_values": {"labels": 0.5}}, ValueError, "'labels'"),
]


@pytest.mark.parametrize(("more", "options", "error", "message"), REFUSED)
def test_what_is_not_recognized_is_refused(more, options, error, message):
    batch = {"cu_seqlens": BOUNDS, "input_ids": IDS, **({} if "input_ids" in more else {"labels": IDS}), **more}
    with pytest.raises(error, match=message):
        resize_batch(batch, 4, **options)


def test_a_compiled_graph_refuses_positions_that_start_anew():
    compiled = torch.compile(lambda batch: resize_batch(batch, 4), fullgraph=True, backend="eager")
    assert compiled(NOT_PACKED[0])["input_ids"].shape == (1, 4)
    restarting = {"input_ids": row(range(6)), "position_ids": row([0, 1, 2, 0, 1, 2])}
    for batch in (restarting, restarting | {"attention_mask": torch.ones(1, 6)}):
        with pytest.raises(RuntimeError, match="hold packed sequences: resize them outside of the graph"):
            compiled(batch)
    hidden = row([1, 1, 1, 0, 0, 0]).float()  # whose positions count nothing
    assert compiled(restarting | {"attention_mask": hidden})["input_ids"].shape == (1, 4)
