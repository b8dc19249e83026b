"""Compiles moment_statistics' Triton kernel as for a GPU; for sm_90: `python -m tests.support.pretend_moments 90`.

Prints JSON: registers, spills and wide loads of the kernel, and the number of kernels for all sizes and dtypes.
"""

import json
import re
import sys
from collections import Counter

from tests.support.pretend_gpu import pretend  # must come first: disables Triton's interpreter

# isort: split
import torch

from bench.alibi_attention.compiled import disassemble
from seqwarm_kernels.ops.moment_statistics.triton import moment_statistics


def main():
    launched = []
    pretend(int(sys.argv[1]), launched)
    for count in (1, 2, 16, 600):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            tensors = [torch.zeros(31 * count, dtype=dtype) for _ in range(count)]
            moment_statistics(tensors, tensors[1:], tensors)
    registers, spilled, assembly = disassemble(launched[-1].asm["cubin"])
    loads = Counter(re.findall(r"\bLDG(?:\.\w+)*\.128\b", assembly))
    kernels = len({id(kernel) for kernel in launched})
    print(json.dumps({"registers": registers, "spilled": spilled, "wide_loads": loads.total(), "kernels": kernels}))


if __name__ == "__main__":
    main()
