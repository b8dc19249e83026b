"""Sources and batches as torchdata nodes: parallel tokenization, prefetching, exact restarts.

Needs torchdata 0.11 (`pip install seqwarm_kernels[data]`). No other module of this package imports torchdata.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

from torchdata import nodes

from .loading.resumable_loader import with_budget
from .samplers.planned_batches import BatchingProgress, BatchIterator, PlannedBatches
from .samplers.state import batch_state
from .sources.base import Source


class SourceNode(nodes.BaseNode[Any]):
    """A `Source` as a torchdata node."""

    def __init__(self, source: Source[Any]) -> None:
        super().__init__()
        self._source = source
        self._iterator: Iterator[Any] = iter(())

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        if initial_state is not None:
            self._source.load_state_dict(initial_state)
        self._iterator = iter(self._source)

    def next(self) -> Any:
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        return self._source.state_dict()


class NodeSource:
    """A torchdata node as a `Source`, so that torchdata reads, mixes or maps the items of a `LengthBatchStream`.

    Use it to tokenize before planning if no file has the lengths:

        tokens = NodeSource(nodes.ParallelMapper(SourceNode(source), tokenize, num_workers=4))
        stream = LengthBatchStream(tokens, planner)

    Every rank of a stream reads the same items: give a `MultiNodeWeightedSampler` rank=0 and world_size=1. A planner
    with `warmup="bucket"` needs nodes that end.
    """

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
        below = [entries[name] for name in ("source", "_source", "iterable") if name in entries]
        below += entries.get("source_nodes", {}).values()
    return max([getattr(part, "world_size", None) or 1, *map(_world_size, below)])


class BatchNode(nodes.BaseNode[Any]):
    """A `LengthBatchStream` or `LengthBatchSampler` as a torchdata node that yields its batches.

    From a state after the last batch of an epoch, the node yields the next epoch.
    """

    def __init__(self, batches: PlannedBatches) -> None:
        super().__init__()
        self._batches = batches
        self._iterator: BatchIterator | None = None

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        if initial_state is not None:
            self._batches.load_state_dict(initial_state)
            # torchdata's Loader cannot do this: if a state has no batches left, it keeps that state forever (0.11).
            self._batches.skip_ended_epoch()
        self._iterator = iter(self._batches)

    def next(self) -> Any:
        assert self._iterator is not None
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        assert self._iterator is not None
        return self._iterator.state_dict()


class BatchLoader(nodes.Loader[Any]):
    """torchdata's Loader, with the state of the batches only, whatever the other nodes are. Made by `batch_loader`.

    Each `iter()` continues after the last yielded batch, also after an interrupted iteration, or where `set_epoch` or
    `load_state_dict` of the batches has moved to since. After the last batch of an epoch, `iter()` starts the next
    epoch. Batches are fetched from the first `next` on. An older iterator raises a RuntimeError at its next batch after
    a newer `iter()` or `load_state_dict`.
    """

    def __init__(self, root: nodes.BaseNode[Any], batches: PlannedBatches) -> None:
        super().__init__(root, restart_on_stop_iteration=False)
        self._batches = batches
        weakref.finalize(self, _stop_threads, root)  # also when Python ends

    def __iter__(self) -> Iterator[Any]:
        return self._batches.follow(self._continue)

    def _continue(self) -> Iterator[Any]:
        """Discards batches that were fetched and not yielded."""
        self._batches.move_to(self._batches.position)
        self._batches.skip_ended_epoch()
        return super().__iter__()

    @property
    def progress(self) -> BatchingProgress:
        return self._batches.progress

    def state_dict(self) -> dict[str, Any]:
        """The state of the batches after the last yielded batch. Any number of workers and `batches` may load it."""
        return self._batches.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state with the next `iter()`.

        Raises:
            ValueError: `state_dict` has no state of batches, or a state of another configuration.
        """
        self._batches.load_state_dict(batch_state(state_dict))


def _stop_threads(root: nodes.BaseNode[Any]) -> None:
    """Let go of the iterators of torchdata's nodes, which then stop their threads and wait for them.

    A thread that is still in torch's code when Python ends would abort the process.
    """
    node: Any = root
    while node is not None:
        vars(node).pop("_it", None)
        node = vars(node).get("source")


def batch_loader(
    batches: PlannedBatches,
    prepare: Callable[[list[Any]], Any],
    *,
    num_workers: int = 0,
    method: Literal["thread", "process"] = "thread",
    prefetch: int = 2,
    pin_memory: bool = False,
) -> BatchLoader:
    """A loader that plans batches in this process, prepares them in workers, and fetches them ahead of training.

    The state of the loader is exact to the batch. A `PaddedCollator` or `PackedCollator` checks the planner's
    `max_tokens`, as in `ResumableLoader`.

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
    prepare = with_budget(prepare, batches)
    node: nodes.BaseNode[Any] = nodes.ParallelMapper(BatchNode(batches), prepare, num_workers, method=method)
    if pin_memory:
        node = nodes.PinMemory(node)
    if prefetch:
        node = nodes.Prefetcher(node, prefetch)
    return BatchLoader(node, batches)
