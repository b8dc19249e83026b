"""The partitions of a program: threads of which one runs at a time, as a seeded scheduler says."""

import random
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from .memory import Barrier, Clock, Copy, ProtocolError, Queue, Slot, here, learn


class Stopped(BaseException):
    """Ends a partition because another one failed."""


class Partition:
    def __init__(self, name: str, clock: Clock, weight: float) -> None:
        self.name, self.clock, self.weight = name, {**clock, self: 1}, weight
        self.baton = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.waits: Callable[[], str] = str
        self.products, self.stores = Queue(f"a product of {name}"), Queue(f"a copy of {name} into global memory")
        self.unfenced: list[Slot] = []
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
        self.barriers: list[Barrier] = []
        self.copies: list[Copy] = []  # in flight
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
        ends: Clock = dict.fromkeys(self.started, 1)
        for partition in self.partitions:
            ends |= {queue: queue.started for queue in (partition.products, partition.stores)}
        for actor, end in ends.items():
            if self.running.clock.get(actor, 0) < end:
                raise ProtocolError(f"the program ends without a wait for {actor}")
        for barrier in self.barriers:
            if barrier.bytes:
                raise ProtocolError(f"the program ends, and {barrier.bytes} bytes have not come to {barrier}")

    # ---- partitions

    def split(self, functions: list[tuple[Callable[..., None], tuple]]) -> None:
        """Run partitions to their ends."""
        parent = self.running
        parts, threads = [], []
        for i, (function, arguments) in enumerate(functions):
            part = Partition(f"partition {i} ({function.__name__})", parent.clock, self._weight())
            parts.append(part)
            threads.append(threading.Thread(target=self._run, args=(part, function, arguments), daemon=True))
        parent.step()
        self.partitions += parts
        for thread in threads:
            thread.start()
        self.pause(lambda: all(part.finished for part in parts), lambda: "for its partitions")
        for part, thread in zip(parts, threads, strict=True):
            thread.join()
            learn(parent.clock, part.clock)

    def _run(self, part: Partition, function: Callable[..., None], arguments: tuple) -> None:
        part.baton.acquire()
        try:
            if self.failure is None:
                with np.errstate(all="ignore"):
                    function(*arguments)
        except Stopped:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        part.finished = True
        self._hand_over()

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
        unfinished = [partition for partition in self.partitions if not partition.finished]
        while self.failure is None:
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
        return unfinished[-1]  # each partition stops when its turn comes, the one that began the others last

    # ---- accesses to memory

    def start_copy(self, barrier: Barrier, num_bytes: int, slot: Slot, land: Callable[[], None]) -> None:
        self.pause()
        barrier.check(self.here())
        copy = Copy(self.here(), dict(self.running.clock), barrier, num_bytes, land)
        self.write(slot, copy, 1, "a copy")
        self.running.step()
        self.copies.append(copy)
        self.started.append(copy)

    def _land(self, copy: Copy) -> None:
        self.copies.remove(copy)
        copy.land()
        copy.barrier.change(copy.clock, copy.where, num_bytes=-copy.num_bytes)

    def read(self, slot: Slot, actor: Any, step: int, access: str) -> None:
        slot.read(self.running.clock, actor, step, f"{self.here()}: {access}")

    def write(self, slot: Slot, actor: Any, step: int, access: str) -> None:
        slot.write(self.running.clock, actor, step, f"{self.here()}: {access}")

    def finish(self, queue: Queue, left: int) -> None:
        """Wait until at most `left` of a queue of the running partition are left."""
        me = self.running
        self.pause()
        me.clock[queue] = max(me.clock.get(queue, 0), queue.started - left)

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
