"""Where progress bars are shown."""

from __future__ import annotations

import io
import sys
from typing import TextIO


def standard_error() -> TextIO:
    """Standard error, or a file that nobody reads: services and pythonw close it, and then `sys.stderr` is None."""
    return io.StringIO() if sys.stderr is None or sys.stderr.closed else sys.stderr
