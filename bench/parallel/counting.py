"""Counts the bytes that the collectives of this rank receive, where they are called."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


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


_NOT_COLLECTIVE = ("wait_tensor", "_wrap_tensor_autograd")
