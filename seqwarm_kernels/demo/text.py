"""Reads text without a download, checks it, and splits it into training and validation."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..utils.files import visible_files

VALIDATION_SHARE = 0.1

#: Separates two files. Text does not contain this byte.
SEPARATOR = b"\0"

#: Folders of the standard library that are not its own source, or contain broken files on purpose.
_EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


@dataclass(frozen=True)
class TextFile:
    name: str  #: relative to the folder that the user named, so that the split does not depend on its path
    content: bytes


@dataclass(frozen=True)
class Corpus:
    """The training text and the validation text as bytes, (N,) uint8."""

    training: Tensor
    validation: Tensor
    source: str

    def describe(self) -> str:
        return (
            f"Text: {self.source}, {len(self.training):,} bytes for training, {len(self.validation):,} for validation."
        )

    def fingerprint(self) -> str:
        """Returns a hash of the text. A run must be resumed with the same text."""
        digest = hashlib.sha256()
        for part in (self.training, self.validation):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part.numpy().tobytes())
        return digest.hexdigest()


def read_corpus(paths: tuple[str, ...], seq_length: int) -> Corpus:
    """Reads the text of files and folders, or of Python's standard library if `paths` is empty.

    Raises:
        ValueError: a path does not exist, all files are empty, a file is not UTF-8, or a part has too little text for
            one sequence.
    """
    if paths:
        files, source = list(_user_files(paths)), ", ".join(paths)
    else:
        files, source = standard_library(), "the source of Python's standard library"
    files = [file for file in files if file.content.strip()]
    if not files:
        raise ValueError(f"there is no text in {source}")
    training, validation = split(files)
    for part, content in (("training", training), ("validation", validation)):
        if len(content) <= seq_length:
            raise ValueError(
                f"too little text in {source}: {len(content)} bytes for {part}, and a sequence length of "
                f"{seq_length} needs at least {seq_length + 1}"
            )
    return Corpus(_as_tensor(training), _as_tensor(validation), source)


def standard_library() -> list[TextFile]:
    """Reads the modules of this machine's Python, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    names = (path.relative_to(root) for path in sorted(root.rglob("*.py")))
    files = [
        TextFile(name.as_posix(), (root / name).read_bytes())
        for name in names
        if _EXCLUDED_FOLDERS.isdisjoint(name.parts)
    ]
    return [file for file in files if _invalid_offset(file.content) is None]


def split(files: list[TextFile]) -> tuple[bytes, bytes]:
    """Splits text into training and validation: whole files by the hashes of their names, a single file by position.

    Files of equal content are used once, so that both parts have different content.
    """
    files = list({file.content: file for file in files}.values())
    if len(files) == 1:
        content = files[0].content
        cut = len(content) - int(len(content) * VALIDATION_SHARE)
        return content[:cut], content[cut:]
    shuffled = sorted(files, key=lambda file: hashlib.sha256(file.name.encode()).digest())
    budget = int(sum(len(file.content) for file in files) * VALIDATION_SHARE)
    chosen = []
    for file in shuffled:
        if len(file.content) <= budget:
            chosen.append(file)
            budget -= len(file.content)
    chosen = chosen or [min(shuffled, key=lambda file: len(file.content))]
    rest = [file for file in shuffled if file not in chosen]
    return _joined(rest), _joined(chosen)


def _user_files(paths: tuple[str, ...]) -> Iterator[TextFile]:
    seen = set()
    for root in map(Path, paths):
        if not root.exists():
            raise ValueError(f"no such file or folder: {root}")
        for path in visible_files(root) if root.is_dir() else [root]:
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            content = path.read_bytes()
            offset = _invalid_offset(content)
            if offset is not None:
                raise ValueError(f"{path} is not UTF-8 text: invalid at byte {offset}")
            yield TextFile(path.relative_to(root if root.is_dir() else root.parent).as_posix(), content)


def _invalid_offset(content: bytes) -> int | None:
    """Returns the offset of the first byte that is not UTF-8 text, or None. A NUL byte is valid UTF-8, but not text."""
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return error.start
    offset = content.find(SEPARATOR)
    return None if offset < 0 else offset


def _joined(files: list[TextFile]) -> bytes:
    return SEPARATOR.join(file.content for file in files)


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
