"""Places in a kernel's source, for messages."""

import linecache
import sys
from collections.abc import Iterator
from types import FrameType

#: A global variable of emulated functions, which tells their frames from the emulator's.
EMULATED = "__emulated_on_cpu_threads__"


def here() -> str:
    """The lines that called the emulator, and those that called them."""
    return ", in ".join(
        f"{frame.f_code.co_name}, line {frame.f_lineno}: "
        f"{linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()}"
        for frame in _kernel_frames()
    )


def _kernel_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and EMULATED not in frame.f_globals:
        frame = frame.f_back
    assert frame is not None, "not called from a kernel"
    while frame is not None and EMULATED in frame.f_globals:
        yield frame
        frame = frame.f_back
