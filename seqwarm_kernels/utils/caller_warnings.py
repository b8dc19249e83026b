"""Warnings that name the line of the user."""

from __future__ import annotations

import sys
import warnings

#: Packages whose frames lie between the user's call and the warning, such as the calls of hooks by `nn.Module`.
_SKIPPED = {__name__.partition(".")[0], "torch"}


def warn_caller(message: str) -> None:
    """Warn at the innermost frame outside of this package and torch."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _SKIPPED:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
