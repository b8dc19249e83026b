"""What Triton's interpreter refuses here, because a GPU would not: tests/support/interpreter.py."""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels run on a GPU")


@triton.jit
def copy_kernel(source, out, length, stored, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out + place, tl.load(source + place, mask=place < length), mask=place < stored)


def test_loads_are_poisoned_where_they_are_masked():
    numbers, out = torch.arange(1.0, 5), torch.zeros(8)
    copy_kernel[(1,)](numbers, out, 4, 5, BLOCK=8)
    assert out[:4].equal(numbers)
    assert out[4].isnan()
    assert out[5:].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("length", "stored"), [(5, 4), (4, 5)])
def test_accesses_stay_inside_of_a_tensor(length, stored):
    """Another tensor, or the memory behind a view, is not its own."""
    numbers, more = torch.zeros(8)[:4], torch.zeros(8)[:4]
    copy_kernel[(1,)](numbers, more, 4, 4, BLOCK=8)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="not inside of one of its tensors"):
        copy_kernel[(1,)](numbers, more, length, stored, BLOCK=8)


@triton.jit
def follow_kernel(table, out, behind):
    address = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(out, tl.load(address + behind))


def test_addresses_in_a_table_lead_to_tensors():
    number, out = torch.full((1,), 7.0), torch.zeros(1)
    follow_kernel[(1,)](torch.tensor([number.data_ptr()]), out, 0)
    assert out.item() == 7
    with pytest.raises(triton.runtime.errors.InterpreterError, match="not inside of one of its tensors"):
        follow_kernel[(1,)](torch.tensor([4096]), out, 0)  # no process has memory there


@triton.jit
def store_kernel(out, step):
    tl.store(out + tl.program_id(0) * step, 1)


def test_two_programs_do_not_store_the_same_item():
    store_kernel[(3,)](torch.zeros(3), 1)
    with pytest.raises(triton.runtime.errors.InterpreterError, match="two programs"):
        store_kernel[(3,)](torch.zeros(3), 0)
