"""Compares the kernels of this tree with the reference in float64: `python -m bench.gpu.candidates.check GROUP ...`.

On a GPU in bfloat16. On a CPU in float16, in Triton's interpreter, which multiplies bfloat16 wrongly.
"""

from __future__ import annotations

import faulthandler
import sys

import torch

from .cases import GROUPS


def main(names: list[str]) -> None:
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float16)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    wrong = []
    for name in names:
        for call in GROUPS[name].checked:
            found = [str(each) for each in call.compare("triton", device, dtype) if not each.within()]
            wrong += [f"{call}: {each}" for each in found]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    faulthandler.enable()
    main(sys.argv[1:])
