"""resize_packed on every available backend and device, against lists cut in plain Python."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import resize_batch
from seqwarm_kernels.ops.library import overload
from seqwarm_kernels.ops.resize_packed.schema import LACKING, PackedKind, cut_sequences
from tests.support import cut_tokens
from tests.support.backends import OPERATOR_ERROR, SHARES_FIXTURES, backend_fixture, needs_interpreter, needs_native
from tests.support.kernels import CountedKernel
from tests.support.tiers import examples, first_fast

pytestmark = pytest.mark.usefixtures("poisoned_memory")

backend = backend_fixture("resize_packed")

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
OTHERS = [torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128]
FEATURES = [(), (1,), (3,), (8,), (2, 2), (0,)]
MASKS = [torch.int64, torch.bool, torch.uint8, torch.float16, torch.float32, torch.complex64]


def dtypes_of(backend):
    return [dtype for dtype in INTEGERS + OTHERS if dtype not in LACKING.get(backend, ())]


def some_values(shape, dtype, stride=1):
    """Numbers from -99 to 99, or such that a token is `stride` tokens away from the next in memory."""
    values = torch.randint(-99, 100, (stride * shape[0], *shape[1:]))
    return (values > 0 if dtype == torch.bool else values.abs() if dtype == torch.uint8 else values).to(dtype)[::stride]


def table_of(lengths, pieces):
    """`pieces` of the operator for lists of pieces (sequence, offset, length, repeated)."""
    columns, first = [], 0
    for sequence, offset, length, repeated in pieces:
        start = sum(lengths[:sequence])
        columns.append((first, start + offset, start, sequence, repeated))
        first += length
    return torch.tensor(columns, dtype=torch.int64).view(-1, 5).T.contiguous(), first


def tokens_of(lengths, pieces):
    """(piece, slot, token of the old batch, token at the start of its sequence, whether repeated) of each new token."""
    for number, (sequence, offset, length, repeated) in enumerate(pieces):
        start = sum(lengths[:sequence])
        for slot in range(length):
            yield number, slot, start + offset + slot, start + slot, slot < repeated


def expected_of(tensor, kind, fill_value, lengths, pieces):
    tokens = list(tokens_of(lengths, pieces))
    if kind == PackedKind.INDEX:
        numbers = torch.tensor([number for number, *_ in tokens], dtype=tensor.dtype)
        return numbers.view(-1, *[1] * (tensor.dim() - 1)).expand(-1, *tensor.shape[1:])
    if kind == PackedKind.SEQUENCE:
        places = [sequence for sequence, *_ in pieces]
    else:
        places = [start if kind == PackedKind.POSITION else token for _, _, token, start, _ in tokens]
    expected = tensor[torch.tensor(places, dtype=torch.int64)]
    if kind == PackedKind.LABEL:
        expected[torch.tensor([is_repeated for *_, is_repeated in tokens], dtype=torch.bool)] = fill_value
    return expected


def check_info(info, mask, lengths, pieces):
    valid = [[] for _ in pieces]
    for number, _, token, *_ in tokens_of(lengths, pieces):
        valid[number].append(mask is None or bool(mask[token] != 0))
    assert [field.dtype for field in info] == [torch.int32, torch.int64, torch.int64]
    assert info[0].tolist() == [sum(piece) for piece in valid]
    expected = [sum(piece[:slot]) if is_valid else 0 for piece in valid for slot, is_valid in enumerate(piece)]
    assert info[1].tolist() == expected
    assert info[2].item() == sum(sum(piece) for piece in valid)


def check(backend, tensors, kinds, fill_values, mask, lengths, pieces):
    """All tensors of a call, and its info."""
    table, new_tokens = table_of(lengths, pieces)
    arguments = tensors, mask, table, new_tokens, kinds, fill_values
    for return_info in (False, True):
        before = [tensor.clone() for tensor in tensors]
        results = overload("resize_packed", backend)(*arguments, return_info)
        assert len(results) == len(tensors) + 3 * return_info
        for tensor, old, kind, fill_value, result in zip(tensors, before, kinds, fill_values, results, strict=False):
            assert torch.equal(tensor, old)
            assert result.is_contiguous()
            expected = expected_of(tensor, kind, fill_value, lengths, pieces)
            torch.testing.assert_close(result, expected, rtol=0, atol=0)
        if return_info:
            check_info(results[-3:], mask, lengths, pieces)


@st.composite
def problems(draw):
    """Lengths of sequences, and pieces of them in order: any parts, some without tokens."""
    lengths = draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))
    pieces = []
    for sequence, length in enumerate(lengths):
        for _ in range(draw(st.integers(0, 3))):
            size = draw(st.integers(0, length))
            offset = draw(st.integers(0, length - size))
            pieces.append((sequence, offset, size, draw(st.integers(0, size))))
    return lengths, pieces


@pytest.mark.exhaustive_in_interpreter
@examples(30, **SHARES_FIXTURES)
@given(data=st.data(), problem=problems())
def test_any_pieces_of_any_tensors(backend, data, problem):
    lengths, pieces = problem
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    tensors, kinds = [], []
    for kind in data.draw(st.lists(st.sampled_from(PackedKind), max_size=4)):
        dtype = data.draw(st.sampled_from(INTEGERS if kind == PackedKind.INDEX else dtypes_of(backend)))
        is_sequence = kind == PackedKind.SEQUENCE
        features = () if is_sequence else data.draw(st.sampled_from(FEATURES))
        shape = (len(lengths) if is_sequence else sum(lengths), *features)
        tensors.append(some_values(shape, dtype, data.draw(st.sampled_from([1, 2]))))
        kinds.append(int(kind))
    fill_values = [1 if tensor.dtype in (torch.bool, torch.uint8) else -100 for tensor in tensors]
    mask = None
    if data.draw(st.booleans()):
        stride = data.draw(st.sampled_from([1, 2]))
        mask = some_values((stride * sum(lengths),), torch.bool).to(data.draw(st.sampled_from(MASKS)))[::stride]
    check(backend, tensors, kinds, fill_values, mask, lengths, pieces)


def every_kind(lengths, features=(3,)):
    """A tensor without items, one of each kind, one of wide tokens, and one with strides."""
    tokens = sum(lengths)
    tensors = [some_values((tokens, 0), torch.float32), some_values((len(lengths),), torch.float32)]
    tensors += [some_values((tokens,), dtype) for dtype in (torch.int64, torch.int64, torch.int32, torch.int16)]
    tensors += [some_values((tokens, *features), torch.bfloat16), some_values((tokens, 2), torch.bool, stride=2)]
    kinds = [1, 0, 1, 2, 3, 4, 1, 1]
    return tensors, kinds, [0, 0, 0, -100, 0, 0, 0, 0]


RULES = ["truncate", "reshape_drop", "reshape_pad", "reshape_overlap", "flatten"]


def cut(lengths, seq_len, rule):
    """Pieces (sequence, offset, length, repeated)."""
    mode, _, remainder = rule.partition("_")
    cut_from, tokens = cut_tokens.cut_sequences(lengths, seq_len, mode, remainder or "drop")
    return [
        (sequence, piece[0][1] if piece else 0, len(piece), sum(is_repeated for *_, is_repeated in piece))
        for sequence, piece in zip(cut_from, tokens, strict=True)
    ]


@examples(50)
@given(lengths=st.lists(st.integers(0, 20), max_size=6), seq_len=st.integers(1, 25), rule=st.sampled_from(RULES))
def test_sequences_are_cut_into_pieces(lengths, seq_len, rule):
    pieces, bounds = cut_sequences(np.cumsum([0, *lengths]), seq_len, rule)
    expected, new_tokens = table_of(lengths, cut(lengths, seq_len, rule))
    assert pieces.tolist() == expected.tolist()
    assert bounds.tolist() == [*expected[0].tolist(), new_tokens]


@pytest.mark.exhaustive_in_interpreter
def test_pieces_of_several_tiles(backend):
    """More tokens than a program or a task of a thread writes, and tokens of more than 16 bytes."""
    lengths = [900, 0, 400, 1, 1100]
    tensors, kinds, fill_values = every_kind(lengths, features=(40,))
    check(backend, tensors, kinds, fill_values, tensors[-1][:, 0], lengths, cut(lengths, 600, "reshape_overlap"))


@needs_native
def test_native_threads_begin_inside_pieces(threads):
    """The native kernel shares 2.4 MB among its threads."""
    lengths = [50] * 20
    pieces = [(sequence, 0, 50, 40) for sequence in range(20)]
    labels = some_values((1000, 300), torch.int64)
    threads(3)
    check("native", [labels, labels[:, 0]], [2, 3], [-100, 0], None, lengths, pieces)


EMPTY = [0, 0, 5, 0, 0, 3, 0, 0]


@pytest.mark.parametrize(
    ("lengths", "rule"),
    [
        # Bisection begins with the largest power of two. Programs of the info take several pieces each.
        *first_fast([([3] * count, "reshape_overlap") for count in (7, 1, 8, 65)], "exhaustive_in_interpreter"),
        *first_fast([(EMPTY, rule) for rule in RULES], "exhaustive_in_interpreter"),
        *[([0], "truncate"), ([], "truncate")],
    ],
)
def test_few_and_many_pieces_some_without_tokens(backend, lengths, rule):
    check(backend, *every_kind(lengths), None, lengths, cut(lengths, 2, rule))


def test_rows_of_another_tensor(backend):
    """Tokens in blocks of 16 bytes, whose addresses are not multiples of 16."""
    large = some_values((9 * 16 + 1,), torch.int16)
    tensors = [large[1:].view(9, 16), large[:-1].view(9, 16)]
    check(backend, tensors, [1, 1], [0, 0], None, [5, 4], [(0, 1, 3, 0), (1, 0, 2, 0)])


#: Starts in the new batch, in the old one, of a sequence, numbers of sequences, and repeated tokens, of each piece.
BAD_PIECES = {
    "four rows": torch.zeros(4, 1, dtype=torch.int64),
    "int32": torch.zeros(5, 1, dtype=torch.int32),
    "strides": torch.zeros(2, 5, dtype=torch.int64).T,
    "beyond the tokens": [[0], [3], [0], [0], [0]],
    "before the tokens": [[0], [-1], [0], [0], [0]],
    "a sequence beyond the tokens": [[0], [0], [3], [0], [0]],
    "a sequence before the tokens": [[0], [0], [-1], [0], [0]],
    "a sequence too many": [[0], [0], [0], [2], [0]],
    "a sequence before the first": [[0], [0], [0], [-1], [0]],
    "more repeated than new": [[0], [0], [0], [0], [3]],
    "no start at 0": [[1], [0], [0], [0], [0]],
    "a start beyond the new tokens": [[0, 3], [0, 0], [0, 0], [0, 0], [0, 0]],
    "no pieces of 2 tokens": torch.zeros(5, 0, dtype=torch.int64),
}
BAD_CALLS = {
    **{name: ("pieces", {"pieces": torch.as_tensor(pieces)}) for name, pieces in BAD_PIECES.items()},
    "more tokens": ("pieces", {"new_tokens": 5}),
    "a short mask": ("pieces", {"mask": torch.ones(1)}),
    "an unknown kind": ("kind", {"kinds": [1, 5]}),
    "fewer kinds": ("kind", {"kinds": [1]}),
    "two dimensions of a sequence": ("input", {"inputs": [torch.ones(4), torch.ones(2, 2)]}),
    "no sequence": ("pieces", {"inputs": [torch.ones(4), torch.ones(())]}),
}


@needs_native
@pytest.mark.parametrize("case", BAD_CALLS)
def test_arguments_of_the_native_operator_that_do_not_fit(case):
    name, change = BAD_CALLS[case]
    pieces = torch.zeros(5, 1, dtype=torch.int64)
    arguments = {"inputs": [torch.ones(4), torch.ones(2)], "mask": None, "pieces": pieces, "new_tokens": 2}
    arguments["kinds"] = [1, 0]
    operator = overload("resize_packed", "native")
    operator(*arguments.values(), [0, 0], True)
    with pytest.raises(OPERATOR_ERROR, match=name):
        operator(*(arguments | change).values(), [0, 0], True)


@needs_interpreter("resize_packed", None)
def test_numbers_that_do_not_fit_into_the_kernel():
    from seqwarm_kernels.ops.resize_packed import triton as host

    widest = torch.empty(2, 2**30, device="meta")
    assert host.make_entry(widest, widest).units == 2**30
    wider = torch.empty(2, 2**30 + 1, device="meta")
    with pytest.raises(ValueError, match="items"):
        host.make_entry(wider, wider)
    pieces = torch.empty(5, 0, dtype=torch.int64, device="meta")
    with pytest.raises(ValueError, match="tokens"):
        host.resize_packed([], None, pieces, host.TICKET.value, [], [], True)


@pytest.mark.parametrize(
    ("dtype", "units", "width"),
    [(torch.uint8, 48, 16), (torch.int64, 48, 2), (torch.uint8, 12, 4), (torch.int64, 1, 1)],
)
def test_items_of_a_group_are_at_most_16_bytes(dtype, units, width):
    host = pytest.importorskip("seqwarm_kernels.ops.resize_packed.triton")
    tokens = torch.empty(3, units, dtype=dtype)
    assert host.make_layout(host.make_entry(tokens, tokens), PackedKind.TOKEN, 0, dtype)[2] == width


@needs_interpreter("resize_packed", None)
@pytest.mark.parametrize("return_info", [False, True])
def test_one_launch_whatever_the_number_of_tensors(monkeypatch, return_info):
    from seqwarm_kernels.ops.resize_packed import triton as host

    counted = CountedKernel(monkeypatch, host, "resize_packed_kernel")
    batch = {f"tensor_{i}": torch.randint(100, (1, 9)) for i in range(8)} | {"weights": torch.rand(2)}
    resize_batch(batch | {"cu_seqlens": torch.tensor([0, 5, 9])}, 3, backend="triton", return_info=return_info)
    assert len(counted.grids) == 1


@pytest.mark.gpu
@needs_interpreter("resize_packed", None)
@pytest.mark.parametrize("return_info", [False, True])
def test_one_launch_on_the_device_and_no_wait(return_info, monkeypatch):
    """With boundaries in host memory. The table of the pieces is copied, but starts no kernel."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # a kernel for each new tensor
    batch = {f"tensor_{i}": torch.arange(9, device="cuda")[None] for i in range(20)}
    batch |= {"cu_seqlens": torch.tensor([0, 5, 9])}
    resize_batch(batch, 3, return_info=return_info)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            resize_batch(batch, 3, return_info=return_info)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    started = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len([name for name in started if "Memcpy" not in name]) == 1
