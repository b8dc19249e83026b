"""torchdata's nodes before and after planning: parallel tokenization, threads that prepare batches, exact restarts.

Needs torchdata 0.11 (`pip install seqwarm_kernels[data]`). No other module of this package imports torchdata. A source,
a `LengthBatchSampler` and a `LengthBatchStream` become nodes by torchdata's own `IterableWrapper`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torchdata import nodes

from .loading.prepare import Prepare
from .loading.resumable_loader import ResumableLoader, check_num_items
from .samplers.planned_batches import PlannedBatches

_LONGEST_WAIT = 60.0  #: seconds for a thread that prepares a batch to stop


class NodeSource:
    """A torchdata node as a `Source`, so that torchdata reads, mixes or maps the items of a `LengthBatchStream`.

    Use it to tokenize before planning if no file has the lengths:

        tokens = NodeSource(nodes.ParallelMapper(nodes.IterableWrapper(source), tokenize, num_workers=4))
        stream = LengthBatchStream(tokens, planner)

    Every rank of a stream reads the same items: give a `MultiNodeWeightedSampler` rank=0 and world_size=1. A planner
    with `warmup="bucket"` needs nodes that end.
    """

    # torchdata's `Loader` would be a Source, but ignores a state that is loaded after its own was asked for (0.11).
    def __init__(self, node: nodes.BaseNode[Any]) -> None:
        self._node = node
        self._start_is_set = False

    @property
    def world_size(self) -> int:
        """Number of processes that share the items, or mix them in other orders, as far as the nodes tell."""
        return _world_size(self._node)

    def __iter__(self) -> Iterator[Any]:
        if not self._start_is_set:
            self._node.reset()
        self._start_is_set = False
        return iter(self._node)

    def state_dict(self) -> dict[str, Any]:
        return self._node.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._node.reset(state_dict)
        self._start_is_set = True


def _world_size(part: Any) -> int:
    """The largest `world_size` of a node and of what it reads from. Only nodes are looked into, not sources."""
    below: list[Any] = []
    if isinstance(part, nodes.BaseNode):
        entries = vars(part)
        below = [entries[name] for name in ("source", "iterable") if name in entries]
        below += entries.get("source_nodes", {}).values()
    return max([getattr(part, "world_size", None) or 1, *map(_world_size, below)])


class _NodeLoader(ResumableLoader):
    """The batches of a node, as those of a DataLoader."""

    def __init__(self, root: nodes.BaseNode[Any], batches: PlannedBatches) -> None:
        self._loader = nodes.Loader(root, restart_on_stop_iteration=False)
        self._sampler = batches
        weakref.finalize(self, _stop_threads, root)  # also when Python ends


def _stop_threads(root: nodes.BaseNode[Any]) -> None:
    """Let the threads of torchdata's nodes stop, and wait for them.

    torchdata waits for half a second. A thread that is still in torch's code when Python ends aborts the process.
    """
    node: Any = root
    workers: list[Any] = []
    while node is not None:
        iterator = vars(node).pop("_it", None)
        iterator = getattr(iterator, "_it", iterator)  # a ParallelMapper has a node inside
        if hasattr(iterator, "_shutdown"):
            iterator._shutdown()
            entries = vars(iterator)
            workers += [entry for entry in entries.values() if isinstance(entry, threading.Thread)]
            workers += entries.get("_workers", ())
        node = vars(node).get("source")
    for worker in workers:
        if worker.is_alive() and worker is not threading.current_thread():
            worker.join(_LONGEST_WAIT)


def batch_loader(
    batches: PlannedBatches,
    prepare: Callable[[list[Any]], Any],
    *,
    num_workers: int = 0,
    method: Literal["thread", "process"] = "thread",
    prefetch: int = 2,
    pin_memory: bool = False,
) -> ResumableLoader:
    """A `ResumableLoader` whose workers may be threads: plans batches in this process, prepares them in workers, and
    fetches them ahead of training.

    Batches are checked for the planner's `max_tokens`, as in any `ResumableLoader`.

    Args:
        batches: a `LengthBatchStream` or `LengthBatchSampler`.
        prepare: turns a list that `batches` yields into a batch: `Prepare`. It must be picklable for "process" workers.
        num_workers: number of workers that prepare batches; 0: only the thread that prefetches.
        method: kind of workers, "thread" or "process".
        prefetch: number of batches that are ready ahead of training; 0: none.
        pin_memory: copy batches to pinned memory, for fast copies to the device. Needs CUDA.

    Raises:
        ValueError: the dataset of `prepare` has more or fewer items than a `LengthBatchSampler` has lengths.
    """
    if isinstance(prepare, Prepare):
        check_num_items(batches, prepare.dataset)
    node: nodes.BaseNode[Any] = nodes.IterableWrapper(batches)
    node = nodes.ParallelMapper(node, prepare, num_workers, method=method)
    if pin_memory:
        node = nodes.PinMemory(node)
    if prefetch:
        node = nodes.Prefetcher(node, prefetch)
    return _NodeLoader(node, batches)
