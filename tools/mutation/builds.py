"""Builds of the kernels in a worker's tree, for mutants of C++ files. All of them emulate AMX."""

from __future__ import annotations

import functools
import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_LAUNCHER = Path(__file__).with_name("compile_for_this_cpu.sh")

#: CMake's options of a build besides the common ones.
_OPTIONS = {
    "work": {"SEQWARM_COUNT_WORK": "ON"},
    "sanitizers": {"CMAKE_CXX_FLAGS_MUTATION": "-O1 -g1", "SEQWARM_SANITIZE": "ON"},
}


class NotBuilt(Exception):
    """The compiler refuses the mutant."""


def install(build: str) -> None:
    """Build the sources of the working directory, and put the module for this torch into the package."""
    folder = Path("build", build.replace(" ", "_"))
    is_first = not folder.exists()
    if is_first:
        _configure(folder, build)
    # At first for each kind of CPU: the module needs them all. Later, the others keep their objects.
    capability = "" if is_first else "AVX2" if build == "AVX2" else _capability()
    run = subprocess.run(
        ("cmake", "--build", folder), env={**os.environ, "SEQWARM_ONLY_CAPABILITY": capability}, capture_output=True
    )
    if run.returncode:
        raise NotBuilt
    shutil.copyfile(folder / module().name, module())


def module() -> Path:
    """The module for this torch, which the package loads."""
    return Path("seqwarm_kernels", _name() + EXTENSION_SUFFIXES[0])


@functools.cache
def _name() -> str:
    """Asked of setup.py, since this process must not import the package."""
    return str(runpy.run_path("setup.py")["find_torch"]().module())


def _configure(folder: Path, build: str) -> None:
    import pybind11
    import torch

    options = {
        "CMAKE_BUILD_TYPE": "Mutation",
        "CMAKE_CXX_FLAGS_MUTATION": "-O1",  # compiles soon
        "CMAKE_CXX_COMPILER_LAUNCHER": _LAUNCHER,
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
        "SEQWARM_EMULATE_AMX": "ON",
        "SEQWARM_TORCH_VERSION": torch.__version__,
        "SEQWARM_SHORT_CALLS": "ON",
        "SEQWARM_MODULE": _name(),
        "TORCH_INSTALL_PREFIX": os.path.dirname(torch.__file__),
        **_OPTIONS.get(build, {}),
    }
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    definitions = [f"-D{name}={value}" for name, value in options.items()]
    subprocess.run(["cmake", "-G", "Ninja", "-S", ".", "-B", folder, *definitions], check=True, capture_output=True)


@functools.cache
def _capability() -> str:
    """Found in another process: in this one, libtorch would keep the answer for tests that ask for another CPU."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def sanitizers() -> dict[str, str]:
    """The environment of a process that loads the build with sanitizers."""
    compiler = os.environ.get("CXX", "c++")
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libstdc++.so")
    ]
    return {"LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}
