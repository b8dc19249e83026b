"""Whether the module or the library is loaded, and what is said of the other."""

import hashlib
import subprocess

import pytest
import torch

from seqwarm_kernels.ops import backends, kernels
from seqwarm_kernels.ops.library import overload
from tests.support.backends import needs_native

NAME = kernels.module_name(torch.__version__)


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A folder in the place of the package's."""
    monkeypatch.setattr(kernels, "_PACKAGE", tmp_path)
    monkeypatch.setattr(kernels, "_LIBRARY", tmp_path / "_kernels.so")
    return tmp_path


def test_without_either(package):
    found = kernels.load()
    assert found[:3] == (None, f"{NAME} is not built", None)
    assert "are not built" in found.problem
    assert found.build_info() is None
    assert found.bfloat16_instructions() is None


def test_a_module_for_another_torch_is_named_and_not_loaded(package):
    (package / "_C_torch_2_12_0_cpu.so").write_bytes(b"not a library")
    assert kernels.load().module_problem == f"{NAME} is not built, there is _C_torch_2_12_0_cpu.so"


def test_a_library_from_older_sources(package, tmp_path):
    subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", "-o", package / "_kernels.so"], check=True)
    found = kernels.load()
    assert found.library is None
    assert found.problem.startswith("the kernels are older than the Python sources; `pip install")


def test_the_interface_is_that_of_the_schemas():
    """The stable ABI compares no types: with another schema, an older library would misread its arguments."""
    schemas = sorted(
        str(overload(operator, "native")._schema)
        for operator in (*backends.operators(), "alibi_attention_backward", "alibi_attention_varlen_backward")
    )
    digest = hashlib.sha256("\n".join(schemas).encode()).hexdigest()[:16]
    assert (kernels.INTERFACE, digest) == ("1", "31171d963dea9815"), (
        "raise INTERFACE here, in ops/kernels.py and in csrc/stable.cpp"
    )


def test_libraries_that_do_not_load(package):
    (package / "_kernels.so").write_bytes(b"not a library")
    assert "the kernels do not load; `pip install --no-build-isolation .` rebuilds them: " in kernels.load().problem


@needs_native
def test_the_kernels_say_how_they_were_built():
    info = backends.kernels.build_info()
    assert info["torch"].count(".") >= 2
    assert info["compiler"].split()[0] in ("GNU", "Clang", "AppleClang")
    assert backends.kernels.bfloat16_instructions() in (None, "AMX", "AVX512-BF16")
