"""The text that everybody has."""

from __future__ import annotations

from pathlib import Path

from seqwarm_kernels.demo.text import standard_library


def standard_library_folder(out: Path) -> Path:
    """Python's own modules, as the demo takes them, copied into a folder below `out`: a file is a document."""
    folder = out / "standard_library"
    for file in standard_library():
        path = folder / file.name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
    return folder
