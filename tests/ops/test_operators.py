"""What torch requires of every operator: schema, fake, autograd; torch.compile without recompiles; autocast."""

import sys
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, alibi_slopes, resize_batch
from seqwarm_kernels.ops import backends, kernels
from seqwarm_kernels.ops.alibi_attention.schema import DenseOptions, VarlenOptions
from seqwarm_kernels.ops.library import overload
from seqwarm_kernels.ops.resize_batch.schema import RULES, Kind, allocate
from seqwarm_kernels.ops.resize_packed.schema import PackedKind, cut_sequences
from seqwarm_kernels.self_check.calls import METHODS
from tests.support.backends import serving
from tests.support.kernels import CalledOperators
from tests.support.tiers import first_fast


def on_every_backend(operator, dtype=None):
    return pytest.mark.parametrize("backend", serving(operator, dtype))


def low_precision(operator):
    """Every backend with each dtype that it serves; one dtype is in `make test`."""
    found = []
    for name in serving(operator):
        dtypes = [dtype for dtype in (torch.bfloat16, torch.float16) if name in serving(operator, dtype)]
        found += first_fast([(name, dtype) for dtype in dtypes])
    return found


def native_first(operator):
    """On every backend, but mostly on one: a graph holds the overload as it is, and Triton's is interpreted."""
    names = [name for name in ("native", "reference", "triton") if name in serving(operator)]
    return pytest.mark.parametrize("backend", first_fast(names, "exhaustive"))


@pytest.mark.parametrize("implementation", backends.BACKENDS)
@pytest.mark.parametrize("operator", backends.operators())
def test_every_backend_that_is_installed_serves_every_operator(operator, implementation):
    """The tests of kernels run with what serves here, so one that is missing by mistake would not be noticed."""
    if (problem := backends.problem(implementation)) is not None:
        pytest.skip(problem)
    assert None in [backends.why_not(operator, implementation, device) for device in backends.DEVICE_TYPES]


def dense_arguments(slopes_shape=(2, 2), is_plain=False):
    query = torch.randn(2, 2, 6, 5, requires_grad=True)
    key, value = (torch.randn(2, 1, 6, 5, requires_grad=True) for _ in range(2))
    options = DenseOptions(None, None, None, 0, True, 0.5, None, None, 0.0, 0.0)
    if not is_plain:
        mask = torch.rand(2, 6) > 0.3
        bound = torch.ones(2, 1)
        options = DenseOptions(torch.tensor([1, 2]), mask, torch.tensor(5), 0, False, 0.5, None, 3, 0.1, 2**-24, bound)
    return query, key, value, torch.rand(slopes_shape, requires_grad=True), *options


def varlen_arguments(starts=None):
    query = torch.randn(7, 4, 5, requires_grad=True)
    key, value = (torch.randn(7, 2, 5, requires_grad=True) for _ in range(2))
    ends = torch.tensor([0, 3, 3, 7], dtype=torch.int32)
    options = VarlenOptions(ends, ends, torch.tensor(5), 4, 4, True, 0.5, 2, 0.1, 0.0, starts)
    return query, key, value, torch.rand(3, 4, requires_grad=True), *options


def backward_of(operator, arguments, slopes_need_grad=True):
    """The operator of the gradients, and its arguments."""
    arguments = [each.detach() if isinstance(each, torch.Tensor) else each for each in arguments]
    outputs = overload(operator, "reference")(*arguments)
    gradients = outputs[0], outputs[1].nan_to_num(neginf=0)
    return f"{operator}_backward", (*gradients, *outputs, slopes_need_grad, *arguments)


def resize_packed_arguments():
    pieces, bounds = cut_sequences(np.array([0, 5, 5, 9]), 3, "reshape_overlap")
    inputs = [torch.rand(3), torch.rand(9, 2), torch.arange(9), torch.arange(9), torch.arange(9)]
    return inputs, torch.ones(9), pieces, int(bounds[-1]), [*map(int, PackedKind)], [0, 0, -100, 0, 0], True


