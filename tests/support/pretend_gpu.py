"""The host side of the Triton kernels as on a GPU of capability 9.0, up to the launch: real arguments, real compiler.

A separate program, because Triton's interpreter, which other tests use, replaces the host side. Prints the number of
kernels compiled after a length at which rows share tiles, a short one, a long one, and many others.
"""

import json
import os

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from seqwarm_kernels import alibi_slopes
from seqwarm_kernels.ops.alibi_attention import triton as attention
from seqwarm_kernels.ops.alibi_attention.schema import DenseOptions

KERNELS = (
    attention.forward_kernel,
    attention.backward_ranges_kernel,
    attention.backward_query_kernel,
    attention.backward_key_kernel,
    attention.key_norms_kernel,
)


class PretendedDriver:
    def __init__(self, chip):
        self.chip = chip

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.chip, 32)


def pretend(chip, launched=None):
    """Compile kernels for a chip from now on instead of running them. Appends each launched kernel to `launched`."""
    driver.set_active(PretendedDriver(chip))

    def compile_only(self, *args, warmup, **options):
        compiled = launch(self, *args, warmup=True, **options)
        if launched is not None:
            launched.append(compiled)
        return compiled

    def do_not_run(self, grid):
        if launched is not None:
            launched.append(self)
        return lambda *arguments: None

    JITFunction.run = compile_only
    CompiledKernel.__getitem__ = do_not_run


launch = JITFunction.run


def forward_and_backward(batch_size, length, head_dim=64):
    query = torch.randn(batch_size, length, 4, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    key = torch.randn(batch_size, 2, length, head_dim, dtype=torch.bfloat16)
    slopes = alibi_slopes(4)
    options = DenseOptions(None, None, None, 0, True, 0.125, None, None, 0.0, 2**-24)
    out, lse, log2_sum, ranges = attention.forward(query, key, key, slopes, options)
    attention.backward((out, lse, out, lse, log2_sum, ranges, True, query, key, key, slopes), options)


def compiled():
    return sum(len(cache[0]) for kernel in KERNELS for cache in kernel.device_caches.values())


def main():
    pretend(chip=90)
    counts = {}
    for name, length in {"shared": 16, "short": 128, "long": 1024}.items():  # skipping in the last
        forward_and_backward(2, length)
        counts[name] = compiled()
    for batch_size, length in ((1, 1), (3, 17), (16, 64), (2, 16), (5, 513), (1, 2048)):
        forward_and_backward(batch_size, length)
    print(json.dumps({**counts, "afterwards": compiled()}))


if __name__ == "__main__":
    main()
