"""Files and folders at fsspec URLs, with the methods of pathlib.Path that sources and writers use.

Paths of local files stay `pathlib.Path`. All functions take both. fsspec is imported when the first URL is used.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ...utils import files
from ...utils.checks import check_path
from ...utils.files import PARTIAL_SUFFIX, partial_of, write_atomically
from .transfers import SizedFile, check_size, error_code, with_retries

T = TypeVar("T")

_URL = re.compile(r"(filecache::)?([a-zA-Z][a-zA-Z0-9+.-]*)://")
_LOCAL = ("file", "local")

_BLOCK = 2**17  #: bytes that are read at once from a local file

#: Stores in which a file appears under its name only when it was received as a whole. Elsewhere it is renamed.
_ATOMIC = {"abfs", "abfss", "az", "gcs", "gs", "hf", "memory", "s3", "s3a"}


@dataclass(frozen=True)
class RemotePath:
    """A file or folder at an fsspec URL, such as s3://bucket/folder/file.

    Reading and writing is tried again after errors that may pass. Reading is tried again, too, if the number of bytes
    received is not the size that the store reports. After the last attempt an OSError names the cause.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  #: for the file system of fsspec
    is_cached: bool = False  #: keep local copies of the files that are read
    _shared: Any = field(default=None, repr=False, compare=False)  #: process id and file system of all threads

    def __str__(self) -> str:
        return self.url

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_shared": None}

    @property
    def protocol(self) -> str:
        return self.url.partition("://")[0]

    @property
    def _path(self) -> str:
        return self.url.partition("://")[2]

    @property
    def name(self) -> str:
        return posixpath.basename(self._path)

    @property
    def parent(self) -> RemotePath:
        return self._at(posixpath.dirname(self._path))

    def __truediv__(self, name: str) -> RemotePath:
        return self._at(posixpath.join(self._path, name))

    def _at(self, path: str) -> RemotePath:
        return replace(self, url=f"{self.protocol}://{path}")

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def file_system(self) -> tuple[Any, str]:
        """The file system of fsspec, and the path in it."""
        from fsspec.core import url_to_fs

        if self._shared is not None and self._shared[0] == os.getpid():
            return self._shared[1], self._shared[1]._strip_protocol(self.url)
        fs, path = url_to_fs(self.url, **self.options)
        if fs.async_impl:  # serves all threads; fsspec would log in again for each
            object.__setattr__(self, "_shared", (os.getpid(), fs))
        return fs, path

    def info(self) -> dict[str, Any]:
        """Name, size and type, without the listings that fsspec keeps: other processes may write."""
        return self._call(lambda fs, path: fs.info(path), fresh=True)

    def exists(self) -> bool:
        try:
            self.info()
        except FileNotFoundError:
            return False
        return True

    def is_dir(self) -> bool:
        try:
            return bool(self.info()["type"] == "directory")
        except FileNotFoundError:
            return False

    def iterdir(self) -> Iterator[RemotePath]:
        """Files and folders in this folder. A folder of an object store that does not exist is empty."""
        try:
            here, found = self._call(lambda fs, path: (path, fs.ls(path, detail=False)), fresh=True)
        except FileNotFoundError:
            return
        names = (posixpath.relpath(path.strip("/"), here.strip("/")) for path in sorted(found))
        yield from (self / name for name in names if name != ".")

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Create the folder where the file system has folders. A bucket is not created."""
        try:
            self._call(lambda fs, path: fs.mkdir(path, create_parents=False))
        except FileExistsError:
            if not exist_ok:
                raise
        except FileNotFoundError:
            if not parents or not self.parent.parent._path:
                raise
            self.parent.mkdir(parents=True, exist_ok=True)
            self.mkdir(exist_ok=exist_ok)

    def read_bytes(self) -> bytes:
        if self.is_cached:
            return local_file(self).read_bytes()

        def read(fs: Any, path: str) -> bytes:
            size = fs.info(path).get("size")
            content: bytes = fs.cat_file(path)
            check_size(len(content), size)
            return content

        return self._call(read, fresh=True)

    def read_range(self, start: int, end: int) -> bytes:
        """The bytes from `start` to before `end`, fewer if the file ends."""
        if self.is_cached:
            return read_range(local_file(self), start, end)

        def read(fs: Any, path: str) -> bytes:
            content: bytes = fs.cat_file(path, start=start, end=end)
            if len(content) != end - start:
                size = fs.info(path).get("size")
                check_size(len(content), None if size is None else max(0, min(end, size) - start))
            return content

        return self._call(read, fresh=True)

    def open(self) -> BinaryIO:
        """The file for reading in any order. Each read is a request of just these bytes."""
        if self.is_cached:
            return open(local_file(self), "rb")

        def opened(fs: Any, path: str) -> Any:
            from fsspec.spec import AbstractBufferedFile

            file = fs.open(path, "rb", cache_type="none")
            size = file.size if isinstance(file, AbstractBufferedFile) else fs.info(path).get("size")
            return file if size is None else io.BufferedReader(SizedFile(file, size), buffer_size=1)

        return self._call(opened, fresh=True)

    def unlink(self, missing_ok: bool = False) -> None:
        try:
            self._call(lambda fs, path: fs.rm_file(path))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def write_atomically(self, content: bytes) -> None:
        if self.protocol in _ATOMIC:
            self._call(lambda fs, path: fs.pipe_file(path, content))
            return
        partial = self.with_name(partial_of(Path(self.name)).name)
        try:
            partial._call(lambda fs, path: fs.pipe_file(path, content))
            self._call(lambda fs, path: fs.mv(partial.file_system()[1], path))
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _call(self, use: Callable[[Any, str], T], fresh: bool = False) -> T:
        def called() -> T:
            fs, path = self.file_system()
            if fresh:
                fs.invalidate_cache()
            return use(fs, path)

        with self._naming_errors():
            return with_retries(called)

    @contextmanager
    def _naming_errors(self) -> Iterator[None]:
        """Errors name the URL. Many file systems name the path in the bucket, or nothing."""
        try:
            yield
        except OSError as error:
            code = error_code(error)
            problem = str(error.strerror or error) if code in (errno.EIO, errno.EACCES) else os.strerror(code)
            raise OSError(code, problem, self.url) from error  # of the subclass for the code


AnyPath = Path | RemotePath
PathLike = str | os.PathLike[str] | RemotePath


def is_path(value: object) -> bool:
    """Whether `value` is one path or URL, rather than several."""
    return isinstance(value, (str, os.PathLike, RemotePath)) or hasattr(value, "storage_options")


def check_location(name: str, value: object) -> AnyPath:
    """Return a URL of fsspec as a RemotePath, and a local path as a Path.

    "filecache::" before a URL keeps local copies of the files. An object of universal_pathlib brings its options.

    Raises:
        TypeError: `value` is not a path.
        ValueError: fsspec does not know the URL's protocol, or the URL is a chain of other file systems.
        ImportError: the package that reads the URL is missing.
    """
    if isinstance(value, RemotePath):
        return value
    options = getattr(value, "storage_options", {})
    text = str(value) if hasattr(value, "storage_options") else value
    if not isinstance(text, str) or "://" not in text:
        return check_path(name, text)
    found = _URL.match(text)
    if found is None or "::" in text[found.end() :]:
        raise ValueError(f"{name} must be a path, a URL, or filecache:: and a URL, got {text!r}")
    url, protocol = text[len(found[1] or "") :], found[2]
    if protocol in _LOCAL:
        from fsspec.implementations.local import LocalFileSystem

        return Path(LocalFileSystem._strip_protocol(url))
    _check_protocol(name, protocol, text)
    path = url.partition("://")[2].rstrip("/")
    return RemotePath(f"{protocol}://{path}", dict(options), is_cached=found[1] is not None)


def check_named_once(name: str, paths: Iterable[AnyPath], kind: str) -> None:
    """No path may stand twice among `paths`, each that of a `kind`. Paths are compared without following links."""
    seen: set[str | RemotePath] = set()
    for path in paths:
        place = replace(path, is_cached=False) if isinstance(path, RemotePath) else os.path.abspath(path)
        if place in seen:
            raise ValueError(
                f"{name} must name each {kind} once, got {path} twice: an epoch would serve its items twice; to repeat "
                "them on purpose, name a copy or a link as well"
            )
        seen.add(place)


def _check_protocol(name: str, protocol: str, text: str) -> None:
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        raise ImportError(f"{name} {text} needs another package: {error}") from error
    except ValueError as error:
        raise ValueError(f"{name} must be a path or a URL that fsspec knows, got {text!r}") from error


def open_file(path: AnyPath) -> BinaryIO:
    """The file for reading in any order. It raises an OSError if it ends before the size that it has when opened."""
    if isinstance(path, RemotePath):
        return path.open()
    file = io.FileIO(path)
    return io.BufferedReader(SizedFile(file, os.fstat(file.fileno()).st_size), _BLOCK)


def open_whole(path: AnyPath) -> BinaryIO:
    """The file for reading as a whole. That of a URL is in memory."""
    return io.BytesIO(path.read_bytes()) if isinstance(path, RemotePath) else open_file(path)


def read_whole(path: AnyPath) -> bytes:
    """The content of a file."""
    with open_whole(path) as file:
        return file.read()


def read_range(path: AnyPath, start: int, end: int) -> bytes:
    """The bytes from `start` to before `end`, fewer if the file ends."""
    if isinstance(path, RemotePath):
        return path.read_range(start, end)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(end - start)


def local_file(path: AnyPath) -> Path:
    """The path itself if it is local, else that of a local copy, for formats that are memory-mapped.

    fsspec's filecache keeps the copies in `cache_folder()`, one for each version of a file. A copy is never changed. It
    is deleted and made again if its size is not the one that the store reports. Processes of one machine download a
    file once.
    """
    if not isinstance(path, RemotePath):
        return path
    from filelock import FileLock
    from fsspec import AbstractFileSystem
    from fsspec.implementations.cached import WholeFileCacheFileSystem

    def copied(fs: Any, place: str) -> Path:
        facts = fs.info(place)
        size = facts.get("size")
        # Most stores have fsspec's own ukey, which asks for the facts again.
        version = facts if type(fs).ukey is AbstractFileSystem.ukey else fs.ukey(place)
        folder = folder_of_copy(path, (version, size))
        with FileLock(folder / "lock"):
            # A new one each time: it takes a file for complete as soon as it begins to download it.
            cache = WholeFileCacheFileSystem(
                fs=fs, cache_storage=str(folder), expiry_time=0, check_files=False, skip_instance_cache=True
            )
            with cache.open(place, "rb") as file:
                copy = Path(file.name)
            try:
                check_size(copy.stat().st_size, size)
            except OSError:
                copy.unlink()
                raise
            return copy

    return path._call(copied, fresh=True)


def folder_of_copy(path: AnyPath, version: object) -> Path:
    """A folder in `cache_folder()` for the copies of one version of a file."""
    folder = cache_folder() / hashlib.sha256(f"{path}\n{version}".encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cache_folder() -> Path:
    """Where copies of files are kept: cache_storage of filecache in fsspec's configuration, else ~/.cache."""
    from fsspec.config import conf

    configured = conf.get("filecache", {}).get("cache_storage")
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(configured) if configured else Path(home) / "seqwarm_kernels" / "files"


