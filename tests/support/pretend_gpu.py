"""The host side of the Triton kernels as on a GPU of capability 9.0, up to the launch: real arguments, real compiler.

A separate program, because Triton's interpreter, which other tests use, replaces the host side. Prints the number of
kernels compiled after a length at which rows share tiles, a short one, a long one, and many others, whether two calls
of a kind launch alike, and whether all kernels fuse multiplications with additions.
"""

import json
import os

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.compiler import CompiledKernel

from bench.alibi_attention import pretended_gpu
from seqwarm_kernels import alibi_slopes
from seqwarm_kernels.ops.alibi_attention import (
    gluon_backward_key,
    gluon_backward_query,
    gluon_forward,
    triton_backward_ranges,
    triton_decode_kernel,
    triton_reach,
    triton_short_kernel,
)
from seqwarm_kernels.ops.alibi_attention import triton as attention
from seqwarm_kernels.ops.alibi_attention.schema import DenseOptions

KERNELS = (
    attention.forward_kernel,
    triton_decode_kernel.decode_kernel,
    triton_decode_kernel.merge_kernel,
    triton_backward_ranges.backward_ranges_kernel,
    attention.backward_query_kernel,
    attention.backward_key_kernel,
    triton_reach.key_norms_kernel,
    triton_short_kernel.short_forward_kernel,
    triton_short_kernel.short_backward_kernel,
    gluon_forward.gluon_forward_kernel,
    gluon_backward_query.gluon_backward_query_kernel,
    gluon_backward_key.gluon_backward_key_kernel,
)


def pretend(chip, launched=None):
    """Compile kernels for a chip from now on instead of running them. Appends each launched kernel to `launched`."""
    pretended_gpu.pretend(chip)
    if launched is not None:
        CompiledKernel.launch_metadata = lambda kernel, *launch: launched.append(kernel)


def forward_and_backward(batch_size, length, head_dim=64):
    query = torch.randn(batch_size, length, 4, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    key = torch.randn(batch_size, 2, length, head_dim, dtype=torch.bfloat16)
    slopes = alibi_slopes(4)
    options = DenseOptions(None, None, None, 0, True, 0.125, None, None, 0.0, 2**-24)
    out, lse, log2_sum, ranges = attention.forward(query, key, key, slopes, options)
    attention.backward((out, lse, out, lse, log2_sum, ranges, True, query, key, key, slopes), options)


def compiled():
    return sum(len(cache[0]) for kernel in KERNELS for cache in kernel.device_caches.values())


def launches_of_two_calls(length):
    """The launches of the first call of a kind, whose arguments Triton finds by name, and those of the second."""
    launched = []

    def launch(kernel, grid, stream, *arguments):
        launched.append((kernel.name, grid, [described(argument) for argument in arguments]))

    CompiledKernel.launch_metadata = launch
    attention._known.clear()
    for _ in range(2):
        forward_and_backward(2, length)
    half = len(launched) // 2
    return launched[:half], launched[half:]


def described(argument):
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype
    if hasattr(argument, "block_shape"):  # a descriptor
        return argument.shape, argument.strides, argument.block_shape
    return argument


def main():
    launched, counts = [], {}
    pretend(90, launched)
    for name, length in {"shared": 16, "short": 128, "long": 1024}.items():  # skipping in the last
        forward_and_backward(2, length)
        counts[name] = compiled()
    for batch_size, length in ((1, 1), (3, 17), (16, 64), (2, 16), (5, 513), (1, 2048)):
        forward_and_backward(batch_size, length)
    counts["afterwards"] = compiled()
    first, second = launches_of_two_calls(1024)
    fused = all(kernel.metadata.enable_fp_fusion for kernel in launched)
    print(json.dumps({**counts, "launches": len(first), "launched alike": first == second, "fused": fused}))


if __name__ == "__main__":
    main()
