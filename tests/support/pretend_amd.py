# ruff: noqa: E402, since torch must be for ROCm before the package is imported
"""The host side of the Triton kernels as with torch for ROCm on an AMD GPU, up to the launch.

    python -m tests.support.pretend_amd gfx942

Prints JSON: why Triton does not serve (null), and what each kernel needs that calls of attention and of resize_batch
launch.
"""

import json
import sys
from dataclasses import asdict

import torch

torch.version.hip = "7.0"  # read when the package is imported

from tests.support.pretend_gpu import forward_and_backward, pretend  # must come first: disables Triton's interpreter

# isort: split
from bench.alibi_attention import amdgcn
from seqwarm_kernels import alibi_attention
from seqwarm_kernels.ops import backends
from tests.support.pretend_resize import resized


def main():
    problem, launched = backends.problem("triton"), []
    pretend(sys.argv[1], launched)
    for length in (16, 512):  # at which rows share tiles, and keys are skipped
        forward_and_backward(2, length)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    query, key = torch.randn(1, 4, 1, 64), torch.randn(1, 4, 512, 64)
    alibi_attention(query, key, key, backend="triton")
    resized("truncate", 4, 1024, 256)
    kernels = {kernel.name: asdict(amdgcn.read(kernel.asm["amdgcn"])) for kernel in launched}
    print(json.dumps({"problem": problem, "kernels": kernels}))


if __name__ == "__main__":
    main()
