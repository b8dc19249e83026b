"""The parts specific to the native backend: threads, chunks, replaced blocks of keys, products in float32."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from seqwarm_kernels import alibi_attention
from seqwarm_kernels.ops import backends
from seqwarm_kernels.self_check.calls import RESULTS, differentiate
from tests.support.attention_cases import CASES, Case, check_case
from tests.support.backends import needs_native
from tests.support.kernels import Exact, allocations_of, check_extreme_slopes

pytestmark = needs_native


def tensors_of(length, heads=(2, 1), batch_size=1, head_dim=32):
    return [torch.randn(batch_size, heads[place > 0], length, head_dim) for place in range(3)]


@pytest.mark.parametrize(("heads", "dropout_p"), [([2, 1], 0.2), ([1, 1], 0.0)])
def test_the_number_of_threads_changes_only_sums_over_chunks(threads, heads, dropout_p):
    leaves, attend = Case({"dropout_p": dropout_p}, (500, 500), heads, 1, head_dim=32).call()
    results = {}
    weights = torch.randn_like(leaves[0]), torch.randn(leaves[0].shape[:-1])

    def attended():
        torch.manual_seed(3)
        return differentiate(
            lambda leaves: attend(leaves, "native"), [leaf.requires_grad_() for leaf in leaves], weights
        )

    for number in (1, 3):
        threads(number)
        results[number] = attended()
        assert all(map(torch.equal, results[number], attended())), f"{number} threads gave other bits the second time"
    sums = ("grad_key", "grad_value")
    assert not any(torch.equal(*(results[number][RESULTS.index(name)] for number in (1, 3))) for name in sums)
    for name, one, three in zip(RESULTS, results[1], results[3], strict=True):
        if name in sums:
            torch.testing.assert_close(one, three)
        else:
            assert torch.equal(one, three), f"{name} depends on the number of threads"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_onednn(dtype):
    """Products fall back to BLAS, and bfloat16 is converted to float32."""
    with torch.backends.mkldnn.flags(enabled=False):
        check_case(CASES["head_dim 20"], "native", dtype=dtype)


LIMITS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


def check_instructions(limits):
    """Those that multiply bfloat16, without oneDNN and with it. AVX512-BF16 is oneDNN's."""
    expected = None
    if limits in ({}, WITHOUT_AMX) and torch.cpu._is_avx512_bf16_supported():
        has_amx = torch.cpu._is_amx_tile_supported() or "SEQWARM_EMULATED_AMX" in os.environ
        expected = "AMX" if has_amx and limits == {} else "AVX512-BF16"
    with torch.backends.mkldnn.flags(enabled=False):
        assert backends.kernels.bfloat16_instructions() == ("AMX" if expected == "AMX" else None)
    assert backends.kernels.bfloat16_instructions() == expected


@pytest.mark.skipif(any(name in os.environ for name in LIMITS), reason="the environment limits instructions")
def test_instructions_that_multiply_bfloat16():
    check_instructions({})


@pytest.mark.slow
@pytest.mark.parametrize("limits", [WITHOUT_AMX, {LIMITS[1]: "AVX2"}], ids=str)
def test_fewer_instructions(limits):
    """The variables are read when a process starts to multiply."""
    lengths = (5, 8, 12, 40, 150)  # pairs, tiles of each size, and longer rows, where the CPU has them
    code = "import torch\nfrom tests.support.attention_cases import Case, check_case\n"
    code += "from tests.ops.test_attention_native import check_instructions\n"
    code += f"check_instructions({limits})\n"
    code += f"for length in {lengths}: check_case(Case({{}}, (length, length)), 'native', dtype=torch.bfloat16)"
    environment = {name: value for name, value in os.environ.items() if name not in LIMITS} | limits
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_nan_reaches_only_the_queries_that_see_it():
    query, key, value = tensors_of(100)
    key[0, 0, 40, 3] = float("nan")
    out = alibi_attention(query, key, value, backend="native", skip_tolerance=0)
    assert out[:, :, 40:].isnan().all()
    assert out[:, :, :32].isfinite().all()
    query, key, value = tensors_of(100)
    query[0, 1, 7] = float("nan")
    out = alibi_attention(query, key, value, backend="native")
    assert out[0, 1, 7].isnan().all()
    assert out.isnan().sum() == out.shape[-1]


