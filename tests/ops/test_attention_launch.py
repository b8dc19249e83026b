"""Launches of the Triton kernels: what compiles again, what is allocated, and offsets beyond 32 bits."""

import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch

from seqwarm_kernels import alibi_attention, alibi_slopes
from seqwarm_kernels.ops import backends
from tests.support.backends import serving
from tests.support.kernels import DEVICES, TRITON_RUNS, CalledOperators, allocations_of, pretended

pytest.importorskip("triton")
pytestmark = TRITON_RUNS


def kernels():
    """Those of Triton's attention, by the names of their modules."""
    modules = ("short_kernel", "forward", "decode_kernel", "backward_ranges", "backward_query", "backward_key", "reach")
    found = {}
    for module in modules:
        members = vars(importlib.import_module(f"seqwarm_kernels.ops.alibi_attention.triton_{module}"))
        found |= {name: member for name, member in members.items() if name.endswith("_kernel")}
    assert len(found) == 9
    return list(found.values())


@pytest.mark.parametrize(("is_hip", "ignored"), [(False, ["pointer", "length"]), (True, ["length"])])
def test_no_number_causes_a_compilation(monkeypatch, is_hip, ignored):
    """Triton's specialization ignores every argument that is not a constant. AMD's asks what tensors span."""
    from seqwarm_kernels.ops import triton_launch

    monkeypatch.setattr(backends, "IS_HIP", is_hip)
    asked = {}
    monkeypatch.setattr(triton_launch.triton, "jit", lambda function, **options: asked.update(options) or function)

    @triton_launch.kernel
    def some_kernel(pointer, length: "tl.int32", BLOCK: "tl.constexpr"):  # noqa: F821
        pass

    assert asked == {"do_not_specialize": ignored}
    for kernel in kernels():
        for parameter in inspect.signature(kernel.fn).parameters.values():
            annotation = str(parameter.annotation)
            is_number = "constexpr" not in annotation and "empty" not in annotation
            assert not is_number or annotation.startswith("tl."), f"{parameter.name} has no fixed width"
            assert ("constexpr" in annotation) == parameter.name.isupper()


@pytest.mark.slow
def test_lengths_and_batch_sizes_compile_nothing_on_a_pretended_gpu():
    """Whatever Triton's default, kernels multiply and add at once, as their margins of error assume."""
    report = pretended("attention", 90, TRITON_DEFAULT_FP_FUSION="0")
    assert (report.pop("launches"), report.pop("launched alike"), report.pop("fused")) == (5, True, True)
    # Rows that share tiles take two kernels of their own, long backward, too, and to skip keys takes two more.
    assert report == {"shared": 2, "short": 5, "long": 9, "afterwards": 9}


def test_memory_grows_with_the_length_not_its_square():
    def allocated(length):
        leaf = torch.randn(1, 1, length, 16, requires_grad=True)
        return allocations_of(lambda: alibi_attention(leaf, leaf, leaf, backend="triton").sum().backward())

    short, long = allocated(80), allocated(240)
    assert max(long) <= 3 * max(short)
    assert sum(long) <= 3.15 * sum(short)
    assert max(long) < 240 * 240 * 4


def _elsewhere(tensor):
    """The tensor in other memory: not aligned to 16 bytes, and with its tokens before its heads."""
    moved = tensor.new_empty(tensor.numel() + 1)[1:]
    return moved.view_as(tensor.transpose(1, 2)).copy_(tensor.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "length"), [(2, 20), (1, 40)])  # short rows, and a longer one
