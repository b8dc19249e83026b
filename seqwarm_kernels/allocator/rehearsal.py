"""The training passes of a warm-up: the search for a batch size, and the rehearsal of the lengths."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from tqdm import tqdm

from ..utils.progress import standard_error
from .distributed import Outcome, RankConsensus
from .example_batch import TrainingBatches
from .memory import Memory, fragmentation_advice, is_out_of_memory
from .report import LengthMemory, OutOfMemory
from .training_pass import TrainingPass

#: Largest number of rows that batch_size="auto" tries.
_MOST_ROWS = 2**16
#: Where memory is short, every rehearsal allocates, because blocks are given back to the device in between.
_MOST_REHEARSALS = 5


@dataclass
class Warmup:
    """The training passes of one call of `warmup_allocator`."""

    training_pass: TrainingPass
    batches: TrainingBatches
    memory: Memory
    consensus: RankConsensus
    measured: dict[int, LengthMemory] = field(default_factory=dict)  #: by length, of the last batch size that fits
    last_allocations: int | None = None  #: of the last rehearsal

    def choose_batch_size(self, batch_size: int | Literal["auto"] | None, find: bool) -> tuple[int, OutOfMemory | None]:
        """Return the rows to continue with, and a description if the requested rows do not fit."""
        if batch_size == "auto":
            return self._largest_batch_size()
        rows = self.consensus.largest(batch_size or self.batches.example_rows())
        problem = self._try_rows(rows)
        if problem is None or not find:
            return rows, problem
        return rows, replace(problem, largest_batch_size=self._bisect(0, rows))

    def rehearse(self, rows: int, lengths: list[int]) -> OutOfMemory | None:
        """Train at each length as training will, until that allocates nothing. Return the first that does not fit."""
        if not self.measured:  # the last attempt of a search did not fit, and its memory was released
            problem = self._try_rows(rows)
            if problem is not None:
                return problem
        for _ in range(_MOST_REHEARSALS if lengths else 0):
            before = self.memory.allocations()
            self.training_pass.forget()
            with_bar = tqdm(
                lengths, "warmup_allocator", unit="length", disable=None, leave=False, file=standard_error()
            )
            for length in with_bar:  # the last one is repeated, as most of the training repeats it
                problem = self._try_length(rows, length, passes=2 if length == lengths[-1] else 1)
                if problem is not None:
                    return problem
            after = self.memory.allocations()
            self.last_allocations = None if after is None else after - (before or 0)
            if self.consensus.largest(self.last_allocations or 0) == 0:
                break
        self.training_pass.forget()
        # Loops differ in the small tensors that they keep: batches, losses, metrics.
        return self._attempt(self.memory.reserve_spare, rows, self.batches.max_len) if lengths else None

    def _largest_batch_size(self) -> tuple[int, OutOfMemory | None]:
        fits, rows = 0, 1
        while rows <= _MOST_ROWS:
            problem = self._try_rows(rows)
            if problem is not None:
                fits = self._bisect(fits, rows)
                return fits, replace(problem, largest_batch_size=fits)
            fits, rows = rows, 2 * rows
        return fits, None

    def _bisect(self, fits: int, too_large: int) -> int:
        while too_large - fits > 1:
            rows = (fits + too_large) // 2
            if self._try_rows(rows) is None:
                fits = rows
            else:
                too_large = rows
        return fits

    def _try_rows(self, rows: int) -> OutOfMemory | None:
        """Train at max_len: once without optimizer state, and once with it."""
        self.measured.clear()
        return self._try_length(rows, self.batches.max_len, passes=1 if self.training_pass.optimizer is None else 2)

    def _try_length(self, rows: int, length: int, passes: int) -> OutOfMemory | None:
        def work() -> None:
            for _ in range(passes):
                self.training_pass.forward_backward(self.batches.make(rows, length))
                self.training_pass.step()

        problem = self._attempt(work, rows, length)
        if problem is None:
            self.measured[length] = LengthMemory(length, self.memory.peak(), self.memory.reserved())
        return problem

    def _attempt(self, work: Callable[[], None], rows: int, length: int) -> OutOfMemory | None:
        """Return a description if any rank is out of memory. Any other error is raised, on every rank."""
        self.memory.reset_peak()
        before = self.memory.allocated(), *self.memory.free()
        own, problem, failure = Outcome.FITS, None, None
        try:
            work()
        except Exception as error:
            if is_out_of_memory(error):
                own = Outcome.OUT_OF_MEMORY
                message = str(error).partition("\n")[0]
                problem = OutOfMemory(rows, length, message, *before, None, fragmentation_advice(self.memory))
            else:
                own, failure = Outcome.FAILED, error
        worst = self.consensus.worst_outcome(own)
        if failure is not None:
            raise failure
        if worst == Outcome.FAILED:
            own_problem = "" if problem is None else f"; here {problem}"
            raise RuntimeError(f"warmup_allocator failed on another rank{own_problem}")
        if worst == Outcome.FITS:
            return None
        self.training_pass.discard()
        gc.collect()
        self.memory.release()
        return problem or OutOfMemory(rows, length, "another rank is out of memory", *before, None, None)
