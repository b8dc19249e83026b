"""resize_batch on every available backend and device, against lists cut in plain Python."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import resize_batch
from seqwarm_kernels.ops.library import overload
from seqwarm_kernels.ops.resize_batch.schema import Kind
from tests.support.backends import OPERATOR_ERROR, SHARES_FIXTURES, backend_fixture, needs_native, served
from tests.support.cut_tokens import METHODS, check_info, cut_rows, taken
from tests.support.tiers import examples, first_fast

backend = backend_fixture("resize_batch")


def right_padding(batch_size, length):
    return (torch.arange(length) < torch.randint(0, length + 1, (batch_size, 1))).long()


def any_padding(batch_size, length):
    """Masks of rows: padded on the left or on both sides, with or without holes, short, wholly masked."""
    first, last = torch.randint(-length // 2, length + 1, (2, batch_size, 1))
    position = torch.arange(length)
    valid = (position >= first) & (position <= torch.maximum(last, first - 1))
    holes = (torch.rand(batch_size, length) < 0.2) & (torch.rand(batch_size, 1) < 0.5)
    return (valid & ~holes).long()


def some_batch(batch_size, length, mask=None):
    token = torch.arange(batch_size * length).view(batch_size, length)
    return {
        "input_ids": token + 1000,
        "attention_mask": right_padding(batch_size, length) if mask is None else mask,
        "labels": token + 5000,
        "embeddings": torch.randn(batch_size, length, 3, dtype=torch.float16),
        "flags": torch.rand(batch_size, length) > 0.5,
        "scores": torch.randn(batch_size, length, 2, 2, dtype=torch.float64),
        "bytes": token.to(torch.uint8),
    }


def check(batch, seq_len, method, backend, **more):
    before = {name: value.clone() for name, value in batch.items()}
    resized, info = resize_batch(batch, seq_len, return_info=True, backend=backend, **method, **more)
    mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    cut = cut_rows(mask.tolist(), seq_len, **method)
    for name, tensor in batch.items():
        assert torch.equal(tensor, before[name]), f"{name} was changed"
        is_label = name == "labels"
        if tensor.dim() == 1:
            expected = tensor[[row for (row, *_), *_ in cut]]
        else:
            expected = taken(tensor, cut, seq_len, -100 if is_label else 0, fill_repeats=is_label)
        torch.testing.assert_close(resized[name], expected, rtol=0, atol=0)
    check_info(info, taken(mask, cut, seq_len) != 0)
    return resized


PADDED_ROWS = [
    [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1],
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1],  # fewer tokens than most new rows
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
    [0, 1, 0, 0, 1, 1, 0, 1, 1, 0, 0],  # holes, and padding at the end
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    [1, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0],
    [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
]


@pytest.mark.parametrize("seq_len", first_fast([5, 1, 10, 11, 100], "exhaustive_in_interpreter"))
@pytest.mark.parametrize("method", first_fast(METHODS, "slow_in_interpreter"), ids=str)
def test_every_method_at_every_length(backend, method, seq_len):
    check(some_batch(3, 11), seq_len, method, backend, copy=False)
    for batch in (some_batch(0, 11), some_batch(7, 11, torch.tensor(PADDED_ROWS))):
        check(batch, seq_len, method, backend)


@pytest.mark.parametrize("copy", [True, False])
def test_no_mask_and_a_number_for_each_row(backend, copy):
    batch = {"input_ids": torch.arange(33).view(3, 11), "weight": torch.rand(3)}
    for remainder in ("drop", "pad", "overlap"):
        check(batch, 4, {"mode": "reshape", "remainder": remainder}, backend, copy=copy)
    check(batch, 4, {"mode": "truncate"}, backend, copy=copy)


DTYPES = [torch.int64, torch.int32, torch.int8, torch.bool, torch.bfloat16, torch.float32, torch.complex64]


def draw_tensor(data, batch_size, length):
    """A tensor of any dtype, with or without features, transposed, expanded, or a strided part of a larger one."""
    features, dtype = data.draw(st.sampled_from([(), (1,), (3,), (8,), (2, 2)])), data.draw(st.sampled_from(DTYPES))
    spare, step = data.draw(st.sampled_from([0, 1, 8])), data.draw(st.sampled_from([1, 2]))
    large = torch.randint(-100, 100, (batch_size, step * length + spare, *features))
    tensor = large.to(dtype)[:, spare::step][:, :length]
    layout = data.draw(st.sampled_from(["as it is", "transposed", "expanded"]))
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor[:1].expand_as(tensor) if layout == "expanded" and batch_size else tensor


@pytest.mark.exhaustive_in_interpreter
@examples(40, **SHARES_FIXTURES)
@given(data=st.data())
def test_tokens_are_lost_or_duplicated_only_as_documented(backend, data):
    batch_size, length = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 40))
    seq_len, method = data.draw(st.integers(1, 45)), data.draw(st.sampled_from(METHODS))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    copy = data.draw(st.booleans())
    mask = (any_padding if copy else right_padding)(batch_size, length).to(data.draw(st.sampled_from(DTYPES)))
    batch = some_batch(batch_size, length, mask)
    batch |= {f"tensor_{i}": draw_tensor(data, batch_size, length) for i in range(data.draw(st.integers(0, 2)))}
    resized = check(batch, seq_len, method, backend, copy=copy)
    tokens = resized["input_ids"].flatten().tolist()
    tokens = [token for token in tokens if token != 0]
    all_tokens = set(batch["input_ids"].flatten().tolist())
    assert set(tokens) <= all_tokens
    if method.get("remainder") in ("pad", "overlap"):
        assert set(tokens) == all_tokens
    if method.get("remainder") == "overlap":
        counted = resized["labels"][resized["labels"] != -100].tolist()
        assert sorted(counted) == sorted(batch["labels"].flatten().tolist())
    else:
        assert len(tokens) == len(set(tokens))


@pytest.mark.parametrize("dtype", first_fast([torch.int64, torch.float16, torch.uint8], "exhaustive_in_interpreter"))
@pytest.mark.parametrize(
    ("keep_last_token", "kept"),
    [(True, [[1, 2, 4], [3, 4, 5], [0, 1, 4], [0, 1, 2]]), (False, [[1, 2, 3], [3, 4, 5], [0, 1, 2], [0, 1, 2]])],
)
def test_square_masks_are_cut_as_their_rows(backend, keep_last_token, kept, dtype):
    pairs = torch.arange(4 * 6 * 6).view(4, 6, 6).to(dtype)
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]])
    batch = {"attention_mask": mask, "pair_mask": pairs}
    cut = resize_batch(batch, 3, keep_last_token=keep_last_token, backend=backend)["pair_mask"]
    for row, positions in enumerate(kept):
        assert cut[row].tolist() == pairs[row][positions][:, positions].tolist()


def test_pad_values(backend):
    batch = {
        "input_ids": torch.ones(1, 5, dtype=torch.int32),
        "labels": torch.ones(1, 5, dtype=torch.int64),
        "embeddings": torch.ones(1, 5, 2),
        "flags": torch.zeros(1, 5, dtype=torch.bool),
    }
    pad_values = {"input_ids": 7, "embeddings": -0.5, "flags": True, "labels": -1}
    padded = resize_batch(batch, 3, mode="reshape", remainder="pad", pad_values=pad_values, backend=backend)
    assert padded["input_ids"].tolist() == [[1, 1, 1], [1, 1, 7]]
    assert padded["labels"].tolist() == [[1, 1, 1], [1, 1, -1]]
    assert padded["embeddings"][1, 2].tolist() == [-0.5, -0.5]
    assert padded["flags"].tolist() == [[False] * 3, [False, False, True]]
    lapped = resize_batch(batch, 3, mode="reshape", remainder="overlap", pad_values=pad_values, backend=backend)
    assert lapped["labels"].tolist() == [[1, 1, 1], [-1, 1, 1]]


@pytest.mark.exhaustive_in_interpreter
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_out_is_written_and_keeps_its_addresses(backend, method):
    batch = some_batch(3, 12)
    out = {name: torch.full((2 * tensor.numel(),), 99, dtype=tensor.dtype) for name, tensor in batch.items()}
    for seq_len in (5, 3, 12):
        expected = resize_batch(batch, seq_len, return_info=True, backend=backend, **method)
        results = resize_batch(batch, seq_len, out=out, return_info=True, backend=backend, **method)
        torch.testing.assert_close(results, expected, rtol=0, atol=0)
        assert resize_batch(batch, seq_len, out=out, backend=backend, **method).keys() == batch.keys()
        for name, got in results[0].items():
            assert got.is_contiguous()
            assert got.data_ptr() == out[name].data_ptr()
            assert (out[name][got.numel() :] == torch.full_like(out[name][:1], 99)).all() or seq_len != 5


def blocks_of_16_bytes():
    """Lengths at which every tensor is copied in blocks, with a batch of several tiles."""
    batch = some_batch(5, 192, any_padding(5, 192))
    batch["embeddings"] = torch.randn(5, 192, 40).bfloat16()
    return batch, (16, 64, 96, 128, 176)


def rows_longer_than_a_tile():
    mask = torch.zeros(3, 1300, dtype=torch.int64)
    mask[0, 50:1260] = mask[1, 900:] = mask[2, :1100] = 1
    return some_batch(3, 1300, mask), (1201,)


def many_tensors():
    more = {f"tensor_{i}": torch.randint(100, (2, 11), dtype=DTYPES[i % 3]) for i in range(17)}
    return some_batch(2, 11) | more, (4,)


def tokens_of_any_size_at_any_address():
    batch = some_batch(2, 24, any_padding(2, 24))
    for features in (1, 2, 3, 6, 8, 16, 17, 24, 32):
        for start in (0, 1, 4, 8):
            memory = torch.randint(256, (start + 2 * 24 * features,), dtype=torch.uint8)
            batch[f"bytes_{features}_{start}"] = memory[start:].view(2, 24, features)
    return batch, (7, 16)


LARGE = {
    "24 tensors": many_tensors,
    "tokens of any size at any address": tokens_of_any_size_at_any_address,
    "blocks of 16 bytes": blocks_of_16_bytes,
    "rows longer than a tile": rows_longer_than_a_tile,
}


@pytest.mark.exhaustive_in_interpreter
@pytest.mark.parametrize("method", first_fast(METHODS, "exhaustive"), ids=str)
@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE)
def test_larger_batches(backend, make, method):
    batch, lengths = make()
    for seq_len in lengths:
        check(batch, seq_len, method, backend)


@pytest.mark.parametrize(
    "dtype", first_fast([torch.float32, torch.float16, torch.bfloat16, torch.complex64], "exhaustive_in_interpreter")
)
def test_masks_of_any_dtype(backend, dtype):
    mask = torch.tensor([[1, 0, 0.5, -0.0, 0, 1], [0, 0, 0, 0, 0, -0.0], [-0.0, 0.5, 0, 0, -0.0, 1]]).to(dtype)
    mask = mask * torch.tensor([1, 1j] * 3) if dtype.is_complex else mask
    _, info = resize_batch({"attention_mask": mask}, 4, return_info=True, keep_last_token=True, backend=backend)
    assert info.valid_lengths.tolist() == [3, 0, 2]
    assert info.position_ids.tolist() == [[0, 0, 1, 2], [0, 0, 0, 0], [0, 0, 0, 1]]


@pytest.mark.parametrize("backend", served("resize_batch", without="triton"), indirect=True)
def test_complex_numbers(backend):
    """Triton has no complex128, and says so: tests/resizing/test_functional.py."""
    batch = {"ids": torch.randn(2, 5, dtype=torch.complex128)}
    padded = resize_batch(batch, 3, mode="reshape", remainder="pad", pad_values={"ids": 0.5}, backend=backend)
    assert padded["ids"][1].tolist() == [*batch["ids"][0, 3:].tolist(), 0.5 + 0j]


MISFITS = {
    "no dimensions": (torch.tensor(1), Kind.SEQUENCE),
    "fewer rows": (torch.zeros(1, 6), Kind.SEQUENCE),
    "more tokens": (torch.zeros(2, 7), Kind.SEQUENCE),
    "no tokens": (torch.zeros(2), Kind.LABEL),
    "a row of tokens": (torch.zeros(2, 6), Kind.ROW),
    "fewer entries": (torch.zeros(1), Kind.ROW),
    "not square": (torch.zeros(2, 6, 5), Kind.SQUARE),
    "square with features": (torch.zeros(2, 6, 6, 1), Kind.SQUARE),
}


@needs_native
@pytest.mark.parametrize("name", MISFITS)
def test_the_native_operator_never_reads_beyond_an_input(name):
    """The operator can be called without `resize_batch`, which checks its arguments."""
    tensor, kind = MISFITS[name]
    arguments = [tensor], None, 2, 6, 3, "truncate", [kind], [0], False
    with pytest.raises(OPERATOR_ERROR, match="input"):
        overload("resize_batch", "native")(*arguments)
    with pytest.raises(OPERATOR_ERROR, match="input"):
        overload("resize_batch_out", "native")(*arguments, [torch.zeros(2, 3)])


@needs_native
@pytest.mark.parametrize("method", METHODS)
def test_native_threads_share_a_large_batch(threads, method):
    mask = torch.rand(256, 1024) < 0.3
    batch = {"input_ids": torch.randint(100, mask.shape), "attention_mask": mask}
    threads(4)
    for seq_len in (256, 1000):
        got, expected = (resize_batch(batch, seq_len, **method, backend=name) for name in ("native", "reference"))
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
