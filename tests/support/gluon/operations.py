"""What Gluon has for Hopper: tiles and barriers in shared memory, copies and products."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .functions import FUNCTIONS, store
from .machine import Machine
from .memory import Barrier, ProtocolError, Slot, learn, poison
from .values import Descriptor, Pointer, Tensor, Unfinished, numpy_type, plain, scalar, tensor


class Items:
    """Barriers or tiles of one allocation. Kernels touch whole items."""

    def __init__(self, shape: Sequence[int], items: list[Any]) -> None:
        self.shape, self.items = shape, items

    def index(self, place: Any) -> Any:
        if not 0 <= int(place) < len(self.items):
            raise ProtocolError(f"{Machine.current.here()}: no item {place} of {len(self.items)} in shared memory")
        return self.items[int(place)]


class Tile:
    """A view of a slot in shared memory."""

    def __init__(self, slot: Slot, values: np.ndarray) -> None:
        self.slot, self.values, self.shape = slot, values, list(values.shape)

    def permute(self, order: Sequence[int]) -> "Tile":
        return Tile(self.slot, self.values.transpose(order))

    def reshape(self, shape: Sequence[int]) -> "Tile":
        values = self.values.reshape(shape)
        assert np.shares_memory(values, self.values), "a reshape of a permuted tile"
        return Tile(self.slot, values)

    def load(self, layout: Any) -> Tensor:
        machine, me = Machine.current, Machine.current.running
        machine.pause()
        machine.read(self.slot, me, me.clock[me], "a load")
        return tensor(self.values.copy())

    def store(self, value: Any) -> None:
        machine, me = Machine.current, Machine.current.running
        machine.pause()
        machine.write(self.slot, me, me.clock[me], "a store")
        me.unfenced.append(self.slot)
        self.values[...] = plain(value)


def allocate_shared_memory(dtype: Any, shape: Sequence[int], layout: Any) -> Items:
    if isinstance(layout, mbarrier.MBarrierLayout):
        barriers = [Barrier(i) for i in range(shape[0])]
        Machine.current.barriers += barriers
        return Items(shape, barriers)
    values = np.empty(shape, numpy_type(dtype))
    poison(values)
    return Items(shape, [Tile(Slot(), item) for item in values])


# ---- barriers


def init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


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
    if [size for size in tile.shape if size != 1] != [size for size in descriptor.block_shape if size != 1]:
        here = Machine.current.here()
        raise ProtocolError(f"{here}: a block of shape {descriptor.block_shape} into a tile of shape {tile.shape}")
    places = [int(place) for place in coordinates]

    def land() -> None:
        tile.values[...] = descriptor.block(places).reshape(tile.shape)

    Machine.current.start_copy(barrier, descriptor.block_type.nbytes, tile.slot, land)
    poison(tile.values)


def copy_to_global(descriptor: Descriptor, coordinates: Any, tile: Tile) -> None:
    machine = Machine.current
    machine.pause()
    stores = machine.running.stores
    stores.started += 1
    machine.read(tile.slot, stores, stores.started, "a copy")
    descriptor.store([int(place) for place in coordinates], tile.values)


def store_wait(pendings: int) -> None:
    Machine.current.finish(Machine.current.running.stores, pendings)


def fence_async_shared() -> None:
    Machine.current.pause()
    unfenced = Machine.current.running.unfenced
    while unfenced:
        unfenced.pop().fenced = True


def warpgroup_mma(left: Any, right: Tile, added: Any, *, use_acc: bool = True, is_async: bool) -> Unfinished:
    """The result is computed at once: whoever changes an operand before the product is waited for makes an error."""
    assert is_async
    machine = Machine.current
    machine.pause()
    products = machine.running.products
    products.started += 1
    added = added.result if isinstance(added, Unfinished) else plain(added)
    result = _operand(left) @ _operand(right)
    if result.shape != added.shape:
        raise ProtocolError(f"{machine.here()}: a product of shape {result.shape} is added to {added.shape}")
    if use_acc:
        result = result + added
    return Unfinished.of(result, machine.here(), products.started)


def _operand(operand: Any) -> np.ndarray:
    if not isinstance(operand, Tile):
        return plain(operand)
    products = Machine.current.running.products
    Machine.current.read(operand.slot, products, products.started, "a product")
    return operand.values


def warpgroup_mma_wait(num_outstanding: int, deps: Any) -> Any:
    """Results of products that are still in flight stay unfinished. Other products may add to them."""
    running = Machine.current.running
    Machine.current.finish(running.products, num_outstanding)
    finished = running.clock[running.products]
    values = tuple(tensor(dep.result) if isinstance(dep, Unfinished) and dep.step <= finished else dep for dep in deps)
    return values[0] if len(values) == 1 else values


# ---- tables of what kernels call


def _store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    Machine.current.note_store(pointer.memory, store(pointer, value, mask))


LANGUAGE = FUNCTIONS | {
    "allocate_shared_memory": allocate_shared_memory, "store": _store,
    "program_id": lambda axis: scalar(Machine.current.program[axis]),
    "num_programs": lambda axis: scalar(Machine.current.grid[axis]),
    "warp_specialize": lambda functions, warps, registers: Machine.current.split(functions),
}  # fmt: skip
BARRIERS = {
    "init": init, "arrive": arrive, "wait": wait,
    "expect": lambda barrier, num_bytes: arrive(barrier, num_bytes=num_bytes),
}  # fmt: skip
COPIES = {
    "async_copy_global_to_shared": copy_to_shared, "async_load": copy_to_shared, "store_wait": store_wait,
    "async_copy_shared_to_global": copy_to_global, "async_store": copy_to_global,
}  # fmt: skip
PRODUCTS = {
    "fence_async_shared": fence_async_shared, "warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait,
}  # fmt: skip
