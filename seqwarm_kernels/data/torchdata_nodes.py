"""Our pieces among torchdata's nodes: tokenising in parallel, prefetching, exact restarts.

Needs torchdata 0.11 (`pip install seqwarm_kernels[data]`), which nothing else here imports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torchdata import nodes

from ..utils.checks import check_int
from .batching.nested import batch_state
from .batching.planned_batches import BatchIterator, PlannedBatches, Progress
from .sources.base import Source

METHODS = ("thread", "process")


class SourceNode(nodes.BaseNode[Any]):
    """A `Source` as a node."""

    def __init__(self, source: Source[Any]) -> None:
        super().__init__()
        if not isinstance(source, Source):
            raise TypeError(f"source must be a seqwarm_kernels.data.Source, got {type(source).__name__}")
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
    """A node as a `Source`: what torchdata reads, mixes or maps in parallel, for a `LengthBatchStream`.

    Tokenising in front of the planner, for lengths that no file knows:

        tokens = NodeSource(nodes.ParallelMapper(SourceNode(source), tokenise, num_workers=4))
        stream = LengthBatchStream(tokens, planner)
    """

    def __init__(self, node: nodes.BaseNode[Any]) -> None:
        if not isinstance(node, nodes.BaseNode):
            raise TypeError(f"node must be a torchdata.nodes.BaseNode, got {type(node).__name__}")
        self._node = node
        self._is_placed = False

    def __iter__(self) -> Iterator[Any]:
        if not self._is_placed:
            self._node.reset()
        self._is_placed = False
        return iter(self._node)

    def state_dict(self) -> dict[str, Any]:
        return self._node.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._node.reset(state_dict)
        self._is_placed = True


class BatchNode(nodes.BaseNode[Any]):
    """A `LengthBatchStream` or a `LengthBatchSampler` as a node that gives its batches.

    A state behind an epoch's last batch begins the next epoch.
    """

    def __init__(self, batches: PlannedBatches) -> None:
        super().__init__()
        if not isinstance(batches, PlannedBatches):
            raise TypeError(
                f"batches must be a LengthBatchStream or a LengthBatchSampler, got {type(batches).__name__}"
            )
        self._batches = batches
        self._iterator: BatchIterator | None = None
        self.next_state: dict[str, Any] | None = None  #: in place of none, for the next `reset`
        self._is_restored = False  # and gave nothing since

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._iterator = iter(self._batches)
        state, self.next_state = initial_state or self.next_state, None
        self._is_restored = state is not None
        if state is not None:
            self._iterator.load_state_dict(state)

    def next(self) -> Any:
        assert self._iterator is not None
        batch = next(self._iterator, None)
        if batch is None and self._is_restored:
            # Not left to Loader: with nothing left of a state it keeps that state for ever (torchdata 0.11).
            self._iterator = iter(self._batches)
            batch = next(self._iterator, None)
        self._is_restored = False
        if batch is None:
            raise StopIteration
        return batch

    def get_state(self) -> dict[str, Any]:
        assert self._iterator is not None
        return self._iterator.state_dict()


class BatchLoader(nodes.Loader[Any]):
    """torchdata's Loader with the state of the batches alone, whatever nodes there are. Made by `batch_loader`.

    An `iter()` goes on behind the last batch that came out, also where one was broken off; behind the last batch of an
    epoch it begins the next one.
    """

    def __init__(self, root: nodes.BaseNode[Any], node: BatchNode, batches: PlannedBatches) -> None:
        super().__init__(root, restart_on_stop_iteration=False)
        self._node = node
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        if self._node.next_state is None:
            self.load_state_dict(self.state_dict())  # what was fetched ahead never came out
        return super().__iter__()

    @property
    def progress(self) -> Progress:
        return self._batches.progress_of(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """That of the batches, behind the last one that came out: for any number of workers, and for the batches."""
        if self._node.next_state is not None:
            return self._node.next_state
        return self._batches.state_dict() if self._it is None else batch_state(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there with the next `iter()`.

        Raises:
            TypeError, ValueError: it holds no state of batches, or one of another configuration.
        """
        state = batch_state(state_dict)
        self._batches.progress_of(state)  # its settings, before anything changes
        self._node.next_state = state
        super().load_state_dict({"root": None, "num_yielded": 0})


def batch_loader(
    batches: PlannedBatches,
    prepare: Callable[[list[Any]], Any],
    *,
    num_workers: int = 0,
    method: str = "thread",
    prefetch: int = 2,
    pin_memory: bool = False,
) -> BatchLoader:
    """Batches planned here, prepared by workers and fetched ahead, with a state that is exact to the batch.

    Args:
        batches: `LengthBatchStream`, or `LengthBatchSampler`.
        prepare: what it gives -> a batch: `Prepare`. For "process" it must be picklable.
        num_workers: that prepare; 0: none but the thread that fetches ahead.
        method: "thread" or "process" workers.
        prefetch: batches that are ready ahead of training; 0: none.
        pin_memory: for fast copies to the device.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    if not callable(prepare):
        raise TypeError(f"prepare must be a function, got {type(prepare).__name__}")
    check_int("num_workers", num_workers, minimum=0)
    check_int("prefetch", prefetch, minimum=0)
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
    batch_node = BatchNode(batches)
    node: nodes.BaseNode[Any] = nodes.ParallelMapper(batch_node, prepare, num_workers, method=method)
    if pin_memory:
        node = nodes.PinMemory(node)
    if prefetch:
        node = nodes.Prefetcher(node, prefetch)
    return BatchLoader(node, batch_node, batches)
