"""Compares the kernels of this tree with the reference: `python -m bench.gpu.candidates.check SECONDS GROUP ...`.

On a GPU in bfloat16, on a CPU in float16 in Triton's interpreter, which multiplies bfloat16 wrongly. Calls begin in the
first seconds: on a GPU each option compiles kernels of its own.
"""

from __future__ import annotations

import faulthandler
import sys
import time

import torch

from .cases import GROUPS


def main(seconds: float, names: list[str]) -> None:
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float16)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    end = time.monotonic() + seconds
    wrong = []
    for name in names:
        for call in GROUPS[name].checked:
            if time.monotonic() > end:
                break
            found = [str(each) for each in call.compare("triton", device, dtype) if not each.within()]
            wrong += [f"{call}: {each}" for each in found]
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    faulthandler.enable()
    main(float(sys.argv[1]), sys.argv[2:])
