"""A bar that knows where a run stands, also after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from ..batching.planned_batches import Progress

UNITS = ("token", "item", "batch")


class HasProgress(Protocol):
    @property
    def progress(self) -> Progress: ...

    def __iter__(self) -> Iterator[Any]: ...


def progress_bar(
    batches: HasProgress, *, unit: str = "token", total: int | None = None, **options: Any
) -> Iterator[Any]:
    """The batches, under a tqdm bar of what all ranks were given, with the epoch beside it.

        for batch in progress_bar(ResumableLoader(loader), total=10**9):
            train(batch)

    A batch counts once its turn is over. After a restart the bar begins where the run stood.

    Args:
        batches: `ResumableLoader`, `LengthBatchStream`, `LengthBatchSampler` or what `batch_loader` returns.
        unit: what the bar counts: "token" (without padding), "item" or "batch".
        total: where it ends.
        options: for tqdm.

    Raises:
        TypeError: `batches` have no progress.
        ValueError: `unit` is no such.
    """
    if not (hasattr(batches, "progress") and hasattr(batches, "__iter__")):
        raise TypeError(
            "batches must be a ResumableLoader, LengthBatchStream, LengthBatchSampler or of batch_loader, "
            f"got {type(batches).__name__}"
        )
    if unit not in UNITS:
        raise ValueError(f"unit must be one of {', '.join(UNITS)}, got {unit!r}")
    return _with_bar(batches, unit, total, options)


def _with_bar(batches: HasProgress, unit: str, total: int | None, options: dict[str, Any]) -> Iterator[Any]:
    from tqdm.auto import tqdm

    field = {"token": "tokens", "item": "items", "batch": "batches"}[unit]
    begun = getattr(batches.progress, field)
    with tqdm(**{"initial": begun, "total": total, "unit": unit, "unit_scale": True, **options}) as bar:
        for batch in batches:
            yield batch
            now = batches.progress
            bar.set_postfix(epoch=f"{now.epochs:.2f}", refresh=False)
            bar.update(getattr(now, field) - bar.n)
