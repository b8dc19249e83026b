"""The error budget of kernels, and a kernel that counts its launches.

How exact a result can be depends on its terms: where large ones cancel, little remains. This is measured. The inputs
move at random by up to one unit in the last place, and the results in float64 move with them. The budget is in units of
the largest value plus the largest of such moves: 2 units in the last place of the result's dtype, and 16 of float32, in
which kernels sum. (Measured with six seeds: at most 0.8 and 11.)
"""

import torch

FLOAT32 = torch.finfo(torch.float32).eps  # small enough for moves to be proportional to it


class Exact:
    """Results in float64, and how far moving the inputs moves them. compute(tensors) takes detached tensors."""

    def __init__(self, compute, tensors):
        moves = 3 if tensors[0].dtype == torch.float32 else 1  # rounding hides the sums of other dtypes
        tensors = [tensor.detach().double() for tensor in tensors]
        self.results = compute(tensors)
        self.moves = [0.0] * len(self.results)  # in units in the last place of the inputs
        generator = torch.Generator().manual_seed(0)
        for _ in range(moves):
            moved = compute([_moved(tensor, generator) for tensor in tensors])
            differences = [_largest(one - other) for one, other in zip(moved, self.results, strict=True)]
            self.moves = [max(move, by / FLOAT32) for move, by in zip(self.moves, differences, strict=True)]

    def check(self, names, results, dtypes):
        """Check each result in the precision of its dtype."""
        for name, result, exact, move, dtype in zip(names, results, self.results, self.moves, dtypes, strict=True):
            assert result.shape == exact.shape, f"{name} has shape {tuple(result.shape)}, not {tuple(exact.shape)}"
            assert torch.equal(result.isfinite(), exact.isfinite()), f"{name} is not finite"
            budget = (2 * torch.finfo(dtype).eps + 16 * FLOAT32) * (move + _largest(exact))
            error = _largest(result.double() - exact)
            assert error <= budget, f"{name} is {error:.2e} off, of {_largest(exact):.2e}; the budget is {budget:.2e}"


def _moved(tensor, generator):
    noise = torch.rand(tensor.shape, dtype=tensor.dtype, generator=generator).to(tensor.device)
    return tensor * (1 + FLOAT32 * (2 * noise - 1))


def _largest(tensor):
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


class CountedKernel:
    """A Triton kernel that records its launches."""

    def __init__(self, kernel):
        self.kernel, self.grids = kernel, []

    @property
    def launches(self):
        return len(self.grids)

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.kernel[grid]
