"""Values for JSON, which has neither NaN nor infinity."""

from __future__ import annotations

import math
from typing import Any


def without_nan(value: Any) -> Any:
    """The value with None in place of each NaN and infinity, in dicts, lists and tuples too."""
    if isinstance(value, dict):
        return {name: without_nan(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
