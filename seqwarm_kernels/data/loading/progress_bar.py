"""A progress bar that continues after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...utils.progress import standard_error
from ..samplers.planned_batches import PlannedBatches
from .resumable_loader import ResumableLoader

_FIELDS = {"token": "tokens", "item": "items", "batch": "batches"}


def progress_bar(
    batches: ResumableLoader | PlannedBatches, *, unit: str = "token", total: int | None = None, **options: Any
) -> Iterator[Any]:
    """Yield the batches and show a tqdm bar with the progress of all ranks together and the epoch.

    Example::

        for batch in progress_bar(ResumableLoader(loader), total=10**9):
            train(batch)

    A batch is counted when the next one is requested. After a restart the bar continues from the restored progress.
    Without a standard error, there is no bar.

    Args:
        batches: a `ResumableLoader`, `LengthBatchStream` or `LengthBatchSampler`.
        unit: the unit of the bar: "token" (without padding), "item" or "batch".
        total: number of units at the end of the bar.
        options: passed to tqdm.
    """
    from tqdm.auto import tqdm

    field = _FIELDS[unit]
    options = {"file": standard_error(), "unit_scale": True, "initial": getattr(batches.progress, field), **options}
    with tqdm(total=total, unit=unit, **options) as bar:
        for batch in batches:
            yield batch
            progress = batches.progress
            bar.set_postfix(epoch=f"{progress.epochs:.2f}", refresh=False)
            bar.update(getattr(progress, field) - bar.n)
