"""Places in a kernel's source where its protocol can be changed, and names for what they use."""

import linecache
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

#: A global variable of emulated functions, which tells their frames from the emulator's.
EMULATED = "__emulated_on_cpu_threads__"


@dataclass(frozen=True)
class Site:
    """A call of a barrier's operation, a fence, or a wait for products or copies."""

    operation: str
    path: str  # functions and lines that lead to it
    places: tuple[int, ...]  # of their instructions, as several calls may share a line


@dataclass(frozen=True)
class Mutation:
    """One change at a site, of all its calls."""

    site: Site
    change: str
    barriers: frozenset[str]  # names of those that the site uses

    def __str__(self) -> str:
        used = f" of {', '.join(sorted(self.barriers))}" if self.barriers else ""
        return f"{self.site.operation}{used}, {self.change}: {self.site.path}"


class Name:
    """Of the barriers of one allocation."""

    def __init__(self) -> None:
        path = list(kernel_frames())
        self.text = _text(path[0]).partition("=")[0].strip()
        if not self.text.isidentifier():
            self.text = where(path)
        self.final = len(path) == 1

    def find(self, barriers: Any) -> None:
        """Where a function allocated barriers for its caller: look in named tuples that a partition holds."""
        if not self.final:
            self.final = True
            for variable, value in list(kernel_frames())[-1].f_locals.items():
                for path, item in _items(variable, value):
                    if item is barriers:
                        self.text = path


def _items(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    yield path, value
    for name in getattr(value, "_fields", ()):
        yield from _items(f"{path}.{name}", getattr(value, name))


@dataclass
class Use:
    """What the calls at a site did."""

    names: set[Name] = field(default_factory=set)
    matters: bool = False  # a wait that brought news or ended a flight, a fence after a write
    count: int = 0  # of an init


def mutations_of(uses: dict[Site, Use]) -> list[Mutation]:
    """Changes that matter: not of waits for what is known anyway, nor of barriers that nobody uses."""
    used = {name for site, use in uses.items() if site.operation != "init" for name in use.names}
    return [
        Mutation(site, change, frozenset(name.text for name in use.names))
        for site, use in uses.items()
        for change in _changes(site.operation, use, used)
    ]


def _changes(operation: str, use: Use, used: set[Name]) -> Iterable[str]:
    if operation == "init" and use.names & used:
        yield "one more"
        if use.count > 1:
            yield "one less"
    if operation == "wait":
        yield "another phase"
    if operation == "arrive" or (operation in ("wait", "fence_async_shared") and use.matters):
        yield "left out"
    if operation == "arrive":
        yield "doubled"
    if operation == "expect":
        yield "half the bytes"
    if operation in ("warpgroup_mma_wait", "store_wait") and use.matters:
        yield "one more"


def kernel_frames() -> Iterator[FrameType]:
    """The kernel's function that called the emulator, and those that called it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and EMULATED not in frame.f_globals:
        frame = frame.f_back
    assert frame is not None, "not called from a kernel"
    while frame is not None and EMULATED in frame.f_globals:
        yield frame
        frame = frame.f_back


def where(frames: Iterable[FrameType]) -> str:
    return ", in ".join(f"{frame.f_code.co_name}, line {frame.f_lineno}: {_text(frame)}" for frame in frames)


def _text(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
