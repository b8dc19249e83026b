"""Transfers between this machine and a store: attempts after errors that may pass, sizes, and reading ahead."""

from __future__ import annotations

import errno
import io
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

S = TypeVar("S")
T = TypeVar("T")

#: Seconds before each new attempt of a failed read or write. Clients of object stores have made their own by then.
_WAITS = (1.0, 4.0)

_CODES = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    PermissionError: errno.EACCES,
}

#: Errors that another attempt does not change.
_PERMANENT: tuple[type[Exception], ...] = (*_CODES, ImportError, NotImplementedError, TypeError, ValueError)

#: Threads of `read_ahead`.
_MAX_READERS = 8


def error_code(error: OSError) -> int:
    """The code of `errno` for the type of an error. Many file systems leave it out."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), errno.EIO)


def with_retries(call: Callable[[], T]) -> T:
    """Call again after an error that may pass, such as a connection that was cut.

    Raises:
        OSError: the last attempt failed. Errors that another attempt does not change are raised at once.
    """
    for wait in _WAITS:
        try:
            return call()
        except _PERMANENT:
            raise
        except Exception:  # each file system raises its own
            time.sleep(wait)
    try:
        return call()
    except _PERMANENT:
        raise
    except Exception as error:
        problem = f"{len(_WAITS) + 1} attempts failed, the last with {type(error).__name__}: {error}"
        raise OSError(errno.EIO, problem) from error


def check_size(received: int, expected: int | None) -> None:
    """Compare the bytes received with the size that the store reports. None: it reports none.

    Raises:
        OSError: They differ. Another attempt may receive all.
    """
    if expected is not None and received != expected:
        raise OSError(f"{received:,} bytes received, expected {expected:,}")


class SizedFile(io.RawIOBase):
    """A file for reading in any order that raises an OSError if it ends before its size.

    Args:
        file: the opened file.
        size: in bytes.
    """

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._size = file, size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            return int(self._file.seek(self._size + offset))
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def readinto(self, buffer: Any) -> int:
        count = int(self._file.readinto(buffer))
        if not count and len(buffer):
            self._check_end()
        return count

    def readall(self) -> bytes:
        content = b"".join(iter(self._file.read, b""))
        self._check_end()
        return content

    def _check_end(self) -> None:
        if self._size:  # a pipe has none, and no position
            check_size(min(self.tell(), self._size), self._size)

    def close(self) -> None:
        self._file.close()
        super().close()


def read_ahead(read: Callable[[S], T], arguments: Iterable[S], count: int) -> Iterator[T]:
    """Like map(read, arguments). Threads read up to `count` results before they are requested.

    Closing the iterator drops what was not begun. An error is raised in place of its result.
    """
    pending: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(min(count, _MAX_READERS), thread_name_prefix="read_ahead")
    try:
        for argument in arguments:
            pending.append(pool.submit(read, argument))
            if len(pending) > count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
