"""Makes Triton's interpreter several times as fast, and stricter."""

import gc
from types import FunctionType, SimpleNamespace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor


def make_faster():
    """Do once what the interpreter does for each call of a function, and nothing that has no effect."""
    _patch_language_once()
    interpreter._get_np_dtype = _called_once_for_each_type(interpreter._get_np_dtype)
    _share_shapes()
    # Sums of integers would be repeated in 64 bits, and compared with the limits of 32 bits only in debug mode.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)


def _patch_language_once():
    patch = interpreter._patch_lang
    patch(FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda _: SimpleNamespace(restore=lambda: None)


def _called_once_for_each_type(function):
    known = {}

    def remembered(dtype):
        if dtype.name not in known:
            known[dtype.name] = function(dtype)
        return known[dtype.name]

    return remembered


def _share_shapes():
    """Types of one shape, and tensors of one type, share what the first one computed."""
    types, init_type, init_tensor = {}, tl.block_type.__init__, tl.tensor.__init__

    def init_type_once(self, element_type, shape):
        key = element_type.name, *(getattr(size, "value", size) for size in shape)
        if key not in types:
            init_type(self, element_type, shape)
            types[key] = vars(self)
        vars(self).update(types[key])

    def init_tensor_once(self, handle, type):
        if not hasattr(type, "of_tensors"):
            init_tensor(self, handle, type)
            type.of_tensors = dict(vars(self))
        vars(self).update(type.of_tensors, handle=handle, type=type)

    tl.block_type.__init__, tl.tensor.__init__ = init_type_once, init_tensor_once


def poison_masked_loads():
    """A load without `other` gives NaN or a large number where its mask is False. A GPU may give anything.

    Not so a load of one element: the interpreter takes its `other=0` for none.
    """
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load

    def load_poisoned(self, pointers, mask, other, *rest, **options):
        if other is None and pointers.data.size > 1:
            dtype = pointers.get_element_ty()
            numbers = interpreter._get_np_dtype(dtype)  # uint16 for bfloat16, in which 0x7FFF is NaN
            poison = np.iinfo(numbers).max // 2 if numbers.kind in "iu" else np.nan
            other = interpreter.TensorHandle(np.full_like(pointers.data, poison, dtype=numbers), dtype)
        return load(self, pointers, mask, other, *rest, **options)

    builder.create_masked_load = load_poisoned


#: Addresses [begin, end) of the tensors that the running kernel may access.
_memory = set()

#: By tensor and size of its items: the program that stored each item, counted from 1.
_writers = {}


def check_accesses():
    """Loads and stores stay inside of one tensor, no two programs store one item, and hints of alignment are true.

    A kernel may access its arguments, and all tensors after it turned a number into an address.
    """
    grid, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    init, to_pointer, atomic = grid._init_args_hst, builder.create_int_to_ptr, builder.create_atomic_rmw
    load, store = builder.create_masked_load, builder.create_masked_store

    def init_checked(self, arguments, named):
        arguments, named = init(self, arguments, named)
        _writers.clear()
        _memory.clear()
        _memory.update(map(_memory_of, _tensors_in((*arguments, *named.values()))))
        return arguments, named

    def to_pointer_checked(self, numbers, pointer_type):
        if None not in _memory:
            _memory.update(map(_memory_of, _live_tensors()), {None})
        return to_pointer(self, numbers, pointer_type)

    def load_checked(self, pointers, mask, *rest, **options):
        _check_bounds(pointers, mask)
        return load(self, pointers, mask, *rest, **options)

    def store_checked(self, pointers, value, mask, *rest):
        _check_bounds(pointers, mask, program=self.grid_idx[0] + 1)
        return store(self, pointers, value, mask, *rest)

    def atomic_checked(self, operation, pointers, value, mask, *rest):
        _check_bounds(pointers, mask)
        return atomic(self, operation, pointers, value, mask, *rest)

    def set_attr_checked(self, name, values):
        if name == "tt.divisibility" and (self.data % max(values)).any():
            raise ValueError(f"a kernel calls numbers multiples of {max(values)} that are not")

    grid._init_args_hst, builder.create_int_to_ptr = init_checked, to_pointer_checked
    builder.create_masked_load, builder.create_masked_store = load_checked, store_checked
    builder.create_atomic_rmw = atomic_checked
    interpreter.TensorHandle.set_attr = set_attr_checked


def _tensors_in(arguments):
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _tensors_in(argument)
        elif isinstance(argument, TensorDescriptor):
            yield argument.base
        elif isinstance(argument, torch.Tensor):
            yield argument


def _live_tensors():
    tensors = (thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter))
    return [tensor for tensor in tensors if tensor.device.type == "cpu" and torch._C._has_storage(tensor)]


def _memory_of(tensor):
    begin = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size() if tensor.numel() else begin


def _check_bounds(pointers, mask, program=None):
    """Of the items where `mask` is True. A `program` stores them."""
    addresses = pointers.data[np.asarray(mask.data)]
    if addresses.size == 0:
        return
    item_bytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    low, high = int(addresses.min()), int(addresses.max()) + item_bytes
    memory = next((each for each in _memory if each and each[0] <= low and high <= each[1]), None)
    if memory is None:
        raise IndexError(f"a kernel accesses bytes {low} to {high}, which are not inside of one of its tensors")
    if program is not None:
        _note_writer(memory, item_bytes, addresses, program)


def _note_writer(memory, item_bytes, addresses, program):
    begin, end = memory
    if (memory, item_bytes) not in _writers:
        _writers[memory, item_bytes] = np.zeros((end - begin) // item_bytes, np.int32)
    writers = _writers[memory, item_bytes]
    items = (addresses - begin) // item_bytes
    if ((writers[items] != 0) & (writers[items] != program)).any():
        raise RuntimeError("two programs of a kernel store the same item, of which a GPU may keep either")
    writers[items] = program
