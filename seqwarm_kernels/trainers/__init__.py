"""Sequence-length warmup and a monitor of the optimizer for three trainers: `composer`, `huggingface`, `lightning`.

Each module is imported on first access, since each needs a trainer's package.
"""

import importlib
from types import ModuleType

_LAZY_MODULES = ("composer", "huggingface", "lightning")


def __getattr__(name: str) -> ModuleType:
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_MODULES})
