"""A progress bar that continues after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ...utils.checks import check_choice, check_int
from ..samplers.planned_batches import BatchingProgress

UNITS = ("token", "item", "batch")


class HasProgress(Protocol):
    @property
    def progress(self) -> BatchingProgress: ...

    def __iter__(self) -> Iterator[Any]: ...


def progress_bar(
    batches: HasProgress, *, unit: str = "token", total: int | None = None, **options: Any
) -> Iterator[Any]:
    """Yield the batches and show a tqdm bar with the progress of all ranks together and the epoch.

    Example::

        for batch in progress_bar(ResumableLoader(loader), total=10**9):
            train(batch)

    A batch is counted when the next one is requested. After a restart the bar continues from the restored progress.

    Args:
        batches: a `ResumableLoader`, `LengthBatchStream`, `LengthBatchSampler` or the result of `batch_loader`.
        unit: the unit of the bar: "token" (without padding), "item" or "batch".
        total: number of units at the end of the bar.
        options: passed to tqdm.

    Raises:
        TypeError: `batches` does not have `progress` or is not iterable, or `total` is not an int.
        ValueError: `unit` is not "token", "item" or "batch", or `total` is negative.
    """
    if not (hasattr(batches, "progress") and hasattr(batches, "__iter__")):
        raise TypeError(
            "batches must be a ResumableLoader, LengthBatchStream, LengthBatchSampler or the result of batch_loader, "
            f"got {type(batches).__name__}"
        )
    check_choice("unit", unit, UNITS)
    total = None if total is None else check_int("total", total, minimum=0)
    return _with_bar(batches, unit, total, options)


def _with_bar(batches: HasProgress, unit: str, total: int | None, options: dict[str, Any]) -> Iterator[Any]:
    from tqdm.auto import tqdm

    field = {"token": "tokens", "item": "items", "batch": "batches"}[unit]
    initial = getattr(batches.progress, field)
    with tqdm(**{"initial": initial, "total": total, "unit": unit, "unit_scale": True, **options}) as bar:
        for batch in batches:
            yield batch
            progress = batches.progress
            bar.set_postfix(epoch=f"{progress.epochs:.2f}", refresh=False)
            bar.update(getattr(progress, field) - bar.n)
