"""Loads the compiled kernels, which registers them with the dispatcher.

They are for CPUs. `_kernels.so` has them on PyTorch's stable ABI and works with every torch from 2.11 on. A module that
is named after one torch has the same kernels, and shorter ways to call them and those of GPUs. One of the two is
loaded.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

_PACKAGE = Path(__file__).parents[1]
_LIBRARY = _PACKAGE / "_kernels.so"
_MODULE = "_C_torch_"

#: As in csrc/stable.cpp. Raise both with every change of a schema: the stable ABI does not compare types.
INTERFACE = "1"

#: What Python calls in the module.
_EXPECTED = (
    "alibi_attention",
    "alibi_attention_in_python",
    "alibi_attention_varlen",
    "alibi_attention_varlen_in_python",
    "allocate",
    "call_key",
    "check_packing",
)


class Kernels(NamedTuple):
    module: ModuleType | None  #: the module for this torch
    module_problem: str | None  #: why it is not loaded
    library: ctypes.CDLL | None  #: `_kernels.so`, loaded where the module is not
    problem: str | None  #: why neither is loaded

    def build_info(self) -> dict[str, Any] | None:
        """The torch and the compiler that the kernels were built with."""
        if self.module is not None:
            return self.module.build_info()
        if self.library is None:
            return None
        return {"torch": self._text("torch"), "compiler": self._text("compiler")}

    def bfloat16_instructions(self) -> str | None:
        """The CPU's instructions that multiply bfloat16, or None where those of float32 do."""
        return self.module.bfloat16_instructions() if self.module is not None else self._text("bfloat16_instructions")

    def _text(self, name: str) -> str | None:
        if self.library is None:
            return None
        function = self.library[f"seqwarm_{name}"]
        function.restype = ctypes.c_char_p
        text = function()
        return None if text is None else text.decode()


def load() -> Kernels:
    """Load the module for this torch, or else the library.

    Raises:
        ImportError: The module was built from older sources.
    """
    name = module_name(torch.__version__)
    # An editable installation would find the module of another copy of the package.
    is_built = any((_PACKAGE / f"{name}{suffix}").exists() for suffix in EXTENSION_SUFFIXES)
    module, module_problem = _import_module(name) if is_built else (None, _not_built(name))
    if module is not None:
        return Kernels(module, None, None, None)
    if not _LIBRARY.exists():
        problem = (
            f"{module_problem if is_built else 'the kernels are not built'}; `pip install cmake ninja pybind11`, then "
            "`pip install --no-build-isolation .` builds them where a C++ compiler is installed"
        )
        return Kernels(None, module_problem, None, problem)
    rebuild = "`pip install --no-build-isolation .` rebuilds them"
    try:
        library = ctypes.CDLL(str(_LIBRARY))
    except OSError as error:
        return Kernels(None, module_problem, None, f"the kernels do not load; {rebuild}: {error}")
    kernels = Kernels(None, module_problem, library, None)
    if not hasattr(library, "seqwarm_interface") or kernels._text("interface") != INTERFACE:
        return Kernels(None, module_problem, None, f"the kernels are older than the Python sources; {rebuild}")
    return kernels


def _not_built(name: str) -> str:
    others = ", ".join(sorted(path.name for path in _PACKAGE.glob(f"{_MODULE}*")))
    return f"{name} is not built" + (f", there is {others}" if others else "")


def _import_module(name: str) -> tuple[ModuleType | None, str | None]:
    try:
        module = importlib.import_module(f"seqwarm_kernels.{name}")
    except ImportError as error:
        return None, f"{name} does not load: {error}"
    missing = [function for function in _EXPECTED if not hasattr(module, function)]
    if missing:
        raise ImportError(
            f"the module {module.__file__} lacks {', '.join(missing)}: it is older than the Python sources, rebuild it"
        )
    return module, None


def module_name(torch_version: str) -> str:
    """The name of the module for a torch, as setup.py gives it."""
    return _MODULE + re.sub(r"\W", "_", torch_version)
