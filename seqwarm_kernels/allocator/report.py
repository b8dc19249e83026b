"""The report of `warmup_allocator`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

_MEBIBYTE = 2**20


@dataclass(frozen=True)
class LengthMemory:
    """Memory after a training pass at one length, in bytes."""

    length: int
    peak_bytes: int  #: the most in use during the pass; on the CPU since the process started
    reserved_bytes: int | None  #: reserved by the allocator after the pass; None on the CPU


@dataclass(frozen=True)
class OutOfMemory:
    """A batch that does not fit, and the batch size that does."""

    batch_size: int  #: requested
    length: int
    message: str  #: from the allocator
    allocated_bytes: int  #: in use before the pass: the model, the optimizer state and everything else
    free_bytes: int  #: free on the device before the pass
    total_bytes: int  #: total memory of the device; 0 if the system does not report it
    largest_batch_size: int | None  #: that fits; 0 if one row does not fit; None if it was not searched for
    advice: str | None

    def __str__(self) -> str:
        parts = [
            f"batch size {self.batch_size} at length {self.length} does not fit: "
            f"{mebibytes(self.allocated_bytes)} were in use before, {mebibytes(self.free_bytes)} of "
            f"{mebibytes(self.total_bytes)} were free"
        ]
        if self.largest_batch_size is None:
            parts.append("find_batch_size=True finds the largest that fits")
        elif self.largest_batch_size == 0:
            parts.append("not even a single row fits")
        else:
            parts.append(f"the largest batch size that fits is {self.largest_batch_size}")
        return "; ".join(parts + ([] if self.advice is None else [self.advice]))


@dataclass(frozen=True)
class AllocatorReport:
    """Result of `warmup_allocator`. Bytes are memory of the device; on the CPU the resident set of the process."""

    device: str
    batch_size: int  #: of the training passes; 0 if no batch size fits
    lengths: tuple[int, ...]  #: of the training passes, in order: max_len first
    seconds: float
    peak_bytes: int  #: the most in use at any time; on the CPU of the whole process, since it started
    reserved_bytes: int | None  #: reserved by the allocator at the end; None on the CPU
    device_allocations: int | None  #: number of segments requested from the device; None on the CPU
    last_allocations: int | None  #: of these in the last rehearsal: 0 if training needs none; None on the CPU
    compiled: tuple[str, ...]  #: Triton kernels and torch.compile graphs, in order
    memory: tuple[LengthMemory, ...]  #: one entry for each of `lengths`
    out_of_memory: OutOfMemory | None  #: None if the requested batch size fits

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        rows = [("device", self.device), ("batch size", str(self.batch_size)), ("lengths", self._lengths())]
        of_process = " (of the whole process, with Python and torch)" if self.reserved_bytes is None else ""
        rows.append(("peak memory", f"{mebibytes(self.peak_bytes)}{of_process}"))
        if self.reserved_bytes is not None:
            rows.append(("reserved memory", mebibytes(self.reserved_bytes)))
        if self.device_allocations is not None:
            rows.append(("device allocations", str(self.device_allocations)))
        rows.append(("compiled", f"{len(self.compiled)} kernels and graphs"))
        rows.append(("time", f"{self.seconds:.2f} s"))
        if self.out_of_memory is not None:
            rows.append(("out of memory", str(self.out_of_memory)))
        return "\n".join(["warmup_allocator", *(f"  {name:<20}{value}" for name, value in rows)])

    def _lengths(self) -> str:
        if not self.lengths:
            return "none"
        if len(self.lengths) == 1:
            return str(self.lengths[0])
        return f"{self.lengths[0]}, then {len(self.lengths) - 1} from {self.lengths[1]} to {self.lengths[-1]}"


def mebibytes(count: int) -> str:
    return f"{count / _MEBIBYTE:,.0f} MiB"