CALLS = [
    ("alibi_attention", dense_arguments()),
    ("alibi_attention_varlen", varlen_arguments(torch.tensor([0, 3, -1]))),
    backward_of("alibi_attention", dense_arguments()),
    backward_of("alibi_attention_varlen", varlen_arguments()),
    ("resize_packed", resize_packed_arguments()),
    ("moment_statistics", ([torch.rand(3, 4), torch.rand(5)],) * 3),
]
MORE_CALLS = [
    ("alibi_attention", dense_arguments([2], is_plain=True)),
    backward_of("alibi_attention", dense_arguments(), slopes_need_grad=False),
]


@pytest.mark.parametrize(
    ("operator", "arguments"), [*CALLS, *(pytest.param(*call, marks=pytest.mark.slow) for call in MORE_CALLS)]
)
@native_first("alibi_attention")
def test_opcheck(backend, operator, arguments):
    torch.library.opcheck(overload(operator, backend), arguments)


@pytest.mark.parametrize("rule", first_fast(RULES, "exhaustive"))
@native_first("resize_batch")
def test_opcheck_resize(backend, rule):
    inputs, mask = [torch.arange(22).view(2, 11), torch.randn(2, 11, 3)], torch.ones(2, 11, dtype=torch.bool)
    arguments = inputs, mask, 2, 11, 4, rule, [Kind.LABEL, Kind.SEQUENCE], [-100, 0.0], True
    torch.library.opcheck(overload("resize_batch", backend), arguments)
    outputs = [torch.zeros_like(output) for output in allocate(*arguments)]
    torch.library.opcheck(overload("resize_batch_out", backend), (*arguments, outputs))


def num_graphs():
    return counters["stats"]["unique_graphs"]


def check_compiles_like_eager(function, inputs_by_length, compiler="aot_eager"):
    """No graph break, equal results, and at most one recompile, which makes shapes dynamic."""
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    before = num_graphs()
    for inputs in inputs_by_length:
        leaves = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
        results = []
        for called in (compiled, function):
            torch.manual_seed(0)
            out = called(*inputs)
            results.append((out, torch.autograd.grad(out[0].sum() + out[1].sum(), leaves) if leaves else ()))
        torch.testing.assert_close(*results)
    assert num_graphs() - before <= 2


#: Rows that share tiles, and longer ones.
LENGTHS = (8, 16, 80)


def heads_of(length):
    return [torch.randn(2, heads, length, 5, requires_grad=True) for heads in (4, 2, 2)]


