"""Composer's names and arguments on this package's operators.

The functions work without Composer. The algorithms `SeqLengthWarmup` and `Alibi` and the callbacks `Monitor` and
`TokenCounter` need Composer, and are imported on first access.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .functional import apply_alibi, set_batch_sequence_length

if TYPE_CHECKING:
    from .algorithms import Alibi, SeqLengthWarmup
    from .monitor import Monitor
    from .token_counter import TokenCounter

__all__ = ["Alibi", "Monitor", "SeqLengthWarmup", "TokenCounter", "apply_alibi", "set_batch_sequence_length"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from . import algorithms, monitor, token_counter
    except ImportError as error:
        raise ImportError(
            f"{name} needs Composer, which does not import: {error}. docs/guides/composer.md says how to install it"
        ) from error
    return {**vars(algorithms), **vars(monitor), **vars(token_counter)}[name]
