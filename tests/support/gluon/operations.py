"""What Gluon has for Hopper: tiles and barriers in shared memory, copies and products."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .functions import FUNCTIONS, store
from .machine import Machine
from .memory import Barrier, Flight, ProtocolError, learn
from .values import Descriptor, Pointer, Tensor, Unfinished, numpy_type, plain, scalar, tensor


class Barriers:
    """Those of one allocation."""

    def __init__(self, number: int) -> None:
        self.items = [Barrier(i) for i in range(number)]

    def index(self, place: Any) -> Barrier:
        return self.items[_inside(place, len(self.items))]


def _inside(place: Any, size: int) -> int:
    if not 0 <= int(place) < size:
        raise ProtocolError(f"{Machine.current.here()}: no item {place} among {size} in shared memory")
    return int(place)


class Tile:
    """A view of shared memory."""

    def __init__(self, values: np.ndarray, dtype: Any) -> None:
        self.values, self.dtype, self.shape = values, dtype, list(values.shape)

    def index(self, place: Any) -> "Tile":
        return Tile(self.values[_inside(place, len(self.values))], self.dtype)

    def permute(self, order: Sequence[int]) -> "Tile":
        return Tile(self.values.transpose(order), self.dtype)

    def reshape(self, shape: Sequence[int]) -> "Tile":
        values = self.values.reshape(shape)
        assert np.shares_memory(values, self.values), "a reshape of a permuted tile"
        return Tile(values, self.dtype)

    def load(self, layout: Any = None) -> Tensor:
        Machine.current.pause()
        Machine.current.read(self.values, "a load")
        return tensor(self.values.copy())

    def store(self, value: Any) -> None:
        Machine.current.pause()
        Machine.current.write(self.values, "a store")
        self.values[...] = plain(value)


def allocate_shared_memory(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
    if isinstance(layout, mbarrier.MBarrierLayout):
        barriers = Barriers(shape[0])
        Machine.current.barriers += barriers.items
        return barriers
    return Tile(Machine.current.memory.allocate([int(size) for size in shape], numpy_type(dtype)), dtype)


# ---- barriers


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count
    barrier.phase = barrier.bytes = 0


def expect(barrier: Barrier, num_bytes: int) -> None:
    arrive(barrier, num_bytes=num_bytes)


def arrive(barrier: Barrier, *, count: int = 1, num_bytes: int = 0) -> None:
    machine = Machine.current
    machine.pause()
    barrier.change(machine.running.clock, machine.here(), count, num_bytes)
    machine.running.step()


def wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
    machine = Machine.current
    where = machine.here()
    barrier.check(where)
    if not pred:
        return
    if int(phase) not in (0, 1):
        raise ProtocolError(f"{where}: no phase is {phase}")
    machine.pause(lambda: barrier.phase != phase, lambda: f"for the end of phase {phase} of {barrier}, in {where}")
    learn(machine.running.clock, barrier.clock)


# ---- copies and products


def copy_to_shared(descriptor: Descriptor, coordinates: Any, barrier: Barrier, tile: Tile) -> None:
    if _without_ones(tile.shape) != _without_ones(descriptor.block_shape):
        here = Machine.current.here()
        raise ProtocolError(f"{here}: a block of shape {descriptor.block_shape} into a tile of shape {tile.shape}")
    places = [int(place) for place in coordinates]
    Machine.current.start_copy(
        barrier, descriptor.block_type.nbytes, tile.values, lambda: descriptor.block(places).reshape(tile.shape)
    )


def _without_ones(shape: list[int]) -> list[int]:
    return [size for size in shape if size != 1]


def copy_to_global(descriptor: Descriptor, coordinates: Any, tile: Tile) -> None:
    machine = Machine.current
    machine.pause()
    flight = Flight(machine.here())
    machine.read(tile.values, "a copy", flight)
    machine.running.stores.append(flight)
    descriptor.store(coordinates, tile.values)


def store_wait(pendings: int) -> None:
    Machine.current.finish(Machine.current.running.stores, pendings)


def fence_async_shared() -> None:
    Machine.current.pause()
    unfenced = Machine.current.running.unfenced
    while unfenced:
        unfenced.pop().fenced = True


def warpgroup_mma(left: Any, right: Tile, added: Any, *, use_acc: Any = True, is_async: bool = False) -> Any:
    """The result is computed at once: whoever changes an operand before the product is waited for makes an error."""
    machine = Machine.current
    machine.pause()
    flight = Flight(machine.here())
    added = added.result if isinstance(added, Unfinished) else plain(added)
    result = _operand(left, flight) @ _operand(right, flight)
    if result.shape != added.shape:
        raise ProtocolError(f"{flight.where}: a product of shape {result.shape} is added to {added.shape}")
    if use_acc:
        result = result + added
    machine.running.products.append(flight)
    if is_async:
        return Unfinished.of(result, flight)
    machine.finish(machine.running.products, 0)
    return tensor(result)


def _operand(operand: Any, flight: Flight) -> np.ndarray:
    if not isinstance(operand, Tile):
        return plain(operand)
    Machine.current.read(operand.values, "a product", flight)
    return operand.values


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    """Results of products that are still in flight stay unfinished. Other products may add to them."""
    machine = Machine.current
    machine.finish(machine.running.products, num_outstanding)
    finished = (isinstance(dep, Unfinished) and dep.flight.finished for dep in deps)
    values = tuple(tensor(dep.result) if done else dep for dep, done in zip(deps, finished, strict=True))
    return values[0] if len(values) == 1 else values


# ---- tables of what kernels call


def _pause(*_: Any, **__: Any) -> None:
    Machine.current.pause()


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    Machine.current.note_store(pointer.memory, store(pointer, value, mask))


LANGUAGE = FUNCTIONS | {
    "allocate_shared_memory": allocate_shared_memory, "barrier": _pause, "thread_barrier": _pause, "store": _store,
    "program_id": lambda axis: scalar(Machine.current.program[axis]),
    "num_programs": lambda axis: scalar(Machine.current.grid[axis]),
    "warp_specialize": lambda *arguments: Machine.current.split(*arguments),
}  # fmt: skip
BARRIERS = {"init": init, "expect": expect, "arrive": arrive, "wait": wait}
COPIES = {
    "async_copy_global_to_shared": copy_to_shared, "async_load": copy_to_shared, "store_wait": store_wait,
    "async_copy_shared_to_global": copy_to_global, "async_store": copy_to_global,
}  # fmt: skip
PRODUCTS = {
    "fence_async_shared": fence_async_shared, "warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait,
}  # fmt: skip
