"""Packed batches: each sequence is cut on its own, against lists cut in plain Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from seqwarm_kernels import resize_batch
from seqwarm_kernels.data import PackedCollator
from seqwarm_kernels.ops import backends
from tests.support.tiers import examples

METHODS = [
    {"mode": "truncate"},
    {"mode": "reshape"},
    {"mode": "reshape", "remainder": "pad"},
    {"mode": "reshape", "remainder": "overlap"},
    {"mode": "flatten"},
]
#: Names of the boundaries, and of the longest sequence.
SPELLINGS = [
    (["cu_seq_lens_q", "cu_seq_lens_k"], ["max_length_q", "max_length_k"]),
    (["cu_seqlens_q", "cu_seqlens_k"], ["max_seqlen_q", "max_seqlen_k"]),
    (["cu_seqlens"], ["max_seqlen"]),
    (["cu_seq_q", "cu_seq_k"], ["max_q", "max_k"]),
]
BACKENDS = [None, *[name for name in backends.BACKENDS if not backends.why_not("resize_packed", name, "cpu")]]


def cut(length, seq_len, mode, remainder="drop"):
    """The pieces of one sequence as lists of (position, is_repeated), written down from the documentation."""
    tokens = [(position, False) for position in range(length)]
    if length <= seq_len:
        return [tokens]
    if mode == "truncate":
        return [tokens[:seq_len]]
    pieces = [tokens[start : start + seq_len] for start in range(0, length, seq_len)]
    short = len(pieces[-1]) < seq_len
    if short and mode == "reshape" and remainder == "drop":
        return pieces[:-1]
    if short and mode == "reshape" and remainder == "overlap":
        known = (len(pieces) - 1) * seq_len
        pieces[-1] = [(position, position < known) for position in range(length - seq_len, length)]
    return pieces


def bounds_of(lengths):
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return bounds


def row(values, is_flat=False, dtype=torch.int64):
    made = torch.tensor(values, dtype=dtype)
    return made if is_flat else made[None]


def check_same(found, expected):
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)
        else:
            assert found[name] == value, name


def packed(tokens, spelling, dtype, is_flat, first_position):
    """A packed batch of (id, label, sequence, position) tokens, and the lengths of its sequences."""
    ids, labels, sequences, positions = zip(*tokens, strict=True)
    lengths = [sequences.count(sequence) for sequence in range(sequences[-1] + 1)]
    batch = {name: torch.tensor(bounds_of(lengths), dtype=dtype) for name in spelling[0]}
    return batch | {
        **dict.fromkeys(spelling[1], max(lengths)),
        "input_ids": row(ids, is_flat),
        "labels": row(labels, is_flat, dtype),
        "position_ids": row([first_position + position for position in positions], is_flat, dtype),
        "seq_idx": row(sequences, is_flat, torch.int32),
        "features": row([[token, -1.5] for token in ids], is_flat, torch.float32),
        "name": "batch",
    }


@examples(50)
@given(
    lengths=st.lists(st.integers(1, 13), min_size=1, max_size=6),
    seq_len=st.integers(1, 15),
    method=st.sampled_from(METHODS),
    spelling=st.sampled_from(SPELLINGS),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    is_flat=st.booleans(),
    first_position=st.sampled_from([0, 2]),
    model_shifts=st.booleans(),
    copy=st.booleans(),
    backend=st.sampled_from(BACKENDS),
)
def test_each_sequence_is_cut_on_its_own(
    lengths, seq_len, method, spelling, dtype, is_flat, first_position, model_shifts, copy, backend
):
    """`model_shifts`: the first label of each sequence does not count. Otherwise a label is that of the next token."""
    old, new = [], []
    for sequence, length in enumerate(lengths):
        ids = [100 * sequence + position for position in range(length)]
        labels = [-100 if model_shifts and position == 0 else 1000 + token for position, token in enumerate(ids)]
        old += [(ids[position], labels[position], sequence, position) for position in range(length)]
        for piece in cut(length, seq_len, **method):
            number = new[-1][2] + 1 if new else 0
            for slot, (position, is_repeated) in enumerate(piece):
                new.append((ids[position], -100 if is_repeated else labels[position], number, slot))
    layout = spelling, dtype, is_flat, first_position
    batch, expected = packed(old, *layout), packed(new, *layout)

    resized, info = resize_batch(batch, seq_len, copy=copy, return_info=True, backend=backend, **method)

    assert list(resized) == list(batch)
    check_same(resized, expected)
    check_same(batch, packed(old, *layout))
    slots = [slot for *_, slot in new]
    assert info.valid_lengths.tolist() == expected[spelling[0][0]].diff().tolist()
    assert info.position_ids.tolist() == [slots]
    assert info.num_valid_tokens == len(new)
    shared = resized["features"].data_ptr() == batch["features"].data_ptr()
    assert shared == (not copy and seq_len >= max(lengths))


@examples(50)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=5).filter(lambda lengths: max(lengths) > 1),
    seq_len=st.integers(1, 10),
    method=st.sampled_from(METHODS),
    names=st.sampled_from([["position_ids"], ["seq_idx"], ["seq_idx", "position_ids"]]),
    seq_dim=st.sampled_from([0, 1]),
    hides=st.booleans(),
)
def test_sequences_are_found_by_positions(lengths, seq_len, method, names, seq_dim, hides):
    """The result is that of the same batch with boundaries."""
    tokens = [(sequence, position) for sequence, length in enumerate(lengths) for position in range(length)]
    batch = {"input_ids": row([10 * sequence + position for sequence, position in tokens])}
    batch |= {"position_ids": row([position for _, position in tokens]), "seq_idx": row([n for n, _ in tokens])}
    batch = {name: value for name, value in batch.items() if name in ("input_ids", *names)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if not hides or "position_ids" not in names:
        del batch["attention_mask"]
    if seq_dim == 0:
        batch = {name: value.T for name, value in batch.items()}
    expected = resize_batch(
        batch | {"cu_seqlens": torch.tensor(bounds_of(lengths))}, seq_len, seq_dim=seq_dim, **method
    )
    del expected["cu_seqlens"]
    check_same(resize_batch(batch, seq_len, seq_dim=seq_dim, **method), expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("lengths", [[], [0], [0, 5, 0, 0, 3, 0]])
def test_empty_sequences_stay(lengths, method):
    bounds = torch.tensor(bounds_of(lengths))
    batch = {"input_ids": torch.arange(int(bounds[-1]))[None], "cu_seqlens": bounds, "max_seqlen": 5}
    resized = resize_batch(batch, 3, **method)
    new_lengths = resized["cu_seqlens"].diff().tolist()
    assert new_lengths == [len(piece) for length in lengths for piece in cut(length, 3, **method)]
    assert resized["input_ids"].shape == (1, sum(new_lengths))
    assert resized["max_seqlen"] == max(new_lengths, default=0)


def collated():
    return PackedCollator()([[1, 2, 3, 4, 5], [6, 7, 8], [9]])


@pytest.mark.parametrize("method", METHODS)
def test_the_largest_length_changes_nothing(method):
    batch = PackedCollator()([torch.arange(3), torch.arange(5)])
    check_same(resize_batch(batch, 2**63 - 1, **method), batch)


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


def test_the_batches_of_the_packed_collator():
    resized = resize_batch(collated(), 2, mode="reshape", remainder="pad")
    labels = collated()["labels"]  # a piece's first token is predicted from the token before it
    check_same(resized, PackedCollator()([[1, 2], [3, 4], [5], [6, 7], [8], [9]]) | {"labels": labels})
    check_same(resize_batch(collated(), 2), PackedCollator()([[1, 2], [6, 7], [9]]))


@pytest.mark.parametrize("method", METHODS)
def test_a_model_that_shifts_labels_predicts_them_from_the_token_before(method):
    batch = PackedCollator()([list(range(1, 9)), list(range(11, 16)), [21]])
    resized = resize_batch(batch, 3, **method)
    ids, labels = resized["input_ids"][0].tolist(), resized["labels"][0].tolist()
    predicted = [(before, label) for before, label in zip(ids, labels[1:], strict=False) if label != -100]
    assert all(label == before + 1 for before, label in predicted)
    assert sorted(label for _, label in predicted) == sorted({*ids} - {1, 11, 21})


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_with_an_entry_for_each_sequence(kind):
    batch = collated() | {"texts": kind("abc"), "names": ["x", "y"]}
    assert resize_batch(batch, 2)["texts"] == kind("abc")
    resized = resize_batch(batch, 2, mode="reshape", remainder="pad")
    assert resized["texts"] == kind("aaabbc")
    assert resized["names"] == ["x", "y"]
    assert resize_batch(batch, 2, keys=["input_ids", "names"])["names"] == ["x", "y"]


def test_an_entry_for_each_sequence():
    batch = collated() | {"weights": torch.tensor([0.5, 1.0, 2.0]), "row": torch.tensor([7]), "scale": torch.tensor(3)}
    assert resize_batch(batch, 2)["weights"].tolist() == [0.5, 1.0, 2.0]
    resized = resize_batch(batch, 2, mode="reshape", remainder="pad")
    assert resized["weights"].tolist() == [0.5, 0.5, 0.5, 1.0, 1.0, 2.0]
    assert resized["row"].tolist() == [7]


def test_masked_tokens_are_not_counted():
    batch = collated() | {"attention_mask": row([0, 1, 1, 1, 1, 1, 0, 1, 1])}
    resized, info = resize_batch(batch, 3, return_info=True)
    assert resized["attention_mask"].tolist() == [[0, 1, 1, 1, 0, 1, 1]]
    assert info.valid_lengths.tolist() == [2, 2, 1]
    assert info.position_ids.tolist() == [[0, 0, 1, 0, 0, 1, 0]]
    assert info.num_valid_tokens == 5


def test_tensors_that_keys_does_not_name_pass_through():
    images = torch.zeros(4, 3, 8, 8)
    resized = resize_batch(collated() | {"pixel_values": images}, 2, keys=["input_ids", "labels"])
    assert resized.pop("pixel_values") is images
    check_same(resized, resize_batch(collated(), 2))


def test_a_bias_of_each_token_is_cut_with_the_tokens():
    bias = torch.randn(1, 9, 3)
    assert torch.equal(resize_batch(collated() | {"bias": bias}, 2)["bias"], bias[:, [0, 1, 5, 6, 8]])


def test_longest_as_a_tensor_and_none():
    batch = collated() | {"max_length_q": torch.tensor(5, dtype=torch.int32), "cu_seq_lens_k": None}
    resized = resize_batch(batch, 2)
    assert resized["max_length_q"].dtype == torch.int32
    assert resized["max_length_q"] == 2
    assert resized["cu_seq_lens_k"] is None


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


def test_packed_batches_are_known_among_batches_of_the_same_shapes():
    """Calls of one kind are checked once, but position ids tell a packed batch by their values."""
    rows, packed_row = row(range(6)), row([0, 1, 2, 0, 1, 2])
    for positions, kept in [(rows, [0, 1]), (rows, [0, 1]), (packed_row, [0, 1, 3, 4]), (rows, [0, 1])]:
        resized = resize_batch({"input_ids": row(range(6)), "position_ids": positions}, 2)
        assert resized["input_ids"].tolist() == [kept]


@pytest.mark.parametrize("flat", [{"input_ids": torch.arange(8)}, {"inputs_embeds": torch.arange(32.0).view(8, 4)}])
def test_flat_tensors_with_position_ids_are_one_sequence(flat):
    (name,) = flat
    resized = resize_batch(flat | {"position_ids": torch.arange(8)}, 2)
    check_same(resized, {name: flat[name][:2], "position_ids": torch.arange(2)})


@pytest.mark.parametrize("name", ["seq_idx", "sequence_id", "document_id", "document_ids", "doc_ids"])
def test_names_of_indices(name):
    batch = {"input_ids": row(range(8)), name: row([7] * 5 + [3] * 3)}
    resized = resize_batch(batch, 4, mode="reshape", remainder="pad")
    assert resized[name].tolist() == [[0] * 4 + [1] + [2] * 3]


@pytest.mark.parametrize("name", ["cu_seq_lens", "cu_doc_lens"])
def test_names_of_boundaries(name):
    batch = {"input_ids": row(range(8)), name: torch.tensor([0, 5, 8]), "max_doc_len": 5}
    resized = resize_batch(batch, 4)
    check_same(resized, {"input_ids": row([0, 1, 2, 3, 5, 6, 7]), name: torch.tensor([0, 4, 7]), "max_doc_len": 4})


def test_a_mask_that_hides_nothing_changes_nothing():
    batch = {"input_ids": row(range(8)), "position_ids": row([0, 1, 2, 3, 10, 11, 12, 13])}
    masked = batch | {"attention_mask": torch.ones(1, 8, dtype=torch.int64)}
    assert (
        resize_batch(masked, 2)["input_ids"].tolist() == resize_batch(batch, 2)["input_ids"].tolist() == [[0, 1, 4, 5]]
    )


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


@pytest.mark.parametrize("options", [{}, {"mode": "reshape"}, {"mode": "flatten"}, {"copy": False}])
@pytest.mark.parametrize("name", ["position_ids", "seq_idx"])
def test_rows_of_several_sequences_are_cut_as_rows(name, options):
    """Megatron's reset_position_ids. The batch was refused."""
    numbers = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5]])
    batch = {"input_ids": torch.arange(16).view(2, 8), name: numbers}
    resized = resize_batch(batch, 4, **options)
    expected = resize_batch({"a": batch["input_ids"], "b": numbers}, 4, **options)
    assert torch.equal(resized["input_ids"], expected["a"])
    assert torch.equal(resized[name], expected["b"])
    one = {key: value[:1] for key, value in batch.items()}
    if name == "position_ids":
        assert resize_batch(one, 4)["input_ids"].tolist() == [[0, 1, 2, 3, 5, 6, 7]]


