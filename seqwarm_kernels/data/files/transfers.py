"""Transfers between this machine and a store: attempts after errors that may pass, sizes, and reading ahead."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ...utils.urls import without_secrets

S = TypeVar("S")
T = TypeVar("T")

#: Seconds before each new attempt of a failed read or write. Clients of object stores have made their own by then.
_WAITS = (1.0, 4.0)

#: The codes of errors that another attempt does not change. Many file systems leave the code out.
_CODES = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    PermissionError: errno.EACCES,
}
_REFUSALS = (ImportError, NotImplementedError, TypeError, ValueError)

_READERS = 8  #: threads of `read_ahead`


def with_retries(call: Callable[[], T], path: object) -> T:
    """Call again after an error that may pass, such as a connection that was cut.

    The error becomes an OSError that names `path`. It is shown without those that led to it, since they may hold
    credentials.
    """
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_chain, wait_fixed

    attempts = Retrying(
        stop=stop_after_attempt(len(_WAITS) + 1),
        wait=wait_chain(*map(wait_fixed, _WAITS)),
        retry=retry_if_exception(_may_pass),
        reraise=True,
    )
    try:
        return attempts(call)
    except ImportError:
        raise
    except Exception as error:  # each file system raises its own
        failure = _as_os_error(error, path)
    raise failure from None


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, Exception) and not isinstance(error, (*_CODES, *_REFUSALS))


def _as_os_error(error: Exception, path: object) -> OSError:
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), errno.EIO)
    problem = os.strerror(code)
    if code in (errno.EIO, errno.EACCES):  # a store says which permission is missing
        attempts = f"{len(_WAITS) + 1} attempts failed, the last with " if _may_pass(error) else ""
        problem = f"{attempts}{type(error).__name__}: {without_secrets(str(error))}"
    return OSError(code, problem, str(path))  # of the subclass for the code


def check_size(received: int, expected: int | None) -> None:
    """The bytes received must be as many as the store reports, where it does. Another attempt may receive all."""
    if expected is not None and received != expected:
        raise OSError(f"{received:,} bytes received, expected {expected:,}")


def read_ahead(read: Callable[[S], T], arguments: Iterable[S], count: int = 2 * _READERS) -> Iterator[T]:
    """Like map(read, arguments). Threads read up to `count` results before they are requested.

    Closing the iterator drops what was not begun. An error is raised in place of its result.
    """
    pending: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(min(count, _READERS), thread_name_prefix="read_ahead")
    try:
        for argument in arguments:
            pending.append(pool.submit(read, argument))
            if len(pending) > count:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
