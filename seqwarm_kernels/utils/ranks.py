"""Whether this process is one of several ranks."""

from __future__ import annotations

from torch import distributed


def has_process_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()
