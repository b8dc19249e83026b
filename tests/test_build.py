"""What setup.py decides to build, and that the CUDA sources compile where nvcc is."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import torch
from setuptools import Distribution

import seqwarm_kernels
from seqwarm_kernels.ops.kernels import module_name

ROOT = Path(__file__).parents[1]
SETUP = ROOT / "setup.py"
CAPTURED = {"capture_output": True, "text": True, "check": True}


@pytest.fixture
def build(monkeypatch):
    """setup.py as a module, with none of its variables set."""
    for name in ("SEQWARM_KERNELS", "SEQWARM_SHORT_CALLS", "SEQWARM_CUDA", "CUDA_HOME", "CXX"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("seqwarm_setup", SETUP)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def complete(build, monkeypatch):
    """A machine that has all but CUDA."""
    found = build.Torch(Path("torch"), "2.13.0+cpu", None)
    monkeypatch.setattr(build, "usable_torch", lambda: found)
    return found


def write_nvcc(folder: Path, release: str) -> Path:
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    nvcc.chmod(0o755)
    return nvcc


def test_finds_torch_as_it_calls_itself(build):
    found = build.find_torch()
    assert found.version == torch.__version__
    assert found.cuda == torch.version.cuda
    assert found.folder == Path(torch.__file__).parent


@pytest.mark.parametrize(
    ("name", "values"),
    [("SEQWARM_KERNELS", "0 or 1"), ("SEQWARM_SHORT_CALLS", "0 or 1"), ("SEQWARM_CUDA", "0 or 1 or auto")],
)
def test_other_values_are_errors(build, monkeypatch, complete, name, values):
    monkeypatch.setenv(name, "yes")
    with pytest.raises(SystemExit, match=f"{name} must be {values}, got 'yes'"):
        build.decide()


def test_error_ends_a_build_without_a_traceback(tmp_path):
    environment = {**os.environ, "SEQWARM_KERNELS": "maybe"}
    finished = subprocess.run(
        [sys.executable, SETUP, "build_ext", "--build-temp", tmp_path, "--build-lib", tmp_path],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert finished.returncode != 0
    assert "SEQWARM_KERNELS must be 0 or 1, got 'maybe'" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_kernels_can_be_left_out(build, monkeypatch, capsys):
    monkeypatch.setenv("SEQWARM_KERNELS", "0")
    assert build.decide() is None
    assert "SEQWARM_KERNELS=0" in capsys.readouterr().err


def test_without_torch(build, monkeypatch):
    monkeypatch.setattr(build, "find_torch", lambda: None)
    with pytest.raises(SystemExit, match=r"torch is not installed for .*; SEQWARM_KERNELS=0 installs without them"):
        build.decide()


def test_without_a_compiler(build, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"cannot be built: missing: .*a C\+\+ compiler"):
        build.decide()


def test_on_windows(build, monkeypatch, capsys):
    monkeypatch.setattr(build.sys, "platform", "win32")
    assert build.decide() is None
    assert "they do not build on Windows" in capsys.readouterr().err


def test_given_compiler_is_missing(build, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    assert build.find_compiler() is None


def test_the_module_is_named_after_its_torch(build, complete):
    assert complete.module() == module_name(complete.version) == "_C_torch_2_13_0_cpu"


def test_the_library_alone(build, monkeypatch, complete):
    monkeypatch.setenv("SEQWARM_SHORT_CALLS", "0")
    assert build.decide() == (complete, False, None)


def test_the_library_alone_replaces_an_older_module_of_an_editable_installation(build, monkeypatch, complete, tmp_path):
    """It would be loaded in the library's place. Another environment may need the module for its torch."""
    monkeypatch.setattr(build, "ROOT", tmp_path)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    package = tmp_path / "seqwarm_kernels"
    package.mkdir()
    for name in ("_kernels.so", f"_C_torch_2_13_0_cpu{suffix}", f"_C_torch_2_15_0{suffix}"):
        (package / name).touch()
    command = build.CMakeBuild(Distribution())
    command.plan = build.Plan(complete, False, None)
    command.build_lib, command.inplace, command.ext_map = str(tmp_path / "lib"), True, {}
    command.remove_others()
    assert sorted(path.name for path in package.iterdir()) == [f"_C_torch_2_15_0{suffix}", "_kernels.so"]


def test_cuda_part_is_left_out_for_a_cpu_torch(build, monkeypatch, complete, capsys):
    assert build.decide() == (complete, True, None)
    assert "torch 2.13.0+cpu is not built for CUDA" in capsys.readouterr().err
    monkeypatch.setenv("SEQWARM_CUDA", "1")
    with pytest.raises(SystemExit, match="not built for CUDA"):
        build.decide()


def test_cuda_part_needs_nvcc(build, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.Skip, match="nvcc is neither in CUDA_HOME/bin nor on PATH"):
        build.usable_nvcc(build.Torch(Path("torch"), "2.13.0+cu130", "13.0"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize("chips", [(75, 90), pytest.param((80, 100), marks=pytest.mark.exhaustive)])
def test_cuda_sources_compile_for_every_chip_without_a_gpu(chips, tmp_path):
    """Against the headers of the torch that is here, which a CPU build has as well."""
    include = Path(torch.__file__).parent / "include"
    targets = [f"-gencode=arch=compute_{chip},code=sm_{chip}" for chip in chips]
    command = ["nvcc", "-std=c++20", "--threads", "2", "-Xcompiler=-Wall,-Wextra", "-Werror", "all-warnings"]
    command += ["-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE", "-isystem", str(include), *targets]
    command += ["-isystem", str(include / "torch/csrc/api/include"), "-c", str(ROOT / "csrc/resize_batch/cuda.cu")]
    target = tmp_path / "resize_batch.o"
    compiled = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    check_cuda_kernels(target, chips)


def check_cuda_kernels(target, chips):
    """Both kernels of each chip spill nothing, and copy 16 bytes at a time."""
    tools = Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin"
    for chip in chips:
        usage, assembly = (
            subprocess.run([tools / "cuobjdump", "-arch", f"sm_{chip}", flag, target], **CAPTURED).stdout
            for flag in ("-res-usage", "-sass")
        )
        kernels = re.findall(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
        assert len(kernels) == 2, usage
        for registers, *spilled in kernels:
            assert int(registers) <= 128, usage  # of 65536, so that four blocks of 128 threads fit and hide latency
            assert spilled == ["0", "0"], usage
        bodies = assembly.split("Function :")[1:]
        assert len(bodies) == 2
        for body in bodies:
            moves = Counter(re.findall(r"\b(LDG|STG)\.E\.128\b", body))
            assert min(moves["LDG"], moves["STG"]) >= 8, (chip, moves)


def test_version_is_that_of_the_package(build):
    assert build.project_version() == seqwarm_kernels.__version__


@pytest.mark.parametrize("release", ["13.0", "13.2"])
def test_nvcc_of_the_same_major_version_serves(build, monkeypatch, tmp_path, release):
    (tmp_path / "bin").mkdir()
    nvcc = write_nvcc(tmp_path / "bin", release)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.usable_nvcc(build.Torch(Path("torch"), "2.13.0+cu130", "13.0")) == str(nvcc)


def test_nvcc_of_another_major_version_does_not(build, monkeypatch, tmp_path):
    write_nvcc(tmp_path, "12.8")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(build.Skip, match=r"is CUDA 12\.8, torch 2\.13\.0\+cu130 is built for CUDA 13\.0"):
        build.usable_nvcc(build.Torch(Path("torch"), "2.13.0+cu130", "13.0"))
