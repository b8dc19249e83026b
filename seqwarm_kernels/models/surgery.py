"""What the surgeons of the model families share: the registry, and the operations that they may do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention.slopes import alibi_slopes
from .alibi_layer import AlibiHeads
from .edits import Edits
from .report import Removed, Replaced

#: Makes one module of a registered class part of an ALiBi model.
Surgeon = Callable[[Any, "Surgery"], None]

_surgeons: dict[str, Surgeon] = {}


def register_alibi(*module_classes: type[nn.Module] | str) -> Callable[[Surgeon], Surgeon]:
    """A decorator: `apply_alibi` calls the function for every module of these classes and of their subclasses.

    The function gets the module and a `Surgery`. It gives an attention module its slopes with `give_alibi` and sees to
    it that its forward calls `models.attend`; a module that adds positions it replaces with `replace`.

    Args:
        module_classes: classes, or their full names for classes that are not to be imported.
    """
    names = [name if isinstance(name, str) else full_name(name) for name in module_classes]
    if not names:
        raise ValueError("module_classes must hold at least one class, got none")

    def register(surgeon: Surgeon) -> Surgeon:
        _surgeons.update(dict.fromkeys(names, surgeon))
        return surgeon

    return register


def full_name(module_class: type) -> str:
    return f"{module_class.__module__}.{module_class.__qualname__}"


def surgeon_for(module: nn.Module) -> Surgeon | None:
    """Of the nearest registered class among the module's own and its bases."""
    names = (full_name(base) for base in type(module).__mro__)
    return next((_surgeons[name] for name in names if name in _surgeons), None)


def registered_classes() -> list[str]:
    return sorted(_surgeons)


class Surgery:
    """One operation on one model. Every change goes through here, so that it can be taken back.

    Attributes:
        model: what `apply_alibi` was given.
        max_seq_length: tokens that the model must take.
        path: the name of the module at hand in the model.
    """

    def __init__(self, model: nn.Module, max_seq_length: int, learn_slopes: bool) -> None:
        self.model = model
        self.max_seq_length = max_seq_length
        self.learn_slopes = learn_slopes
        self.path = ""
        self.replaced: list[Replaced] = []
        self.removed: list[Removed] = []
        self.edits = Edits()
        self._afterwards: list[Callable[[], None]] = []

    def give_alibi(
        self, module: nn.Module, num_heads: int, *, causal: bool | None, slopes: Sequence[float] | None = None
    ) -> None:
        """Give an attention module `alibi`, the slopes that `attend` uses.

        Args:
            module: the attention module at hand.
            num_heads: of queries.
            causal: None where the caller of `attend` says it each time.
            slopes: default `alibi_slopes(num_heads)`.
        """
        self._check_unquantised(module)
        slopes = alibi_slopes(num_heads).tolist() if slopes is None else slopes
        device = next((parameter.device for parameter in module.parameters()), None)
        heads = AlibiHeads(slopes, causal=causal, learned=self.learn_slopes, device=device)
        self.edits.assign(module, "alibi", heads)
        self.replaced.append(Replaced(self.path, type(module).__name__, num_heads, causal))

    def afterwards(self, action: Callable[[], None]) -> None:
        """Do this when all attention has its slopes."""
        self._afterwards.append(action)

    def finish(self) -> None:
        for action in self._afterwards:
            action()

    def replace(self, module: nn.Module, replacement: nn.Module) -> None:
        """Put `replacement` in every place of a module that tells positions; its parameters leave the model."""
        replacement.train(module.training)
        places = [path for path, other in self.model.named_modules(remove_duplicate=False) if other is module]
        for path in places:
            parent_path, _, name = path.rpartition(".")
            self.edits.assign(self.model.get_submodule(parent_path), name, replacement)
        num_parameters = sum(parameter.numel() for parameter in module.parameters())
        self.removed.append(Removed(places[0], type(module).__name__, num_parameters))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name = value`."""
        self.edits.assign(owner, name, value)

    def _check_unquantised(self, module: nn.Module) -> None:
        kinds = [type(part) for part in module.modules()]
        packages = {kind.__module__.split(".")[0] for kind in kinds}
        holds_integers = any(
            t.dim() > 1 and not t.is_floating_point() for t in (*module.parameters(), *module.buffers())
        )
        if holds_integers or "bitsandbytes" in packages or any("quantiz" in kind.__module__ for kind in kinds):
            raise ValueError(
                f"{self.path} ({type(module).__name__}) is quantised: apply_alibi to the model in floating point, "
                "train it, and quantise then"
            )


class NoPositions(nn.Module):
    """In the place of a table of position embeddings: adds nothing."""

    def forward(self, positions: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=positions.device)  # takes the dtype of what it is added to


class NoRotation(nn.Module):
    """In the place of rotary embeddings: the cosine and sine of an angle of 0."""

    def __init__(self, rotary_dim: int) -> None:
        super().__init__()
        self.rotary_dim = rotary_dim

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return x.new_ones(1, 1, self.rotary_dim), x.new_zeros(1, 1, self.rotary_dim)
