"""How far a kernel may be from float64: twice as far as plain PyTorch in the same dtype, or 8 units in the last
place of the largest value, whichever is more."""

import torch


def slack(backend, device):
    """Triton's interpreter multiplies with NumPy: measured, its float32 products over 256 terms are 2.5e-5 off where
    values are 60, several times what torch's are."""
    return 3 if (backend, device) == ("triton", "cpu") else 2


def assert_within_budget(name, got, exact, eager, dtype, times=2):
    """`eager` may hold NaN where plain PyTorch has none to offer (rows that see nothing)."""
    assert got.shape == exact.shape, f"{name} has shape {tuple(got.shape)}, not {tuple(exact.shape)}"
    if exact.numel() == 0:
        return
    assert got.isfinite().all(), f"{name} is not finite"
    largest = exact.abs().max().item()
    eager_error = (eager.double() - exact).abs().nan_to_num(0, 0).max().item()
    budget = max(times * eager_error, times * 4 * torch.finfo(dtype).eps * largest)
    error = (got.double() - exact).abs().max().item()
    assert error <= budget, f"{name} is {error:.2e} off, of {largest:.2e}; the budget is {budget:.2e}"
