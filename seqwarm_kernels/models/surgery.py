"""The registry of converters, and the changes that converters may make to a model. Every change can be undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..attention.slopes import alibi_slopes
from ..utils.checks import check_bool, check_int, is_dtensor
from .alibi_layer import AlibiHeads, Slopes
from .edits import Edits
from .report import Removed, Replaced
from .transformers_sharding import mesh_of_heads

#: Converts one module of a registered class.
Converter = Callable[[Any, "Surgery"], None]

_converters: dict[str, Converter] = {}


def register_alibi(*module_classes: type[nn.Module] | str) -> Callable[[Converter], Converter]:
    """Decorator: `apply_alibi` calls the function for every module of these classes and of their subclasses.

    The function is called with the module and a `Surgery`. For an attention module it calls `give_alibi`; the module's
    forward must then call `models.alibi_layer_attention`. For a module that adds positions it calls `replace`.

    Args:
        module_classes: Classes, or the full names of classes that should not be imported.
    """
    names = [name if isinstance(name, str) else _full_name(name) for name in module_classes]

    def register(converter: Converter) -> Converter:
        _converters.update(dict.fromkeys(names, converter))
        return converter

    return register


def converter_for(module: nn.Module) -> Converter | None:
    """Return the converter of the nearest registered class among the module's class and its bases."""
    names = (_full_name(base) for base in type(module).__mro__)
    return next((_converters[name] for name in names if name in _converters), None)


def _full_name(module_class: type) -> str:
    return f"{module_class.__module__}.{module_class.__qualname__}"


