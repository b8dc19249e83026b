"""Switches by environment variables, for parts that may fail on a GPU. Each is read when the operators are imported."""

from __future__ import annotations

import os

#: What each turns on by "1", the default, and off by "0".
SWITCHES = {
    "SEQWARM_BULK_COPIES": "attention loads tiles by bulk copies (TMA) on GPUs that have them",
    "SEQWARM_SPECIALIZED": "attention on Hopper takes kernels of a producer and two consumers",
}


def switch(name: str) -> str:
    """The choice of the environment, or the default, also where the variable is empty."""
    choice = os.environ.get(name) or "1"
    if choice not in ("1", "0"):
        raise ValueError(f"{name} must be 1 or 0, got {choice!r}")
    return choice
