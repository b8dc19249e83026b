"""Files and folders at URLs, with the methods of pathlib.Path that sources and writers use.

Paths of local files stay `pathlib.Path`. All functions take both. universal_pathlib is imported for the first URL.
"""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from ...utils import files
from ...utils.checks import check_path, needs
from ...utils.files import PARTIAL_SUFFIX, partial_of, write_atomically
from ...utils.urls import without_secrets
from .transfers import check_size, with_retries

T = TypeVar("T")

_CACHED = "filecache::"

#: Stores without folders, in which a file appears under its name only when it was received as a whole.
_OBJECT_STORES = {"abfs", "abfss", "az", "gcs", "gs", "hf", "memory", "s3", "s3a"}

#: What HTTP tells of the version of a file, in the names of fsspec.
_VERSIONS = {"ETag", "Content-MD5", "Digest", "Last-Modified"}


@dataclass(frozen=True, repr=False)
class RemotePath:
    """A file or folder at a URL, such as s3://bucket/folder/file: a path of universal_pathlib.

    Its own methods of reading and writing are not used. They take any error for a missing file, believe listings that
    fsspec keeps, create buckets, fail in forked processes, do not compare sizes, and their errors show credentials.

    Reading and writing is tried again after errors that may pass. Reading is tried again, too, if the number of bytes
    received is not the size that the store reports. After the last attempt an OSError names the cause.
    """

    upath: Any  #: a UPath
    is_cached: bool = False  #: keep local copies of the files that are read

    def __str__(self) -> str:
        """The URL, with *** for credentials."""
        path, host = self.upath.path, self.upath.storage_options.get("host")
        if "://" not in path:  # that of HTTP has all
            path = f"{self.upath.protocol}://{f'{host}/' if host else ''}{path.lstrip('/')}"
        return without_secrets(path)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    @property
    def name(self) -> str:
        name: str = self.upath.name
        return name.partition("?")[0] if self.upath.protocol in ("http", "https") else name

    @property
    def parent(self) -> RemotePath:
        return replace(self, upath=self.upath.parent)

    def __truediv__(self, name: str) -> RemotePath:
        return replace(self, upath=self.upath / name)

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def exists(self) -> bool:
        return self._type() is not None

    def is_dir(self) -> bool:
        return self._type() == "directory"

    def _type(self) -> str | None:
        try:
            return str(self.call(lambda fs, path: fs.info(path)["type"]))
        except FileNotFoundError:
            return None

    def mkdir(self, *, parents: bool, exist_ok: bool) -> None:
        """Create the folder, always with its parents, where the store has folders. A bucket is not created."""
        if self.upath.protocol not in _OBJECT_STORES:
            self.call(lambda fs, path: fs.makedirs(path, exist_ok=exist_ok))

    def read_bytes(self, start: int = 0, end: int | None = None) -> bytes:
        """The bytes from `start` to before `end`, fewer if the file ends. None: to the end of the file."""
        if self.is_cached:
            return read_range(local_file(self), start, end)

        def read(fs: Any, path: str) -> bytes:
            content: bytes = fs.cat_file(path, start=start or None, end=end)
            if end is None or len(content) != end - start:
                size = fs.info(path).get("size")
                check_size(len(content), None if size is None else len(range(size)[start:end]))
            return content

        return self.call(read)

    def call(self, use: Callable[[Any, str], T]) -> T:
        """Call `use` with the file system of fsspec and the path in it, again after errors that may pass."""
        from fsspec import filesystem

        def called() -> T:
            fs = filesystem(self.upath.protocol, **self.upath.storage_options)  # fsspec keeps one for a process
            fs.invalidate_cache()  # the listings that fsspec keeps: other processes may write
            return use(fs, self.upath.path)

        return with_retries(called, self)


AnyPath = Path | RemotePath
PathLike = str | os.PathLike[str] | RemotePath


def is_path(value: object) -> bool:
    """Whether `value` is one path or URL, rather than several."""
    return isinstance(value, (str, os.PathLike, RemotePath)) or hasattr(value, "storage_options")


def check_location(name: str, value: object) -> AnyPath:
    """Return a URL, or a path of universal_pathlib, as a RemotePath, and a local path as a Path.

    "filecache::" before a URL keeps local copies of the files.
    """
    if isinstance(value, RemotePath):
        return value
    if not hasattr(value, "storage_options") and not (isinstance(value, str) and "://" in value):
        return check_path(name, value)
    with needs("URLs need universal_pathlib and tenacity", "seqwarm_kernels[remote]"):
        import tenacity  # noqa: F401
        from upath import UPath
    is_cached = isinstance(value, str) and value.startswith(_CACHED)
    location: Any = value.removeprefix(_CACHED).rstrip("/") if isinstance(value, str) else value
    location = f"{location}//" if str(location).endswith(":") else location  # the root of a store
    try:
        upath = UPath(location)
    except ValueError as error:
        raise ValueError(f"{name} must be a path or a URL that fsspec knows: {without_secrets(str(error))}") from None
    return Path(upath.path) if upath.protocol in ("", "file", "local") else RemotePath(upath, is_cached)


