"""Switches by environment variables, for parts that may fail on a GPU. Each is read when the operators are imported."""

from __future__ import annotations

import os
from typing import NamedTuple


class Switch(NamedTuple):
    choices: tuple[str, ...]  #: the default first
    purpose: str


SWITCHES = {
    "SEQWARM_BULK_COPIES": Switch(("1", "0"), "attention loads tiles by bulk copies (TMA) on GPUs that have them"),
    "SEQWARM_SPECIALIZED": Switch(("1", "0"), "attention on Hopper takes kernels of a producer and two consumers"),
}


def switch(name: str) -> str:
    """The choice of the environment, or the default, also where the variable is empty.

    Raises:
        ValueError: the variable holds something else.
    """
    choices = SWITCHES[name].choices
    choice = os.environ.get(name) or choices[0]
    if choice not in choices:
        raise ValueError(f"{name} must be {' or '.join(choices)}, got {choice!r}")
    return choice


def switches() -> dict[str, str]:
    """The choices of all switches."""
    return {name: switch(name) for name in SWITCHES}
