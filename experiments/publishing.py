"""Records files of the experiments: written, drawn, and never replaced by fewer results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common.records import read
from seqwarm_kernels.utils.files import write_atomically


def write(path: Path, environment: Mapping[str, Any], results: Iterable[Mapping[str, Any]]) -> None:
    """Write a line with the environment, then a line for each result. NaN and infinity become null."""
    lines = (json.dumps(without_nan(line), allow_nan=False) + "\n" for line in (environment, *results))
    write_atomically(path, "".join(lines).encode())


def refusal(published: Path, results: Iterable[Mapping[str, Any]], key: Sequence[str]) -> str | None:
    """The reason not to replace published results: some of them are missing in `results`. None if all are there.

    Args:
        published: The records file.
        results: The new results.
        key: Names of the values that tell results apart. Not every result has each of them.
    """
    if not published.exists():
        return None

    def keys(found: Iterable[Mapping[str, Any]]) -> set[str]:
        return {json.dumps([result.get(name) for name in key], sort_keys=True) for result in found}

    missing = keys(read(published)[1]) - keys(results)
    if not missing:
        return None
    return f"not published: {published} holds {len(missing)} results that are missing here, such as {min(missing)}"


def draw(draw_all: Callable[..., object], *arguments: object) -> None:
    """Draw figures. Without matplotlib, say so."""
    try:
        draw_all(*arguments)
    except ImportError as error:
        print(f"no figures: {error}")


def without_nan(value: Any) -> Any:
    """The value, whatever it holds, with None in place of each NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: without_nan(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
