"""Shared by tests of sources."""

import pytest

from seqwarm_kernels.data.files.writer import write_chunks

from .made import TEXTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of chunk files with lengths."""
    path = tmp_path_factory.mktemp("chunks")
    write_chunks(TEXTS, path, 100, length_fn=len)
    return path


@pytest.fixture(scope="session")
def s3():
    """A local S3 server with the bucket "bucket"."""
    for package in ("s3fs", "moto", "flask_cors", "upath", "tenacity"):
        pytest.importorskip(package)
    from ..support.s3 import served_bucket

    with served_bucket() as server:
        yield server