def check_named_once(name: str, paths: Iterable[AnyPath], kind: str) -> None:
    """No path may stand twice among `paths`, each that of a `kind`: an epoch would yield its items twice.

    Paths are compared without following links.
    """
    seen: set[Any] = set()
    for path in paths:
        file = path.upath if isinstance(path, RemotePath) else os.path.abspath(path)
        if file in seen:
            raise ValueError(f"{name} must name each {kind} once, got {path} twice")
        seen.add(file)


def open_file(path: AnyPath) -> BinaryIO:
    """The file for reading in any order. Each read of one at a URL is a request of just these bytes."""
    if not isinstance(path, RemotePath) or path.is_cached:
        return open(local_file(path), "rb")
    from fsspec.spec import AbstractBufferedFile

    read = path.read_bytes

    class Ranges(AbstractBufferedFile):
        def _fetch_range(self, start: int, end: int) -> bytes:
            return read(start, min(end, self.size))

    return cast(BinaryIO, Ranges(None, str(path), cache_type="none", size=file_size(path)))


def read_range(path: AnyPath, start: int, end: int | None) -> bytes:
    """The bytes from `start` to before `end`, fewer if the file ends. None: to the end of the file."""
    if isinstance(path, RemotePath):
        return path.read_bytes(start, end)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(-1 if end is None else end - start)


def local_file(path: AnyPath) -> Path:
    """The path itself if it is local, else that of a local copy. Processes of one machine download a file once.

    There is a copy for each version of a file, so one that is being read does not change. fsspec's filecache writes
    over it, keeps what a store cut short, never asks for a file of HTTP again, and writes URLs down with their
    credentials.
    """
    if not isinstance(path, RemotePath):
        return path
    from filelock import FileLock

    folder = folder_of_copy(path)  # that of all versions

    def copied(fs: Any, file: str) -> Path:
        facts = fs.info(file)
        size = facts.get("size")
        left_out = {"name", "url", *(["time"] if "mtime" in facts else [])}  # over SFTP and SMB, time is that of access
        version = sorted((name, str(fact)) for name, fact in facts.items() if name not in left_out)
        if not _VERSIONS & facts.keys():  # then the query of a URL may be all that tells two files apart
            version.append(("url", file))
        copy = folder / _digest(version)
        if not copy.exists() or size not in (None, copy.stat().st_size):
            partial = copy.with_suffix(PARTIAL_SUFFIX)
            fs.get_file(file, str(partial))
            check_size(partial.stat().st_size, size)
            os.replace(partial, copy)
        return copy

    with FileLock(folder / "lock"):
        return path.call(copied)


def folder_of_copy(*facts: object) -> Path:
    """A folder in `cache_folder()` for the copies of the file that `facts` tell from others."""
    folder = cache_folder() / _digest(facts)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _digest(facts: object) -> str:
    return hashlib.sha256(str(facts).encode()).hexdigest()[:32]


def cache_folder() -> Path:
    """Where copies of files are kept: cache_storage of filecache in fsspec's configuration, else ~/.cache."""
    from fsspec.config import conf

    configured = conf.get("filecache", {}).get("cache_storage")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(configured) if configured else Path(home) / "seqwarm_kernels" / "files"


def file_size(path: AnyPath) -> int:
    """Size in bytes. Raises an OSError if the store does not report it."""
    if not isinstance(path, RemotePath):
        return path.stat().st_size
    size = path.call(lambda fs, file: fs.info(file).get("size"))
    if size is None:
        raise OSError(errno.EIO, "the store does not report the size", str(path))
    return int(size)


def write_file(path: AnyPath, content: bytes) -> None:
    """Write a file. Readers see the old or the new content."""
    if not isinstance(path, RemotePath):
        write_atomically(path, content)
    elif path.upath.protocol in _OBJECT_STORES:
        path.call(lambda fs, file: fs.pipe_file(file, content))
    else:
        partial = path.with_name(partial_of(Path(path.name)).name)
        partial.call(lambda fs, file: fs.pipe_file(file, content))
        path.call(lambda fs, file: fs.mv(partial.upath.path, file))


def visible_files(folder: PathLike, onerror: Callable[[OSError], object] | None = None) -> list[AnyPath]:
    """The files of a folder and of its subfolders, sorted.

    Hidden files and folders are left out, and so are files that a process began to write and did not finish
    (`.partial`). Links to files are followed, links to folders are not.

    Args:
        folder: path or URL of the folder.
        onerror: called with the error of each folder or file that cannot be reached, such as a link to nothing. Its
            `filename` names the path. By default the first error is raised. Not called for a URL.

    Raises:
        TypeError: `folder` is not a path.
        OSError: a folder or file cannot be reached, and there is no `onerror`.
    """
    folder = check_location("folder", folder)
    if not isinstance(folder, RemotePath):
        return list(files.visible_files(folder, onerror))
    root, found = folder.call(lambda fs, path: (path, fs.find(path)))
    names = [posixpath.relpath(path, root) for path in found]
    hidden = re.compile(r"(^|/)\.")
    return [folder / name for name in sorted(names) if not hidden.search(name) and not name.endswith(PARTIAL_SUFFIX)]