#: Inductor takes seconds to compile what aot_eager traces in milliseconds. Both guard the same shapes.
@pytest.mark.parametrize("compiler", first_fast(["aot_eager", "inductor"]))
@native_first("alibi_attention")
def test_attention_compiles_once_for_a_ramp(backend, compiler):
    def attend(query, key, value, slopes, mask, segment_length):
        options = {"segment_length": segment_length, "window": 40, "return_lse": True, "backend": backend}
        out, lse = alibi_attention(query, key, value, slopes, key_padding_mask=mask, **options)
        return out, lse.exp()

    inputs = [
        (*heads_of(length), alibi_slopes(4).requires_grad_(), torch.rand(2, length) > 0.2, length // 2)
        for length in LENGTHS
    ]
    check_compiles_like_eager(attend, inputs, compiler)


@native_first("alibi_attention")
def test_dropout_compiles_once_for_a_ramp(backend):
    """A compiled call may draw another seed."""

    def attend(query, key, value):
        return alibi_attention(query, key, value, dropout_p=0.2, causal=False, backend=backend)

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    before = num_graphs()
    for length in LENGTHS:
        assert compiled(*heads_of(length)).isfinite().all()
    assert num_graphs() - before <= 2


@native_first("alibi_attention_varlen")
def test_varlen_compiles_once_for_a_ramp(backend):
    def attend(query, key, value, cu_seqlens, longest):
        options = {"window": 30, "query_start": longest, "return_lse": True, "backend": backend}
        return alibi_attention_varlen(query, key, value, cu_seqlens, cu_seqlens, longest, longest, **options)

    def inputs(length):
        tensors = [torch.randn(3 * length, heads, 5) for heads in (2, 1, 1)]
        return [*tensors, torch.arange(4, dtype=torch.int32) * length, length]

    check_compiles_like_eager(attend, [inputs(length) for length in LENGTHS])


@pytest.mark.parametrize(
    ("options", "compiler"),
    first_fast([*((options, "aot_eager") for options in METHODS.values()), (METHODS["truncate"], "inductor")]),
    ids=str,
)
@native_first("resize_batch")
def test_resize_compiles_once_for_a_ramp(backend, options, compiler):
    """Lengths up to and beyond the full length."""

    def resize(input_ids, attention_mask, labels, seq_len):
        batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        resized, info = resize_batch(batch, seq_len, return_info=True, backend=backend, **options)
        return resized["input_ids"] * 2, resized["labels"], resized["attention_mask"], info.num_valid_tokens

    input_ids = torch.arange(160).view(2, 80)
    mask = torch.arange(80) < torch.tensor([[70], [35]])
    inputs = [(input_ids, mask, input_ids.clone(), length) for length in (*LENGTHS, 100)]
    check_compiles_like_eager(resize, inputs, compiler)


@pytest.mark.parametrize("compiler", [None, pytest.param("aot_eager", marks=pytest.mark.exhaustive_in_interpreter)])
@pytest.mark.parametrize(("backend", "dtype"), low_precision("alibi_attention"))
def test_autocast_casts_query_key_value_but_not_slopes(backend, dtype, compiler):
    query, key, value = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    slopes = (alibi_slopes(4) * 1.001).requires_grad_()  # 1.001 is not a bfloat16

    def attend(query, key, value, slopes):
        return alibi_attention(query, key, value, slopes, return_lse=True, backend=backend)

    compiled = torch.compile(attend, fullgraph=True, backend=compiler) if compiler else attend
    with torch.autocast("cpu", dtype=dtype):
        out, lse = compiled(query, key, value, slopes)
    low = [tensor.to(dtype) for tensor in (query, key, value)]
    expected, expected_lse = attend(*low, slopes)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0)
    leaves = [query, key, value, slopes]
    gradients = torch.autograd.grad(out.float().sum(), leaves)
    assert [gradient.dtype for gradient in gradients] == [torch.float32] * 4
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.float().sum(), leaves), rtol=0, atol=0)


@on_every_backend("alibi_attention", torch.float64)
def test_autocast_does_not_cast_float64(backend):
    query, key, value = (torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = alibi_attention(query, key, value, backend=backend)
    torch.testing.assert_close(out, alibi_attention(query, key, value, backend=backend), rtol=0, atol=0)


@pytest.mark.exhaustive_in_interpreter
@on_every_backend("alibi_attention")
def test_checkpointing_replays_the_dropout(backend):
    """torch.ops.seqwarm.alibi_attention.<backend> runs once if its outputs are saved, else twice."""
    inputs = [torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3)]
    operator = getattr(torch.ops.seqwarm.alibi_attention, backend)

    def attend(*tensors):
        return alibi_attention(*tensors, dropout_p=0.5, backend=backend)

    def gradients(function):
        torch.manual_seed(5)
        return torch.autograd.grad(function(*inputs).square().sum(), inputs)

    expected = gradients(attend)
    for saved, times in (([operator], 1), ([], 2)):
        selection = partial(create_selective_checkpoint_contexts, saved)
        with CalledOperators() as called:
            found = gradients(partial(checkpoint, attend, use_reentrant=False, context_fn=selection))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert called.names.count(operator.name()) == times


@pytest.mark.skipif(backends.module is None, reason="the module for this torch is not built")
def test_a_module_from_older_sources_is_refused(monkeypatch):
    name = kernels.module_name(torch.__version__)
    monkeypatch.setitem(sys.modules, f"seqwarm_kernels.{name}", SimpleNamespace(__file__="_C.so"))
    with pytest.raises(ImportError, match=r"_C.so lacks alibi_attention, .*check_packing: .* rebuild it"):
        kernels.load()
