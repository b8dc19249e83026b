"""The Gluon kernels for Hopper, as `compiled.py` compiles them: tiles, descriptors and partitions."""

from __future__ import annotations

import re

from triton.experimental.gluon import language as gl

from seqwarm_kernels.ops.alibi_attention.gluon_backward_key import gluon_backward_key_kernel
from seqwarm_kernels.ops.alibi_attention.gluon_backward_query import gluon_backward_query_kernel
from seqwarm_kernels.ops.alibi_attention.gluon_forward import gluon_forward_kernel
from seqwarm_kernels.ops.alibi_attention.gluon_tiles import ROWS
from seqwarm_kernels.ops.alibi_attention.triton_configurations import (
    KEY_STAGES,
    GluonTiles,
    Tiles,
    block_d,
    gluon_tiles,
)

from .chips import described

KERNELS = {
    "gluon_forward": gluon_forward_kernel,
    "gluon_backward_query": gluon_backward_query_kernel,
    "gluon_backward_key": gluon_backward_key_kernel,
}
_DTYPES = {"bf16": gl.bfloat16, "fp16": gl.float16}
_ROWS: int = ROWS.value  # of a consumer
_TILED = ("query", "grad_out", "out", "key", "value", "grad_query", "grad_key", "grad_value")
_LOOPED = (("key", "value"), ("query", "grad_out"))  # of the other kernels, and of that of keys


def table_of(chip: int | str, head_dim: int) -> GluonTiles | None:
    """None where the kernels are never taken."""
    return gluon_tiles(described(chip), head_dim)


def tiles_of(kernel: str, table: GluonTiles) -> Tiles:
    """Queries and keys in the tiles of both consumers, warps of a consumer, tiles in flight."""
    return {
        "gluon_forward": Tiles(2 * _ROWS, table.forward_keys, 4, table.forward_stages),
        "gluon_backward_query": Tiles(2 * _ROWS, table.backward_keys, 4, KEY_STAGES),
        "gluon_backward_key": Tiles(table.backward_queries, 2 * _ROWS, 4, table.backward_stages),
    }[kernel]


def descriptors(kernel: str, tiles: Tiles, head_dim: int, dtype: str) -> dict[str, str]:
    """Types of the arguments that are tensor descriptors, as in a launch. Their layouts are parts of the types."""
    if kernel not in KERNELS:
        return {}
    by_key = kernel == "gluon_backward_key"
    columns = tiles.block_m if by_key else tiles.block_n
    types = {}
    for name in _TILED:
        shape = [1, 1, columns if name in _LOOPED[by_key] else _ROWS, block_d(head_dim)]
        types[name] = f"tensordesc<{dtype}{shape},{gl.NVMMASharedLayout.get_default_for(shape, _DTYPES[dtype])!r}>"
    if by_key:
        vector = f"tensordesc<fp32{[1, columns]},{gl.NVMMASharedLayout(0, 32, rank=2)!r}>"
        types |= {"lse2": vector, "delta": vector}
    return types


def count_consumers(ttgir: str) -> int:
    """Number of partitions with matrix products."""
    partitions = re.split(r"^ +(?:default \{|partition\d+\()", ttgir, flags=re.MULTILINE)[1:]
    return sum("warp_group_dot" in partition for partition in partitions)
