"""The smallest Triton kernel: does Triton compile and launch at all?"""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one(pointer, length, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, BLOCK)
    tl.store(pointer + index, tl.load(pointer + index, mask=index < length) + 1, mask=index < length)


def add_one(device: torch.device) -> None:
    numbers = torch.arange(100, device=device)
    _add_one[(1,)](numbers, 100, BLOCK=128)
    assert torch.equal(numbers.cpu(), torch.arange(1, 101)), f"a kernel that adds 1 to 0 ... 99 gave {numbers.tolist()}"
