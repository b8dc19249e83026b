"""Which of the compiled libraries is loaded, and what is said of the others."""

import pytest
import torch

from seqwarm_kernels.ops import backends, extension

NAME = extension.module_name(torch.__version__)


@pytest.fixture
def package(monkeypatch, tmp_path):
    """A folder in the place of the package's."""
    monkeypatch.setattr(extension, "_PACKAGE", tmp_path)
    monkeypatch.setattr(extension, "_LIBRARY", tmp_path / "_kernels.so")
    return tmp_path


def test_without_libraries(package):
    kernels = extension.load()
    assert kernels[:3] == (None, f"{NAME} is not built", None)
    assert "are not built" in kernels.problem
    assert kernels.build_info() is None
    assert kernels.bfloat16_instructions() is None


def test_a_module_for_another_torch_is_named_and_not_loaded(package):
    (package / "_C_torch_2_12_0_cpu.so").write_bytes(b"not a library")
    assert extension.load().module_problem == f"{NAME} is not built, there is _C_torch_2_12_0_cpu"


def test_libraries_that_do_not_load(package):
    (package / "_kernels.so").write_bytes(b"not a library")
    assert "the kernels do not load; `pip install --no-build-isolation .` rebuilds them: " in extension.load().problem


@pytest.mark.skipif(backends.problem("native") is not None, reason=str(backends.problem("native")))
def test_the_kernels_say_how_they_were_built():
    info = backends.kernels.build_info()
    assert info["torch"].count(".") >= 2
    assert info["compiler"].split()[0] in ("GNU", "Clang", "AppleClang")
    assert backends.kernels.bfloat16_instructions() in (None, "AMX", "AVX512-BF16")
