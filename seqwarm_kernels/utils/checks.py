"""Checks of plain arguments, shared by every public function."""

from __future__ import annotations


def check_int(name: str, value: object, *, minimum: int | None = None) -> None:
    """`value` must be an int (no bool), at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


def check_real(name: str, value: object) -> None:
    """`value` must be a finite real number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a real number, got {type(value).__name__}")
    if not value - value == 0:  # math.isfinite does not trace where torch.compile takes a number for dynamic
        raise ValueError(f"{name} must be finite, got {value}")


def check_share(name: str, value: object) -> None:
    """`value` must be a number in [0, 1)."""
    check_real(name, value)
    if not 0 <= value < 1:  # type: ignore[operator]
        raise ValueError(f"{name} must be in [0, 1), got {value}")


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
