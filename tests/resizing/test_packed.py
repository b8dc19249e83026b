"""Packed batches: each sequence is cut on its own, against lists cut in plain Python."""

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
from tests.support.cut_tokens import cut_sequences
from tests.support.same import assert_same
from tests.support.tiers import examples

METHODS = [method for method in METHODS_OF_ROWS if "keep_last_token" not in method]
INDICES = ["seq_idx", "sequence_id", "document_id", "document_ids", "doc_ids"]
#: Names of the boundaries, and of the longest sequence.
SPELLINGS = [
    (["cu_seq_lens_q", "cu_seq_lens_k"], ["max_length_q", "max_length_k"]),
    (["cu_seqlens_q", "cu_seqlens_k"], ["max_seqlen_q", "max_seqlen_k"]),
    (["cu_seqlens"], ["max_seqlen"]),
    (["cu_seq_q", "cu_seq_k"], ["max_q", "max_k"]),
    (["cu_seq_lens"], []),
    (["cu_doc_lens"], ["max_doc_len"]),
]
#: tests/ops/test_resize_packed.py has the others.
BACKENDS = [None, "reference"]


def row(values, is_flat=False, dtype=torch.int64):
    made = torch.tensor(values, dtype=dtype)
    return made if is_flat else made[None]


def bounds_of(lengths, dtype=torch.int64):
    return torch.tensor([0, *accumulate(lengths)], dtype=dtype)


@pytest.mark.parametrize("name", [name for names, _ in SPELLINGS for name in names])
def test_every_name_of_boundaries(name):
    resized = resize_batch({"input_ids": row(range(8)), name: bounds_of([5, 3])}, 4)
    assert resized["input_ids"].tolist() == [[0, 1, 2, 3, 5, 6, 7]]
    assert resized[name].tolist() == [0, 4, 7]


def packed(sequences, spelling, dtype, is_flat, first_position, longest):
    """A packed batch of sequences of (id, label, position) tokens, each with the number of an old sequence."""
    tokens = [token for _, sequence in sequences for token in sequence]
    ids, labels, positions = zip(*tokens, strict=True) if tokens else ((), (), ())
    lengths, olds = [len(sequence) for _, sequence in sequences], [old for old, _ in sequences]
    numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
    bounds = bounds_of(lengths, dtype)
    features = torch.tensor([(token, -1.5) for token in ids]).view(-1, 2)
    return {
        **dict.fromkeys(spelling[0], bounds),
        **dict.fromkeys(spelling[1], longest(max(lengths))),
        "cu_seqlens_k": None,
        "input_ids": row(ids, is_flat),
        "labels": row(labels, is_flat, dtype),
        "position_ids": row([first_position + position for position in positions], is_flat, dtype),
        "seq_idx": row(numbers, is_flat, torch.int32),
        "attention_mask": row([token % 3 > 0 for token in ids], is_flat),
        "features": features if is_flat else features[None],
        "weights": torch.tensor([old + 0.5 for old in olds]),
        "texts": [f"text {old}" for old in olds],
        "images": tuple({"id": old} for old in olds),
        "scale": torch.tensor(3.0),
        "name": "batch",
    }


@examples(40)
@given(
    lengths=st.lists(st.integers(0, 13), min_size=1, max_size=6).filter(
        lambda lengths: len(lengths) != sum(lengths) > 0
    ),
    seq_len=st.integers(1, 15) | st.just(2**63 - 1),
    method=st.sampled_from(METHODS),
    spelling=st.sampled_from(SPELLINGS),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    is_flat=st.booleans(),
    first_position=st.sampled_from([0, 2]),
    longest=st.sampled_from([int, torch.tensor]),
    model_shifts=st.booleans(),
    copy=st.booleans(),
    backend=st.sampled_from(BACKENDS),
)
def test_each_sequence_is_cut_on_its_own(
    lengths, seq_len, method, spelling, dtype, is_flat, first_position, longest, model_shifts, copy, backend
):
    """`model_shifts`: the first label of each sequence does not count. Otherwise a label is that of the next token."""
    old = []
    for sequence, length in enumerate(lengths):
        ids = [100 * sequence + place for place in range(length)]
        labels = [-100 if model_shifts and place == 0 else 1000 + token for place, token in enumerate(ids)]
        old.append((sequence, list(zip(ids, labels, range(length), strict=True))))
    new = []
    for source, piece in zip(*cut_sequences(lengths, seq_len, **method), strict=True):
        tokens = [old[source][1][place] for _, place, _ in piece]
        slots = enumerate(zip(tokens, piece, strict=True))
        new.append((source, [(id_, -100 if again else label, slot) for slot, ((id_, label, _), (*_, again)) in slots]))
    layout = spelling, dtype, is_flat, first_position, longest
    batch, expected = packed(old, *layout), packed(new, *layout)

    resized, info = resize_batch(batch, seq_len, copy=copy, return_info=True, backend=backend, **method)

    assert list(resized) == list(batch)
    assert_same(resized, expected)
    assert_same(batch, packed(old, *layout))
    valid = [[token % 3 > 0 for token, *_ in tokens] for _, tokens in new]
    assert info.valid_lengths.tolist() == [sum(piece) for piece in valid]
    assert info.position_ids.tolist() == [
        [sum(piece[:slot]) * is_valid for piece in valid for slot, is_valid in enumerate(piece)]
    ]
    assert info.num_valid_tokens == sum(map(sum, valid))
    shared = resized["features"].data_ptr() == batch["features"].data_ptr()
    assert shared == (not copy and seq_len >= max(lengths))


@examples(30)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=5).filter(lambda lengths: max(lengths) > 1),
    seq_len=st.integers(1, 10),
    method=st.sampled_from(METHODS),
    names=st.sampled_from([["position_ids"], ["seq_idx", "position_ids"], *([name] for name in INDICES)]),
    seq_dim=st.sampled_from([0, 1]),
    hides=st.booleans(),
)
def test_sequences_are_found_by_positions(lengths, seq_len, method, names, seq_dim, hides):
    """The result is that of the same batch with boundaries."""
    tokens = [(sequence, position) for sequence, length in enumerate(lengths) for position in range(length)]
    batch = {"input_ids": row([10 * sequence + position for sequence, position in tokens])}
    batch |= {"position_ids": row([position for _, position in tokens])}
    batch |= {name: row([7 - n for n, _ in tokens]) for name in INDICES}
    batch = {name: value for name, value in batch.items() if name in ("input_ids", *names)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if not hides or "position_ids" not in names:
        del batch["attention_mask"]
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
