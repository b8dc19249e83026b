"""Transfers between this machine and a store: attempts after errors that may pass, and reading ahead."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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
