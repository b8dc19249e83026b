"""What setup.py decides to build."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from setuptools import Distribution

import seqwarm_kernels
from seqwarm_kernels.ops.kernels import module_name

ROOT = Path(__file__).parents[1]
SETUP = ROOT / "setup.py"


@pytest.fixture
def build(monkeypatch):
    """setup.py as a module, with none of its variables set."""
    for name in ("SEQWARM_KERNELS", "SEQWARM_SHORT_CALLS", "CXX"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("seqwarm_setup", SETUP)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def complete(build, monkeypatch):
    """A machine that has what the build needs."""
    found = build.Torch(Path("torch"), "2.13.0+cpu")
    monkeypatch.setattr(build, "usable_torch", lambda: found)
    return found


def test_an_error_ends_a_build_without_a_traceback(tmp_path):
    finished = subprocess.run(
        [sys.executable, SETUP, "build_ext", "--build-temp", tmp_path, "--build-lib", tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, "SEQWARM_KERNELS": "maybe"},
        check=False,
    )
    assert finished.returncode != 0
    assert "SEQWARM_KERNELS" in finished.stderr
    assert "Traceback" not in finished.stderr


def test_kernels_are_left_out_with_the_reason(build, monkeypatch, capsys, complete):
    assert build.decide() == (complete, True)
    monkeypatch.setenv("SEQWARM_SHORT_CALLS", "0")
    assert build.decide() == (complete, False)
    monkeypatch.setenv("SEQWARM_KERNELS", "0")
    assert build.decide() is None
    assert "SEQWARM_KERNELS=0" in capsys.readouterr().err
    monkeypatch.delenv("SEQWARM_KERNELS")
    monkeypatch.setattr(build.sys, "platform", "win32")
    assert build.decide() is None
    assert "Windows" in capsys.readouterr().err


def test_what_the_build_lacks_is_an_error(build, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"C\+\+"):
        build.decide()
    monkeypatch.setattr(build, "find_torch", lambda: None)
    with pytest.raises(SystemExit, match="torch"):
        build.decide()


def test_the_module_is_named_after_its_torch(build, complete):
    assert build.find_torch() == (Path(torch.__file__).parent, torch.__version__)
    assert complete.module() == module_name(complete.version) == "_C_torch_2_13_0_cpu"


def test_the_library_alone_replaces_an_older_module_of_an_editable_installation(build, monkeypatch, complete, tmp_path):
    """It would be loaded in the library's place. Another environment may need the module for its torch."""
    monkeypatch.setattr(build, "ROOT", tmp_path)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    package = tmp_path / "seqwarm_kernels"
    package.mkdir()
    for name in ("_kernels.so", f"_C_torch_2_13_0_cpu{suffix}", f"_C_torch_2_15_0{suffix}"):
        (package / name).touch()
    command = build.CMakeBuild(Distribution())
    command.plan = build.Plan(complete, False)
    command.build_lib, command.inplace, command.ext_map = str(tmp_path / "lib"), True, {}
    command.remove_others()
    assert sorted(path.name for path in package.iterdir()) == [f"_C_torch_2_15_0{suffix}", "_kernels.so"]


def test_version_is_that_of_the_package(build):
    assert build.project_version() == seqwarm_kernels.__version__
