"""Columns of tables: one, whose values are the items, or several, of which each item is a dict."""

from __future__ import annotations

from collections.abc import Iterable

from ...resizing.entry_names import is_label, is_loss_mask

Columns = str | tuple[str, ...]


def as_columns(column: str | Iterable[str]) -> Columns:
    """One name, or a tuple of at least one."""
    columns = column if isinstance(column, str) else tuple(column)
    if not columns:
        raise ValueError(f"column must be a name or a list of names, got {column!r}")
    return columns


def names_of(column: Columns) -> tuple[str, ...]:
    return (column,) if isinstance(column, str) else column


def check_no_labels(column: str, beside: Iterable[str]) -> None:
    """Without the labels beside a column of tokens, all of its tokens would be trained on."""
    for name in beside:
        if name != column and (is_label(name) or is_loss_mask(name)):
            raise ValueError(f"column must name {name!r} beside {column!r}, or be [{column!r}]")