def test_stacked_position_ids_of_a_packed_row_are_refused():
    batch = {"input_ids": row(range(8)), "position_ids": torch.arange(24).view(3, 1, 8)}
    with pytest.raises(ValueError, match=r"'position_ids'\] must have one row of 8 tokens, got \(3, 1, 8\)"):
        resize_batch({**batch, "cu_seqlens": torch.tensor([0, 5, 8])}, 4)


def test_rows_without_tokens():
    empty = torch.zeros(1, 0, dtype=torch.int64)
    with pytest.raises(ValueError, match="must have a sequence length of at least 1"):
        resize_batch({"input_ids": empty, "position_ids": empty}, 2)


def test_sequences_of_one_token():
    resized = resize_batch({"input_ids": row([5, 6]), "position_ids": row([0, 0])}, 1)
    assert resized["input_ids"].tolist() == [[5, 6]]


def test_masked_tokens_may_begin_a_sequence():
    """The names agree on the valid tokens."""
    batch = {"input_ids": row(range(8)), "position_ids": HALVES, "attention_mask": row([1, 1, 1, 1, 0, 1, 1, 1])}
    resized = resize_batch(batch | {"cu_seqlens": torch.tensor([0, 4, 4, 8])}, 2)
    assert resized["input_ids"].tolist() == [[0, 1, 4, 5]]


