"""Sequence-length warmup and ALiBi attention for PyTorch.

`SequenceLengthScheduler` gives the current length, `resize_batch` makes a batch that long, `alibi_attention` attends,
and `warmup_allocator` claims the memory of the longest batch before training starts.

All names load on first access, so that `seqwarm --help` does not wait for torch. `import seqwarm_kernels.ops` registers
the operators `torch.ops.seqwarm`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import *  # noqa: F403

__version__ = "0.2.0"

_FOLDERS = (
    *("allocator", "attention", "cli", "data", "demo", "diagnostics", "models"),
    *("ops", "parallel", "resizing", "schedule", "self_check", "trainers", "tuning", "utils"),
)


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        return importlib.import_module(f".{name}", __name__)
    if name.startswith("__") and name != "__all__":  # asked for by tools such as inspect
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _load_public_names()
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    _load_public_names()
    return sorted([*globals(), *_FOLDERS])


def _load_public_names() -> None:
    api = importlib.import_module(".api", __name__)
    globals().update({name: getattr(api, name) for name in api.__all__}, __all__=api.__all__)
