"""What `warmup_allocator` found out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

MEBIBYTE = 2**20


@dataclass(frozen=True)
class LengthMemory:
    """Memory after one length has passed, in bytes."""

    length: int
    peak_bytes: int  #: the most in use while it passed; on the CPU since the process began
    reserved_bytes: int | None  #: what the allocator owned afterwards; None on the CPU


@dataclass(frozen=True)
class OutOfMemory:
    """What did not fit, and what would."""

    batch_size: int  #: asked for
    length: int
    message: str  #: of the allocator
    allocated_bytes: int  #: in use before: the model, the optimizer's state, and what else there is
    free_bytes: int  #: what the device had left then
    total_bytes: int  #: 0 where the system does not tell
    largest_batch_size: int | None  #: that fits; 0 if not even one row does; None: not looked for
    advice: str | None

    def __str__(self) -> str:
        lines = [
            f"batch size {self.batch_size} at length {self.length} does not fit: "
            f"{_mebibytes(self.allocated_bytes)} were in use before, {_mebibytes(self.free_bytes)} of "
            f"{_mebibytes(self.total_bytes)} were free"
        ]
        if self.largest_batch_size is None:
            lines.append("find_batch_size=True finds the largest that fits")
        elif self.largest_batch_size == 0:
            lines.append("not even a single row fits")
        else:
            lines.append(f"the largest batch size that fits is {self.largest_batch_size}")
        return "; ".join(lines + ([] if self.advice is None else [self.advice]))


@dataclass(frozen=True)
class AllocatorReport:
    """What `warmup_allocator` did. Bytes are the device's; on the CPU the resident set of the process."""

    device: str
    batch_size: int  #: that the lengths passed with; 0 if none fits
    lengths: tuple[int, ...]  #: in the order passed: max_len first
    seconds: float
    peak_bytes: int  #: the most in use at any time
    reserved_bytes: int | None  #: what the allocator owns from now on; None on the CPU
    device_allocations: int | None  #: how often memory was asked of the device; None on the CPU
    compiled: tuple[str, ...]  #: kernels of Triton and graphs of torch.compile, in order
    memory: tuple[LengthMemory, ...]  #: for each of the lengths
    out_of_memory: OutOfMemory | None  #: the batch size asked for did not fit

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        rows = [("device", self.device), ("batch size", str(self.batch_size)), ("lengths passed", self._lengths())]
        rows.append(("peak memory", _mebibytes(self.peak_bytes)))
        if self.reserved_bytes is not None:
            rows.append(("owned from now on", _mebibytes(self.reserved_bytes)))
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


def _mebibytes(count: int) -> str:
    return f"{count / MEBIBYTE:,.0f} MiB"