def test_padding_between_sequences_joins_the_sequence_before_it():
    mask, positions = row([1, 1, 1, 0, 1, 1, 0]), row([0, 1, 2, 0, 0, 1, 0])
    batch = {"input_ids": row(range(7)), "attention_mask": mask, "position_ids": positions}
    assert resize_batch(batch, 2)["input_ids"].tolist() == [[0, 1, 4, 5]]


NO_BOUNDS = {"cu_seq_lens_q": None, "cu_seq_lens_k": None}
IDS, TWO_ROWS = row(range(9)), torch.arange(18).view(2, 9)
REFUSED = [
    (
        {"cu_seq_lens_q": torch.tensor([0.0, 9.0])},
        {},
        TypeError,
        "'cu_seq_lens_q'.* int32 or int64 .*got torch.float32",
    ),
    ({"cu_seq_lens_q": [0, 9]}, {}, TypeError, "'cu_seq_lens_q'.* must be int32 or int64 .* got list"),
    (
        {"cu_seq_lens_q": torch.tensor([[0, 5, 9]])},
        {},
        TypeError,
        r"boundaries .* of one row, got torch.int64 \(1, 3\)",
    ),
    ({"cu_seqlens": torch.tensor([1, 5, 9])} | NO_BOUNDS, {}, ValueError, r"with 0 and not fall, got \[1, 5, 9\]"),
    ({"cu_seqlens": torch.tensor([0, 6, 5, 9])} | NO_BOUNDS, {}, ValueError, "must begin with 0 and not fall"),
    ({"cu_seqlens": torch.tensor([0, 5, 8])} | NO_BOUNDS, {}, ValueError, r"'input_ids'\] must have one row of 8 t"),
    ({"cu_seq_lens_k": torch.tensor([0, 4, 9])}, {}, ValueError, r"'cu_seq_lens_k'\] must equal the other boundaries"),
    ({"labels": row(range(8))}, {}, ValueError, r"'labels'\] must have one row of 9 tokens, got \(1, 8\)"),
    ({"input_ids": TWO_ROWS}, {}, ValueError, r"'input_ids'\] must have one row of 9 tokens, got \(2, 9\)"),
    ({"x_mask": torch.ones(1, 9, 9)}, {}, ValueError, r"'x_mask'\] must not be a mask over pairs of tokens"),
    ({"x_mask": torch.ones(1, 1, 9, 9)}, {}, ValueError, "must not be a mask over pairs of tokens"),
    ({"x": IDS.to_sparse()}, {}, TypeError, r"batch\['x'\] must be a dense tensor"),
    ({"x": IDS.to("meta")}, {}, ValueError, "must be on one device"),
    ({}, {"keep_last_token": True}, ValueError, "keep_last_token must be False for a packed batch"),
    ({}, {"out": {}}, ValueError, "out must be None for a packed batch"),
    ({}, {"backend": "fast"}, ValueError, "backend must be None or one of"),
    ({}, {"seq_dim": 2}, ValueError, "seq_dim"),
    ({}, {"mode": "fold"}, ValueError, "mode must be one of"),
    ({}, {"keys": ["nothing"]}, ValueError, "keys names 'nothing'"),
    (
        {},
        {"mode": "reshape", "remainder": "overlap", "pad_values": {"labels": 0.5}},
        ValueError,
        "must fit torch.int64",
    ),
]


