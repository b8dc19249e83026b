"""A change of a source file."""

from __future__ import annotations

from typing import NamedTuple


class Edit(NamedTuple):
    start: int  #: index of the first character that is replaced
    end: int
    operator: str  #: kind of the change
    text: str  #: the replacement
