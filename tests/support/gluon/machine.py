"""The partitions of a program: threads of which one runs at a time, as a seeded scheduler says."""

import random
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from .memory import Barrier, Clock, Copy, Flight, ProtocolError, Region, SharedMemory, learn, poison
from .sites import here


class Stopped(BaseException):
    """Ends a partition because another one failed."""


class Partition:
    def __init__(self, name: str, clock: Clock, weight: float) -> None:
        self.name, self.clock, self.weight = name, {**clock, self: 1}, weight
        self.baton = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.waits: Callable[[], str] = str
        self.products: list[Flight] = []  # in order
        self.stores: list[Flight] = []
        self.unfenced: list[Region] = []
        self.finished = False

    def __str__(self) -> str:
        return self.name

    def step(self) -> None:
        """Who learned of the steps up to here does not know the next."""
        self.clock[self] += 1


class Machine:
    """Runs one program of a grid after the other."""

    current: ClassVar["Machine"]

    def __init__(self, grid: tuple[int, ...], seed: int) -> None:
        self.grid, self.random = grid, random.Random(seed)
        self.writers: dict[tuple[int, int], np.ndarray] = {}
        self.partitions_before = 0  # in earlier programs

    def run(self, program: tuple[int, ...], kernel: Callable[..., None], arguments: dict[str, Any]) -> None:
        self.program = program
        self.failure: BaseException | None = None
        self.memory = SharedMemory()
        self.barriers: list[Barrier] = []
        self.copies: list[Copy] = []
        self.started: list[Copy] = []
        self.copy_weight = self._weight()
        self.running = Partition("the kernel", {}, 1)
        self.partitions = [self.running]
        kernel(**arguments)
        self._check_the_end()
        self.partitions_before += len(self.partitions)

    def _weight(self) -> float:
        """Some partitions and copies are much slower than others, or few schedules would differ much."""
        return 4 ** self.random.uniform(-2, 2)

    def _check_the_end(self) -> None:
        for copy in self.started:
            if copy not in self.running.clock:
                raise ProtocolError(f"the program ends without a wait for {copy}")
        for barrier in self.barriers:
            if barrier.bytes:
                raise ProtocolError(f"the program ends, and {barrier.bytes} bytes have not come to {barrier}")
        self._check_flights(self.running)

    def _check_flights(self, partition: Partition) -> None:
        for flight in (*partition.products, *partition.stores):
            raise ProtocolError(f"{partition} ends without a wait: {flight.where}")

    # ---- partitions

    def split(self, functions: list[tuple[Callable[..., None], tuple]], *_: Any) -> None:
        """Run partitions to their ends."""
        parent = self.running
        parts = [
            Partition(f"partition {i} ({function.__name__})", parent.clock, self._weight())
            for i, (function, _) in enumerate(functions)
        ]
        parent.step()
        self.partitions += parts

        def run(part: Partition, function: Callable[..., Any], arguments: tuple) -> None:
            part.baton.acquire()
            try:
                if self.failure is None:
                    with np.errstate(all="ignore"):
                        function(*arguments)
                    self._check_flights(part)
            except Stopped:
                pass
            except BaseException as error:
                self.failure = self.failure or error
            part.finished = True
            self._hand_over()

        jobs = [(part, *function) for part, function in zip(parts, functions, strict=True)]
        threads = [threading.Thread(target=run, args=job, daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        self.pause(lambda: all(part.finished for part in parts), lambda: "for its partitions")
        for thread in threads:
            thread.join()
        for part in parts:
            learn(parent.clock, part.clock)

    def pause(self, ready: Callable[[], bool] = lambda: True, waits: Callable[[], str] = str) -> None:
        """Let other partitions and copies go on, at least until this one is ready."""
        me = self.running
        me.ready, me.waits = ready, waits
        self._hand_over()
        me.baton.acquire()
        if self.failure is not None:
            raise self.failure if me is self.partitions[0] else Stopped

    def _hand_over(self) -> None:
        self.running = self._next()
        self.running.baton.release()

    def _next(self) -> Partition:
        while self.failure is None:
            unfinished = [partition for partition in self.partitions if not partition.finished]
            ready = [partition for partition in unfinished if partition.ready()]
            if not ready and not self.copies:
                blocked = "; ".join(f"{each} waits {each.waits()}" for each in reversed(unfinished))
                self.failure = ProtocolError(f"deadlock: {blocked}")
                break
            weights = [partition.weight for partition in ready] + [self.copy_weight] * len(self.copies)
            chosen = self.random.choices([*ready, *self.copies], weights)[0]
            if isinstance(chosen, Partition):
                return chosen
            try:
                self._land(chosen)
            except ProtocolError as error:
                self.failure = error
        # Each partition stops when its turn comes, the one that began the others last.
        return next(partition for partition in reversed(self.partitions) if not partition.finished)

    # ---- accesses to memory

    def start_copy(self, barrier: Barrier, num_bytes: int, tile: np.ndarray, values: Callable[[], np.ndarray]) -> None:
        def land() -> None:
            tile[...] = values()

        self.pause()
        barrier.check(self.here())
        copy = Copy(self.here(), dict(self.running.clock), barrier, num_bytes, land)
        self.memory.write(tile, copy, copy.clock, f"{self.here()}: a copy")
        poison(tile)
        self.running.step()
        self.copies.append(copy)
        self.started.append(copy)

    def _land(self, copy: Copy) -> None:
        self.copies.remove(copy)
        copy.land()
        copy.barrier.change(copy.clock, copy.where, num_bytes=-copy.num_bytes)

    def read(self, tile: np.ndarray, access: str, flight: Flight | None = None) -> None:
        self.memory.read(tile, self.running, self.running.clock, f"{self.here()}: {access}", flight)

    def write(self, tile: np.ndarray, access: str) -> None:
        region = self.memory.write(tile, self.running, self.running.clock, f"{self.here()}: {access}")
        region.fenced = False
        self.running.unfenced.append(region)

    def finish(self, flights: list[Flight], left: int) -> None:
        """Wait until at most `left` of the running partition's flights are left."""
        me = self.running
        self.pause()
        for flight in [flights.pop(0) for _ in range(len(flights) - left)]:
            flight.finished = True
            for region in flight.regions:
                region.readers.remove(flight)
                region.reads[me] = me.clock[me]

    def note_store(self, memory: np.ndarray, items: np.ndarray) -> None:
        """No two partitions, of any programs, store one item of global memory."""
        me = 1 + self.partitions_before + self.partitions.index(self.running)
        place = memory.__array_interface__["data"][0], memory.itemsize
        writers = self.writers.setdefault(place, np.zeros(memory.size, np.int32))
        if ((writers[items] != 0) & (writers[items] != me)).any():
            raise ProtocolError(f"{self.here()}: two partitions store the same item, of which a GPU may keep either")
        writers[items] = me

    def here(self) -> str:
        return f"{self.running}: {here()}"
