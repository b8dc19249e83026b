"""What Triton's interpreter refuses here, because a GPU would not: tests/support/interpreter.py."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels run on a GPU")


@triton.jit
def copy_kernel(source, out, length, stored, step, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    loaded = tl.load(source + place, mask=place < length)
    tl.store(out + tl.program_id(0) * step + place, loaded, mask=place < stored)


def test_loads_are_poisoned_where_they_are_masked():
    numbers, out = torch.arange(1.0, 5), torch.zeros(8)
    copy_kernel[(1,)](numbers, out, 4, 5, 0, BLOCK=8)
    torch.testing.assert_close(out, torch.tensor([1, 2, 3, 4, torch.nan, 0, 0, 0]), equal_nan=True)


@pytest.mark.parametrize(
    ("programs", "length", "stored", "error"),
    [(1, 5, 4, "not inside of one"), (1, 4, 5, "not inside of one"), (2, 4, 4, "two programs")],
)
def test_accesses_stay_inside_of_a_tensor_and_no_two_programs_store_one_item(programs, length, stored, error):
    """Another tensor, or the memory behind a view, is not its own."""
    numbers, out = torch.zeros(8)[:4], torch.zeros(8)[:4]
    copy_kernel[(1,)](numbers, out, 4, 4, 0, BLOCK=8)
    with pytest.raises(triton.runtime.errors.InterpreterError, match=error):
        copy_kernel[(programs,)](numbers, out, length, stored, 0, BLOCK=8)
