"""A progress bar that continues after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ...utils.checks import check_choice
from ...utils.progress import standard_error
from ..samplers.planned_batches import BatchingProgress

_FIELDS = {"token": "tokens", "item": "items", "batch": "batches"}


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
    Without a standard error, there is no bar.

    Args:
        batches: a `ResumableLoader`, `LengthBatchStream`, `LengthBatchSampler` or the result of `batch_loader`.
        unit: the unit of the bar: "token" (without padding), "item" or "batch".
        total: number of units at the end of the bar.
        options: passed to tqdm.

    Raises:
        ValueError: `unit` is not "token", "item" or "batch".
    """
    check_choice("unit", unit, _FIELDS)
    return _with_bar(batches, unit, {"total": total, **options})


def _with_bar(batches: HasProgress, unit: str, options: dict[str, Any]) -> Iterator[Any]:
    from tqdm.auto import tqdm

    options = {"unit": unit, "unit_scale": True, "initial": getattr(batches.progress, _FIELDS[unit]), **options}
    with tqdm(**{"file": standard_error(), **options}) as bar:
        for batch in batches:
            yield batch
            progress = batches.progress
            bar.set_postfix(epoch=f"{progress.epochs:.2f}", refresh=False)
            bar.update(getattr(progress, _FIELDS[unit]) - bar.n)
