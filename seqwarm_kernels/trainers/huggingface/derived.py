"""Classes that are derived from the class of an object that exists already."""

from __future__ import annotations

import functools
from typing import Any


def give_methods(target: Any, methods: type) -> None:
    """Puts methods in front of those of an object's own class. Does nothing if they are there."""
    if not isinstance(target, methods):
        target.__class__ = _derived(methods, target.__class__)


@functools.cache
def _derived(methods: type, kind: type) -> type:
    """A class with the name of `kind`, once for each of them."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (methods, kind), names)
