"""Results in float64, and the error that an implementation may have.

How exact a result can be depends on its terms: where large ones cancel, little remains. This is measured. The inputs
move at random by up to one unit in the last place, and the results in float64 move with them. The budget is in units of
the largest value plus the largest of such moves: 2 units in the last place of the result's dtype, and 16 of float32, in
which kernels sum. (Measured with six seeds: at most 0.8 and 11.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FLOAT32 = torch.finfo(torch.float32).eps  # small enough for moves to be proportional to it


class Comparison(NamedTuple):
    """One result of a call beside the exact one."""

    name: str
    error: float  #: largest absolute distance; infinite if the shapes or the infinite elements differ
    budget: float
    size: float  #: largest exact value

    def within(self) -> bool:
        return self.error <= self.budget

    def __str__(self) -> str:
        return f"{self.name} is {self.error:.2e} off, of {self.size:.2e}; the budget is {self.budget:.2e}"


class Exact:
    """Results in float64, and how far moving the inputs moves them.

    Args:
        compute: A function of detached tensors in float64 or float32.
        tensors: Its inputs in the dtype of the call that is compared.
    """

    def __init__(self, compute: Callable[[list[Tensor]], Sequence[Tensor]], tensors: Sequence[Tensor]) -> None:
        tensors = [tensor.detach().double() for tensor in tensors]
        self.results = compute(tensors)
        self.moves = [0.0] * len(self.results)  # in units in the last place of the inputs
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):  # one may move a result of few elements by almost nothing
            moved = compute([_moved(tensor, generator) for tensor in tensors])
            differences = [largest(one - other) for one, other in zip(moved, self.results, strict=True)]
            self.moves = [max(move, by / FLOAT32) for move, by in zip(self.moves, differences, strict=True)]

    def compare(
        self, names: Sequence[str], results: Sequence[Tensor], dtypes: Sequence[torch.dtype]
    ) -> Iterator[Comparison]:
        """Compare each result in the precision of its dtype."""
        for name, result, exact, move, dtype in zip(names, results, self.results, self.moves, dtypes, strict=True):
            size = largest(exact)
            budget = (2 * torch.finfo(dtype).eps + 16 * FLOAT32) * (move + size)
            same = result.shape == exact.shape and torch.equal(result.isfinite(), exact.isfinite())
            yield Comparison(name, largest(result.double() - exact) if same else float("inf"), budget, size)


def _moved(tensor: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.rand(tensor.shape, dtype=tensor.dtype, generator=generator).to(tensor.device)
    return tensor * (1 + FLOAT32 * (2 * noise - 1))


def largest(tensor: Tensor) -> float:
    """The largest absolute value of the finite elements."""
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0
