"""Compiles moment_statistics' Triton kernel as for a GPU; for sm_90: `python -m tests.support.pretend_moments 90`.

Prints JSON: registers, spills and wide loads of the kernel, the number of kernels for all sizes and dtypes, and of the
loads that follow the first ticket, how many there are, and how many may find old values in a cache.
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


def measured(count, dtype):
    tensors = [torch.zeros(31 * count, dtype=dtype) for _ in range(count)]
    moment_statistics(tensors, tensors[1:], tensors)


def main():
    launched = []
    pretend(int(sys.argv[1]), launched)
    for count in (1, 2, 16, 600):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            measured(count, dtype)
    registers, spilled, assembly = disassemble(launched[-1].asm["cubin"])
    loads = Counter(re.findall(r"\bLDG(?:\.\w+)*\.128\b", assembly))
    kernels = len({id(kernel) for kernel in launched})
    report = {"registers": registers, "spilled": spilled, "wide_loads": loads.total(), "kernels": kernels}
    _, after_ticket = launched[-1].asm["ptx"].split("atom.global", 1)
    late = re.findall(r"\bld\.global[.\w]*", after_ticket)
    print(json.dumps(report | {"late_loads": len(late), "cached": sum(".cg" not in load for load in late)}))


if __name__ == "__main__":
    main()
