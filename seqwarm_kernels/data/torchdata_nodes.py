"""Sources and batches as torchdata nodes: parallel tokenization, prefetching, exact restarts.

Needs torchdata 0.11 (`pip install seqwarm_kernels[data]`). No other module of this package imports torchdata.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchdata import nodes

from ..utils.checks import check_bool, check_choice, check_int
from .loading.budget import BatchCheck, check_collator, check_prepared_items
from .samplers.planned_batches import BatchingProgress, BatchIterator, PlannedBatches
from .samplers.state import batch_state
from .sources.base import Source

METHODS = ("thread", "process")


class SourceNode(nodes.BaseNode[Any]):
    """A `Source` as a torchdata node."""

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
    """A torchdata node as a `Source`, so that torchdata reads, mixes or maps the items of a `LengthBatchStream`.

    Use it to tokenize before planning if no file has the lengths:

        tokens = NodeSource(nodes.ParallelMapper(SourceNode(source), tokenize, num_workers=4))
        stream = LengthBatchStream(tokens, planner)

    Every rank of a stream reads the same items: give a `MultiNodeWeightedSampler` rank=0 and world_size=1.
    """

    def __init__(self, node: nodes.BaseNode[Any]) -> None:
        if not isinstance(node, nodes.BaseNode):
            raise TypeError(f"node must be a torchdata.nodes.BaseNode, got {type(node).__name__}")
        self._node = node
        self._start_is_set = False

    @property
    def world_size(self) -> int:
        """Number of processes that share the items, or mix them in other orders, as far as the nodes tell."""
        return _world_size(self._node)

    @property
    def infinite(self) -> bool:
        """Whether the items never end, as far as the nodes tell."""
        return _is_infinite(self._node)

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


def _below(part: Any) -> list[Any]:
    """The nodes and sources that a node of torchdata or of this package reads from, none for a source."""
    if not isinstance(part, nodes.BaseNode):
        return []
    named = [vars(part)[name] for name in ("source", "_source", "iterable") if name in vars(part)]
    return [*named, *vars(part).get("source_nodes", {}).values()]


def _world_size(part: Any) -> int:
    return max([getattr(part, "world_size", None) or 1, *map(_world_size, _below(part))])


def _is_infinite(part: Any) -> bool:
    below = [_is_infinite(each) for each in _below(part)]
    ends_with = getattr(part, "stop_criteria", None)  # of nodes that mix others
    if ends_with == nodes.StopCriteria.FIRST_DATASET_EXHAUSTED:
        return all(below)
    return any(below) or ends_with == nodes.StopCriteria.CYCLE_FOREVER or getattr(part, "infinite", False)


class BatchNode(nodes.BaseNode[Any]):
    """A `LengthBatchStream` or `LengthBatchSampler` as a torchdata node that yields its batches.

    From a state after the last batch of an epoch, the node yields the next epoch.
    """

    def __init__(self, batches: PlannedBatches) -> None:
        super().__init__()
        if not isinstance(batches, PlannedBatches):
            raise TypeError(
                f"batches must be a LengthBatchStream or a LengthBatchSampler, got {type(batches).__name__}"
            )
        self._batches = batches
        self._iterator: BatchIterator | None = None

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._iterator = iter(self._batches)
        if initial_state is not None:
            self._iterator.load_state_dict(initial_state)
            # torchdata's Loader cannot do this: if a state has no batches left, it keeps that state forever (0.11).
            self._iterator.skip_ended_epoch()

    def next(self) -> Any:
        assert self._iterator is not None
        return next(self._iterator)

    def get_state(self) -> dict[str, Any]:
        assert self._iterator is not None
        return self._iterator.state_dict()


class _LoaderNode(BatchNode):
    """Starts the next epoch if no batch of the epoch is left."""

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        assert self._iterator is not None
        self._iterator.skip_ended_epoch()


class BatchLoader(nodes.Loader[Any]):
    """torchdata's Loader, with the state of the batches only, whatever the other nodes are. Made by `batch_loader`.

    Each `iter()` continues after the last yielded batch, also after an interrupted iteration, or where `set_epoch` or
    `load_state_dict` of the batches has moved to since. After the last batch of an epoch, `iter()` starts the next
    epoch. Batches are fetched from the first `next` on. An older iterator raises a RuntimeError at its next batch after
    a newer `iter()` or `load_state_dict`.
    """

    def __init__(self, root: nodes.BaseNode[Any], batches: PlannedBatches, check: BatchCheck) -> None:
        super().__init__(root, restart_on_stop_iteration=False)
        self._batches = batches
        self._check = check
        weakref.finalize(self, _stop_threads, root)  # also when Python ends

    def __iter__(self) -> Iterator[Any]:
        return self._batches.follow(self._continue, self._check)

    def _continue(self) -> Iterator[Any]:
        """Discards batches that were fetched and not yielded."""
        self._batches.move_to(self._batches.position)
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
            TypeError: `state_dict` is not a mapping, or an entry has the wrong type.
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
    method: str = "thread",
    prefetch: int = 2,
    pin_memory: bool = False,
) -> BatchLoader:
    """A loader that plans batches in this process, prepares them in workers, and fetches them ahead of training.

    The state of the loader is exact to the batch. A batch with more tokens than the planner's `max_tokens` raises a
    ValueError, and so does an item that is longer than planned, as in `ResumableLoader`.

    Args:
        batches: a `LengthBatchStream` or `LengthBatchSampler`.
        prepare: turns a list that `batches` yields into a batch: `Prepare`. It must be picklable for "process" workers.
        num_workers: number of workers that prepare batches; 0: only the thread that prefetches.
        method: kind of workers, "thread" or "process".
        prefetch: number of batches that are ready ahead of training; 0: none.
        pin_memory: copy batches to pinned memory, for fast copies to the device. Needs CUDA.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has an invalid value; or the planner packs and the collator pads, or the other way
            round; or the dataset of `prepare` has more or fewer items than a `LengthBatchSampler` has lengths.
    """
    if not callable(prepare):
        raise TypeError(f"prepare must be a function, got {type(prepare).__name__}")
    num_workers = check_int("num_workers", num_workers, minimum=0)
    prefetch = check_int("prefetch", prefetch, minimum=0)
    check_bool("pin_memory", pin_memory)
    if pin_memory and not torch.cuda.is_available():
        raise ValueError("pin_memory must be False without a CUDA device, got True")
    check_choice("method", method, METHODS)
    batch_node = _LoaderNode(batches)
    check_collator("prepare", prepare, batches.planner)
    check_prepared_items("prepare", prepare, batches)
    node: nodes.BaseNode[Any] = nodes.ParallelMapper(batch_node, prepare, num_workers, method=method)
    if pin_memory:
        node = nodes.PinMemory(node)
    if prefetch:
        node = nodes.Prefetcher(node, prefetch)
    return BatchLoader(node, batches, BatchCheck(batches, prepare))
