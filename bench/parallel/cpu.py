"""What ranks exchange in attention over sharded tokens, and how evenly ranks that share heads work.

Counts bytes on processes of this machine. Times of processes that share two cores would say nothing.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm

from seqwarm_kernels.attention.slopes import alibi_slopes
from seqwarm_kernels.cli.exchanges import ContextSize, normal_widths
from seqwarm_kernels.parallel import context_attention, halo_widths

from ..alibi_attention.reach import random_reach
from ..common.records import save
from .report import COUNTED, RECORDS, SHARES, WIDTHS, tables

USUAL, FLAT = "usual", "flat"  #: slopes of a run
LARGE = ContextSize(32, 32, 128, 2**17, 8)  #: the size of the goals
#: Sizes whose widths are drawn, and the standard deviation of the scores.
DRAWN = (
    (LARGE, 1.0),
    (LARGE, 3.0),
    (ContextSize(32, 8, 128, 2**17, 8), 1.0),
    (ContextSize(12, 12, 64, 2**17, 8), 1.0),
    (ContextSize(32, 32, 128, 2**14, 8), 1.0),
    (ContextSize(32, 32, 128, 2**20, 64), 1.0),
)
#: Runs on processes. Shorter than the size of the goals, and with the same heads: the halo is the same.
RUNS = (
    (ContextSize(32, 32, 128, 2**14, 2), USUAL),
    (ContextSize(32, 8, 128, 2**14, 4), USUAL),
    (ContextSize(12, 12, 64, 2**14, 4, batch_size=2, causal=False), USUAL),
    (ContextSize(32, 32, 128, 2**14, 8), USUAL),
    (ContextSize(12, 4, 64, 2**11, 4), FLAT),
)
HEADS, HEAD_DIM, SHARE_LENGTHS = 32, 128, (2**13, 2**14, 2**15, 2**16)


_NOT_COLLECTIVE = ("wait_tensor", "_wrap_tensor_autograd")


class ReceivedBytes(TorchDispatchMode):
    """Counts the bytes that come from other ranks. Backward counts too, if it runs inside.

    Attributes:
        received: By collective. An all-reduce of n bytes over P ranks counts as 2 · n · (P − 1) / P, as in a ring.

    Raises:
        TypeError: A collective that has no count.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.received: Counter[str] = Counter()
        self._rank, self._ranks = rank, ranks

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.namespace in ("c10d", "_c10d_functional") and name not in _NOT_COLLECTIVE:
            self.received[name] += self._bytes(name, args, result)
        return result

    def _bytes(self, name: str, args: Any, result: Any) -> int:
        if name == "all_to_all_single":
            splits = args[1]  # of the result; in elements or rows
            return result.nbytes * (sum(splits) - splits[self._rank]) // max(sum(splits), 1)
        if name == "all_reduce":
            return 2 * result.nbytes * (self._ranks - 1) // self._ranks
        raise TypeError(f"{name} has no count of its bytes")


def run_all() -> Iterator[dict[str, Any]]:
    for size, slopes in tqdm(RUNS, desc="runs", unit="run"):
        yield from counted(size, slopes)
    for length in tqdm(SHARE_LENGTHS, desc="shares", unit="length"):
        reach = random_reach(HEADS, length, HEAD_DIM)
        shares = reach.shares[reach.steepest_first()].tolist()
        yield {"heads": HEADS, "head_dim": HEAD_DIM, "length": length, "shares": shares, "what": SHARES}
    for size, score_std in tqdm(DRAWN, desc="widths", unit="size"):
        widths = normal_widths(size, score_std=score_std, most_tokens=size.length)
        yield {"size": asdict(size), "score_std": score_std, "widths": widths, "what": WIDTHS}


def counted(size: ContextSize, slopes: str) -> list[dict[str, Any]]:
    """The bytes that each rank receives in forward and backward of one layer, with the smallest halo."""
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    store = torch.distributed.TCPStore("127.0.0.1", 0, size.ranks, is_master=True, wait_for_workers=False)
    torch.multiprocessing.spawn(_count, (store.port, size, slopes, queue), nprocs=size.ranks)
    return queue.get()


def _count(rank: int, port: int, size: ContextSize, slopes: str, queue: Any) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, size.ranks, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size.ranks)
    found: list[Any] = [None] * size.ranks
    torch.distributed.all_gather_object(found, count_on_rank(init_device_mesh("cpu", (size.ranks,)), size, slopes))
    if rank == 0:
        queue.put(found)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def count_on_rank(mesh: DeviceMesh, size: ContextSize, slopes: str) -> dict[str, Any]:
    """The bytes of keys, values and gradients that this rank of the mesh receives, and those of the formula."""
    rank = mesh.get_local_rank()
    generator = torch.Generator().manual_seed(rank)
    query, key, value = (
        torch.randn(size.batch_size, heads, size.shard_length, size.head_dim, generator=generator)
        .bfloat16()
        .requires_grad_()
        for heads in (size.heads, size.key_heads, size.key_heads)
    )
    per_head = alibi_slopes(size.heads) if slopes == USUAL else torch.zeros(size.heads)
    widths = halo_widths(query, key, per_head, mesh=mesh, causal=size.causal)
    with ReceivedBytes(rank, size.ranks) as forward:
        out = context_attention(query, key, value, per_head, mesh=mesh, halo=widths, causal=size.causal)
        loss = out.float().sum()
    with ReceivedBytes(rank, size.ranks) as backward:
        loss.backward()
    formula = size.halo(widths, rank)
    return {
        "size": asdict(size),
        "slopes": slopes,
        "widths": widths,
        "rank": rank,
        "forward": forward.received["all_to_all_single"],
        "backward": backward.received["all_to_all_single"],
        "formula_forward": formula.forward,
        "formula_backward": formula.backward,
        "deciding": forward.received["all_reduce"],  # of the sums that decide the widths
        "what": COUNTED,
    }


def main(arguments: argparse.Namespace) -> None:
    save(RECORDS, run_all(), tables)