class Surgery:
    """The conversion of one model. Converters make every change through this object, so that it can be undone.

    Attributes:
        model: The model passed to `apply_alibi`.
        max_seq_length: Longest sequence that the model must take.
        learn_slopes: Whether slopes are parameters.
        path: Name of the current module in the model.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `max_seq_length` is less than 2 or does not fit into 32 bits.
    """

    def __init__(self, model: nn.Module, max_seq_length: int, learn_slopes: bool) -> None:
        check_bool("learn_slopes", learn_slopes)
        self.model = model
        self.max_seq_length = check_int("max_seq_length", max_seq_length, minimum=2)
        if self.max_seq_length >= 2**31:  # positions have 32 bits
            raise ValueError(f"max_seq_length must be below 2**31, got {max_seq_length}")
        self.learn_slopes = learn_slopes
        self.path = ""
        self.replaced: list[Replaced] = []
        self.removed: list[Removed] = []
        self.edits = Edits()
        self._heads: list[AlibiHeads] = []  # of each layer in `replaced`
        self._afterwards: list[Callable[[], None]] = []

    def give_alibi(
        self, module: nn.Module, num_heads: int, *, causal: bool | None, slopes: Sequence[float] | None = None
    ) -> None:
        """Set `module.alibi`, the slopes that `alibi_layer_attention` uses. Slopes that the module has are kept.

        The `slopes` of `apply_alibi` come before those of a converter.

        Args:
            module: The current attention module.
            num_heads: Number of query heads.
            causal: Whether a query sees only the keys before it. None: each call decides.
            slopes: Default: `alibi_slopes(num_heads)`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: The number of slopes is not `num_heads`.
        """
        heads = getattr(module, "alibi", None)
        if not isinstance(heads, AlibiHeads):
            slopes = alibi_slopes(num_heads).tolist() if slopes is None else slopes
            device = next((parameter.device for parameter in module.parameters()), None)
            heads = AlibiHeads(slopes, causal=causal, learned=self.learn_slopes, device=device)
            if len(heads.initial) != num_heads:
                raise ValueError(f"slopes must be one for each of the {num_heads} heads, got {len(heads.initial)}")
            self.edits.assign(module, "alibi", heads)
        mesh = mesh_of_heads(self.model, self.path, module)
        if mesh is not None and not is_dtensor(heads.slopes):
            self.edits.assign(heads, "slopes", heads.sharded_slopes(mesh, src_data_rank=None))
        self._heads.append(heads)
        self.replaced.append(Replaced(self.path, type(module).__name__, num_heads, causal))

    def set_slopes(self, slopes: Slopes) -> None:
        """Replace the slopes of all layers by those of the user."""
        rows = slopes if isinstance(slopes, list) else [slopes] * len(self._heads)
        if len(rows) != len(self._heads):
            raise ValueError(f"slopes must have a row for each of the {len(self._heads)} layers, got {len(rows)} rows")
        for row, layer, heads in zip(rows, self.replaced, self._heads, strict=True):
            if len(row) != layer.num_heads:
                raise ValueError(
                    f"slopes must be one number for each of the {layer.num_heads} heads of {layer.path}, got {len(row)}"
                )
            self.edits.assign(heads, "initial", row)
            self.edits.fill(heads.slopes, torch.tensor(row, dtype=torch.float32))

    def afterwards(self, action: Callable[[], None]) -> None:
        """Run `action` after all attention modules are converted."""
        self._afterwards.append(action)

    def finish(self) -> None:
        for action in self._afterwards:
            action()

    def replace(self, module: nn.Module, replacement: nn.Module) -> None:
        """Replace a module that adds positions, at every path in the model. Its parameters leave the model."""
        replacement.train(module.training)
        paths = [path for path, other in self.model.named_modules(remove_duplicate=False) if other is module]
        for path in paths:
            parent_path, _, name = path.rpartition(".")
            self.edits.assign(self.model.get_submodule(parent_path), name, replacement)
        num_parameters = sum(parameter.numel() for parameter in module.parameters())
        self.removed.append(Removed(paths[0], type(module).__name__, num_parameters))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Assign `owner.name = value`."""
        self.edits.assign(owner, name, value)

    def add_hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Register a forward pre-hook with keyword arguments, unless the module has it from an earlier call."""
        if hook not in module._forward_pre_hooks.values():  # torch has no public way to list hooks
            self.edits.on_undo(module.register_forward_pre_hook(hook, with_kwargs=True).remove)

    def update_optimizers(self, optimizers: Sequence[Optimizer], before: Mapping[str, nn.Parameter]) -> int:
        """Remove parameters that left the model from the optimizers, and add new ones to the first optimizer.

        Parameters are compared by identity with those before the conversion, so that tied weights stay. Returns the
        number of removed parameters.
        """
        after = dict(self.model.named_parameters())
        kept, old = {id(parameter) for parameter in after.values()}, {id(parameter) for parameter in before.values()}
        dropped = sum(self.edits.drop_parameters(optimizer, old - kept) for optimizer in optimizers)
        new = {name: parameter for name, parameter in after.items() if id(parameter) not in old}
        if new and optimizers:
            self.edits.add_parameters(optimizers[0], new)
        return dropped


class NoPositions(nn.Module):
    """Replaces a table of position embeddings. Adds zero.

    `weight` is zeros (max_seq_length, hidden_size), for code that reads the table. They are no parameter, are not saved
    in checkpoints, follow the module to devices and dtypes, and take the memory of one number.
    """

    _like: Tensor

    def __init__(
        self,
        max_seq_length: int = 0,
        hidden_size: int = 0,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.shape = (max_seq_length, hidden_size)
        # Only its device and dtype count: `to_empty` may leave any value. `to` would copy an expanded buffer in full.
        self.register_buffer("_like", torch.zeros((), device=device, dtype=dtype), persistent=False)

    @property
    def weight(self) -> Tensor:
        return self._like.new_zeros(()).expand(self.shape)

    def forward(self, positions: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=positions.device)  # the sum keeps the dtype of the embeddings


class NoRotation(nn.Module):
    """Replaces rotary embeddings. Returns the cosine and sine of an angle of 0, each one element in memory."""

    def __init__(self, rotary_dim: int) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        shape = (1, 1, self.rotary_dim)
        return x.new_ones(1).expand(shape), x.new_zeros(1).expand(shape)