def chunks_of_backward(length, *, num_heads=1, num_keys=None, head_dim=64):
    """The number of chunks of a key head, from the memory for their gradients of its keys and values."""
    query = torch.randn(1, num_heads, length, head_dim)
    key = torch.randn(1, num_heads, num_keys or length, head_dim)
    inputs = (query, key, key, torch.ones(num_heads))
    options = (None, None, None, 0, True, 1.0, None, None, 0.0, 0.0, None)
    saved = torch.ops.seqwarm.alibi_attention.native(*inputs, *options)
    backward = partial(torch.ops.seqwarm.alibi_attention_backward.native, query, None, *saved, False, *inputs, *options)
    backward()  # the thread keeps its scratch memory for the next call
    return max(1, max(allocations_of(backward)) // (2 * key.nbytes))


def test_chunks_of_queries_keep_all_threads_busy(threads):
    """Two for each thread, unless there are fewer tiles, enough heads, or little work."""
    threads(2)
    assert chunks_of_backward(512) == 4
    assert chunks_of_backward(129) == 3  # tiles
    assert chunks_of_backward(33, num_keys=512) == 1
    assert chunks_of_backward(256, num_heads=3) == 2
    assert chunks_of_backward(256, num_heads=8) == 1
    assert chunks_of_backward(96, head_dim=16) == 1
    threads(1)
    assert chunks_of_backward(512) == 1


def test_memory_grows_with_the_length():
    """Forward and backward together allocate less than the scores of one head."""
    length = 4096
    leaves = [tensor.requires_grad_() for tensor in tensors_of(length, heads=(1, 1))]
    found = allocations_of(lambda: alibi_attention(*leaves, backend="native").sum().backward())
    assert 0 < sum(found) < length * length * 4 / 4


@pytest.mark.parametrize("causal", [False, True])
def test_memory_for_keys_holds_those_in_sight(causal):
    query, _, _ = tensors_of(64, heads=(1, 1), head_dim=72)
    _, key, value = tensors_of(8192, heads=(1, 1), head_dim=72)
    found = allocations_of(alibi_attention, query, key, value, backend="native", window=16, causal=causal)
    assert max(found) < key.nbytes / 4


@pytest.mark.parametrize("options", [{"window": 100}, {"segment_length": 256, "causal": False}], ids=str)
def test_memory_for_gradients_holds_the_keys_in_sight(threads, options):
    threads(1)  # with more, chunks hold the sums of all keys
    leaves = [tensor.requires_grad_() for tensor in tensors_of(4096, heads=(1, 1))]
    out = alibi_attention(*leaves, backend="native", **options)
    assert max(allocations_of(torch.autograd.grad, out, leaves, out)) < 1.5 * leaves[1].nbytes  # of twice as much


@pytest.mark.parametrize("tokens_first", [False, True])
def test_results_have_the_layout_of_the_inputs(tokens_first):
    tensors = tensors_of(70, heads=(2, 2))
    if tokens_first:
        tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    leaves = [tensor.requires_grad_() for tensor in tensors]
    out = alibi_attention(*leaves, backend="native")
    for result in (out, *torch.autograd.grad(out.sum(), leaves)):
        assert result.transpose(1, 2).is_contiguous() == tokens_first


@pytest.mark.parametrize("function", ["expand", "transpose", "slice"])
def test_strides_of_gradients(function):
    """Within the budget, not to the bit: not every BLAS sums in one order whatever the strides."""
    leaves = tensors_of(70)
    dense = torch.randn_like(leaves[0])
    grad_out = {
        "expand": dense[:, :, :1].expand_as(dense),
        "transpose": dense.mT.contiguous().mT,
        "slice": torch.cat([dense, dense], -1)[..., 1 : dense.shape[-1] + 1],
    }[function]

    def gradients(leaves, backend="reference"):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = alibi_attention(*leaves, backend=backend)
        return torch.autograd.grad(out, leaves, grad_out.to(out.dtype))

    Exact(gradients, leaves).check(RESULTS[2:5], gradients(leaves, "native"), [torch.float32] * 3)


@pytest.mark.parametrize("place", [530, 570])
@pytest.mark.parametrize("hides_some", [False, True])
def test_a_far_key_of_large_norm_is_in_reach(hides_some, place):
    """Also in a batch with a mask: only the norms of hidden keys do not count. All other queries reach few keys, those
    of one tile that come before and after as well."""
    length, far = 600, 130
    query, key, value = tensors_of(length, heads=(1, 1))
    query /= 100
    key[0, 0, far] *= 40
    query[0, 0, place] = key[0, 0, far]
    mask = torch.ones(1, length, dtype=torch.bool)
    mask[0, 400] = not hides_some
    out = alibi_attention(query, key, value, torch.tensor([0.5]), key_padding_mask=mask, backend="native")
    assert torch.allclose(out[0, 0, place], value[0, 0, far], atol=1e-5)


@pytest.mark.parametrize(("queries", "keys"), [(150, 150), (2, 150), (40, 40)])
@pytest.mark.parametrize(
    ("slope", "hides_nearest"), [(-100.0, False), (-1e7, False), (1e4, True), (1e7, True), (3e36, False), (3e38, False)]
)
def test_extreme_slopes(queries, keys, slope, hides_nearest):
    check_extreme_slopes("native", slope, hides_nearest=hides_nearest, queries=queries, keys=keys)