@pytest.mark.parametrize(("more", "options", "error", "message"), REFUSED)
def test_what_is_not_recognized_is_refused(more, options, error, message):
    bounds = torch.tensor([0, 5, 9])
    batch = {"input_ids": IDS, "labels": IDS, "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, **more}
    with pytest.raises(error, match=message):
        resize_batch(batch, 4, **options)


def test_boundaries_without_tokens_are_refused():
    with pytest.raises(
        ValueError, match=r"batch must hold a tensor of the 9 packed tokens to resize, got \['cu_seqlens'"
    ):
        resize_batch({"cu_seqlens": torch.tensor([0, 9]), "name": "batch"}, 4)


def test_a_compiled_graph_refuses_positions_that_start_anew():
    compiled = torch.compile(lambda batch: resize_batch(batch, 4), fullgraph=True, backend="eager")
    assert compiled(NOT_PACKED[0])["input_ids"].shape == (1, 4)
    restarting = {"input_ids": row(range(6)), "position_ids": row([0, 1, 2, 0, 1, 2])}
    for batch in (restarting, restarting | {"attention_mask": torch.ones(1, 6)}):
        with pytest.raises(RuntimeError, match="hold packed sequences: resize them outside of the graph"):
            compiled(batch)
    for hidden in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]):  # whose positions count nothing
        assert compiled(restarting | {"attention_mask": row(hidden).float()})["input_ids"].shape == (1, 4)


def test_dotted_names_of_a_flat_batch():
    batch = {"a.input_ids": torch.arange(16)[None], "a.position_ids": torch.arange(4).repeat(4)[None]}
    for _ in range(2):  # a known call, too
        assert resize_batch(batch, 2)["a.input_ids"].tolist() == [[0, 1, 4, 5, 8, 9, 12, 13]]
