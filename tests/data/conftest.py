"""Shared by tests of sources."""

import uuid

import pytest

from seqwarm_kernels.data.files import transfers
from seqwarm_kernels.data.files.remote import check_location
from seqwarm_kernels.data.files.writer import write_chunks

from .made import TEXTS


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Each test has a cache of its own, for copies of files. A read that fails is tried once more, and at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(transfers, "_WAITS", (0.0,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of chunk files with lengths."""
    path = tmp_path_factory.mktemp("chunks")
    write_chunks(TEXTS, path, 100, length_fn=len)
    return path


@pytest.fixture(params=["local", "memory"])
def place(request, tmp_path):
    """The path or URL of a folder that is not there yet."""
    if request.param == "local":
        return check_location("folder", tmp_path / "folder")
    if request.param == "s3":
        request.getfixturevalue("s3")
    pytest.importorskip("upath")
    return check_location("folder", f"{request.param}://bucket/{uuid.uuid4().hex}")


@pytest.fixture(scope="session")
def s3():
    """A local S3 server with the bucket "bucket"."""
    for package in ("s3fs", "moto", "flask_cors", "upath", "tenacity"):
        pytest.importorskip(package)
    from ..support.s3 import served_bucket

    with served_bucket() as server:
        yield server
