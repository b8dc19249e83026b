"""Classes that are derived from the class of an object that exists already."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def derived(methods: Any, kind: Any) -> Any:
    """A class with `methods` in front of those of `kind`, whose name it has. The same one for each call."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (methods, kind), names)