def test_backward_reads_what_forward_saved_wherever_it_lies(device, rows, length):
    query, key, value, grad_out = torch.randn(4, rows, 2, length, 16, device=device)
    slopes = alibi_slopes(2, device=device)
    options = (None, None, None, 0, True, 0.25, None, None, 0.0, 0.0, None)
    saved = torch.ops.seqwarm.alibi_attention.triton(query, key, value, slopes, *options)
    backward = torch.ops.seqwarm.alibi_attention_backward.triton
    expected = backward(grad_out, None, *saved, True, query, key, value, slopes, *options)
    for index, tensor in enumerate(saved):
        if tensor.numel() and tensor.dim() > 2:
            moved = [_elsewhere(each) if number == index else each for number, each in enumerate(saved)]
            results = backward(grad_out, None, *moved, True, query, key, value, slopes, *options)
            torch.testing.assert_close(results, expected, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_offsets_beyond_32_bits(device):
    """Rows with a stride of 2^31 elements. Most of that memory is never touched."""
    stride = 2**31 + 8
    shape, strides = (1, 2, 3, 16), (0, 8 * 16, stride, 1)
    try:
        memory = torch.empty(2 * stride + 4 * 8 * 16, dtype=torch.float16, device=device)
    except RuntimeError:
        pytest.skip("needs 8 GiB of address space")
    inputs = []
    for offset in range(3):
        tensor = memory.as_strided(shape, strides, 2 * offset * 8 * 16 // 2)
        tensor.copy_(torch.randn(shape))
        inputs.append(tensor)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    packed = [tensor.detach().contiguous().requires_grad_() for tensor in inputs]
    out, expected = (alibi_attention(*tensors, backend="triton") for tensors in (leaves, packed))
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    gradients, wanted = torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(expected.sum(), packed)
    torch.testing.assert_close(gradients, wanted, rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "named"), [(torch.float64, "float64"), (torch.bfloat16, "bfloat16")])
def test_unsupported_dtypes(dtype, named):
    query = torch.randn(1, 2, 5, 4, dtype=dtype)
    with pytest.raises(ValueError, match=named):
        alibi_attention(query, query, query, backend="triton")
    assert alibi_attention(query, query, query).dtype == dtype


def test_the_interpreter_is_never_the_default():
    assert backends.choose("alibi_attention", "cpu", None, torch.float32) != "triton"


@pytest.mark.parametrize(("allowed", "is_hip"), [("tf32", False), ("ieee", False), ("tf32", True)])
def test_tf32_changes_no_16_bit_kernel(monkeypatch, allowed, is_hip):
    from seqwarm_kernels.ops.alibi_attention import triton as host

    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=allowed))
    monkeypatch.setattr(backends, "IS_HIP", is_hip)
    assert host.precision_of(torch.float32) == ("ieee" if is_hip else allowed)
    assert host.precision_of(torch.bfloat16) == "ieee"


@pytest.mark.parametrize("backend", serving())
def test_an_output_that_is_not_used_has_no_gradient(backend):
    """The same gradients as from zeros. For an unused lse no zeros are made."""
    leaves = [torch.randn(1, 2, 9, 4, requires_grad=True) for _ in range(3)] + [torch.rand(2, requires_grad=True)]

    def gradients(weight_of_out, weight_of_lse):
        out, lse = alibi_attention(*leaves, return_lse=True, backend=backend)
        weighted = ((out, weight_of_out), (lse, weight_of_lse))
        loss = sum(part.cos().sum() * weight for part, weight in weighted if weight is not None)
        with CalledOperators() as called:
            return called.names, torch.autograd.grad(loss, leaves, materialize_grads=True)

    for alone, both in (((1, None), (1, 0)), ((None, 1), (0, 1))):
        (names, got), (_, expected) = gradients(*alone), gradients(*both)
        torch.testing.assert_close(got, expected)
        assert alone != (1, None) or not any("zeros" in name for name in names)


def test_what_decides_a_launch_decides_its_kind(monkeypatch):
    """TF32, alignment, and whether the gradient of lse and of slopes is asked for."""
    from seqwarm_kernels.ops.alibi_attention import triton as host

    host._known.clear()
    query = torch.randn(1, 1, 3, 16, requires_grad=True)
    slopes = torch.ones(1, requires_grad=True)
    for _ in range(2):
        for asked in ([query, slopes], [query]):
            for outputs in (slice(0, 1), slice(0, 2)):
                out = alibi_attention(query, query, query, slopes, return_lse=True, backend="triton")
                torch.autograd.grad(sum(one.sum() for one in out[outputs]), asked)
    # Without the module for this torch, slopes that require a gradient always get one.
    known = 1 + 4 if backends.module is not None else 1 + 2
    assert len(host._known) == known

    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    alibi_attention(query, query, query, slopes, backend="triton")
    assert len(host._known) == known + 1
    shifted = torch.randn(49)[1:].view(1, 1, 3, 16)
    alibi_attention(shifted, query, query, slopes, backend="triton")
    assert len(host._known) == known + 2
