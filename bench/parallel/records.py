"""Records of what ranks exchange, and of the work that they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RECORDS = "cpu_many_devices"  #: name of the records file


@dataclass(frozen=True)
class Widths:
    """The halo of each key head, for one row of normal queries and keys."""

    size: dict[str, Any]  #: of a ContextSize
    score_std: float
    widths: list[int]
    what: str = "widths"


@dataclass(frozen=True)
class Counted:
    """The bytes of keys, values and their gradients that one rank received in a run, and those of the formula."""

    size: dict[str, Any]
    slopes: str
    widths: list[int]
    rank: int
    forward: int
    backward: int
    formula_forward: int
    formula_backward: int
    deciding: int  #: bytes of the sums that decide the widths
    what: str = "counted"


@dataclass(frozen=True)
class HeadShares:
    """The share of the visible keys that each head attends, from the steepest to the flattest slope."""

    heads: int
    head_dim: int
    length: int
    shares: list[float]
    what: str = "shares"