def file_size(path: AnyPath) -> int:
    """Size in bytes.

    Raises:
        OSError: the file cannot be reached, or the store does not report its size.
    """
    if not isinstance(path, RemotePath):
        return path.stat().st_size
    size = path.info().get("size")
    if size is None:
        raise OSError(errno.EIO, "the store does not report the size", path.url)
    return int(size)


def write_file(path: AnyPath, content: bytes) -> None:
    """Write a file. Readers see the old or the new content."""
    path.write_atomically(content) if isinstance(path, RemotePath) else write_atomically(path, content)


def visible_files(folder: PathLike, onerror: Callable[[OSError], object] | None = None) -> list[AnyPath]:
    """The files of a folder and of its subfolders, sorted.

    Hidden files and folders are left out, and so are files that a process began to write and did not finish
    (`.partial`). Links to files are followed, links to folders are not.

    Args:
        folder: path or URL of the folder.
        onerror: called with the error of each folder or file that cannot be reached, such as a link to nothing. Its
            `filename` names the path. By default the first error is raised. Not called for a URL.

    Raises:
        TypeError: `folder` is not a path, or `onerror` is not a function.
        OSError: a folder or file cannot be reached, and there is no `onerror`.
    """
    folder = check_location("folder", folder)
    if not isinstance(folder, RemotePath):
        return list(files.visible_files(folder, onerror))
    root, found = folder._call(lambda fs, path: (path, fs.find(path)), fresh=True)
    names = [posixpath.relpath(path, root) for path in found]
    hidden = re.compile(r"(^|/)\.")
    return [folder / name for name in sorted(names) if not hidden.search(name) and not name.endswith(PARTIAL_SUFFIX)]
