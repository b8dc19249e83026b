"""The training script of the examples, as a module."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

SCRIPT = Path(__file__).parents[2] / "examples" / "train_gpt2.py"
DIVERGED = 3  #: its exit status where the loss is no longer finite


@functools.cache
def load_script() -> ModuleType:
    specification = importlib.util.spec_from_file_location("train_gpt2", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["train_gpt2"] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module
