"""Text without a download, split into training and validation, and windows of it."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..utils.files import visible_files

#: {"input_ids": (B, S) int64, "labels": (B, S) int64}: the label of a token is the next byte.
Batch = dict[str, Tensor]

VALIDATION_SHARE = 0.1

#: Between two files.
_SEPARATOR = b"\0"

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
        return f"{self.source}: {len(self.training):,} bytes for training, {len(self.validation):,} for validation"

    def fingerprint(self) -> str:
        """A hash of the text: a run goes on with the same text only."""
        digest = hashlib.sha256(self.training.numpy().tobytes())
        digest.update(_SEPARATOR + self.validation.numpy().tobytes())
        return digest.hexdigest()


def read_corpus(paths: Sequence[str] | None, seq_length: int) -> Corpus:
    """Reads the text of files and folders, or of Python's standard library.

    Raises:
        FileNotFoundError: a path does not exist.
        ValueError: a file is not UTF-8, or a part has too little text for one sequence.
    """
    source = ", ".join(paths) if paths else "the source of Python's standard library"
    training, validation = split(list(_user_files(paths)) if paths else standard_library())
    for part, content in (("training", training), ("validation", validation)):
        if len(content) <= seq_length:
            raise ValueError(
                f"text must have more than {seq_length} bytes for {part}, got {len(content)} from {source}"
            )
    parts = [torch.frombuffer(bytearray(content), dtype=torch.uint8) for content in (training, validation)]
    return Corpus(parts[0], parts[1], source)


def standard_library() -> list[TextFile]:
    """Reads the modules of this machine's Python, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    names = (path.relative_to(root) for path in sorted(root.rglob("*.py")))
    return [
        TextFile(name.as_posix(), (root / name).read_bytes())
        for name in names
        if _EXCLUDED_FOLDERS.isdisjoint(name.parts)
    ]


def split(files: list[TextFile]) -> tuple[bytes, bytes]:
    """Splits text into training and validation: whole files by the hashes of their names, a single file by position.

    Files of equal content are used once, so that both parts have different content.
    """
    files = list({file.content: file for file in files}.values())
    if len(files) <= 1:
        content = b"".join(file.content for file in files)
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
    rest = _SEPARATOR.join(file.content for file in shuffled if file not in chosen)
    return rest, _SEPARATOR.join(file.content for file in chosen)


def _user_files(paths: Sequence[str]) -> Iterator[TextFile]:
    for root in map(Path, paths):
        for path in visible_files(root) if root.is_dir() else [root]:
            content = path.read_bytes()
            try:
                content.decode()
            except UnicodeDecodeError:
                raise ValueError(f"text must be UTF-8, got {path}") from None
            yield TextFile(path.relative_to(root if root.is_dir() else root.parent).as_posix(), content)


def training_batch(text: Tensor, seed: int, step: int, batch_size: int, seq_length: int) -> Batch:
    """Returns windows at random positions, which depend only on (seed, step): a resumed run gets the same windows."""
    digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    starts = torch.randint(len(text) - seq_length, (batch_size,), generator=generator)
    return _windows(text, starts, seq_length)


def validation_set(text: Tensor, count: int, seq_length: int) -> Batch:
    """Returns evenly spaced windows: `count` of them, or fewer if they would overlap."""
    available = (len(text) - 1) // seq_length
    last_start = len(text) - 1 - seq_length
    starts = torch.linspace(0, last_start, min(count, available), dtype=torch.float64).long()
    return _windows(text, starts, seq_length)


def _windows(text: Tensor, starts: Tensor, seq_length: int) -> Batch:
    tokens = text[starts[:, None] + torch.arange(seq_length + 1)].long()
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
