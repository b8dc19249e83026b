"""Builds the extension `seqwarm_kernels._C` with CMake, where that is possible; pyproject.toml says the rest.

Two environment variables decide what is built, each 0, 1 or auto (the default):

SEQWARM_EXTENSION   0: install without the extension. 1: fail where it cannot be built. auto: build it where
                    torch, a C++ compiler, cmake, ninja and pybind11 are found, else say what is missing.
SEQWARM_CUDA        the same for the extension's CUDA part, which needs nvcc and a torch built for CUDA; no GPU.
                    CMake's own CUDAARCHS replaces the architectures of CMakeLists.txt.

SEQWARM_VERSION_LABEL   1: name what the extension is built for in the version, 0.2.0+torch2.13 or, with the CUDA part,
                        0.2.0+cu130torch2.13. For wheels that are handed on. A wheel without the extension is for any
                        Python and any torch, and has no label.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILDING_COMMANDS = {"build", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"}


class Torch(NamedTuple):
    folder: Path
    version: str
    cuda: str | None


class Skip(Exception):
    """Why a part is not built."""


def say(message: str) -> None:
    print(f"seqwarm_kernels: {message}", file=sys.stderr, flush=True)


def switch(name: str) -> str:
    value = os.environ.get(name) or "auto"
    if value not in ("0", "1", "auto"):
        raise SystemExit(f"{name} must be 0, 1 or auto, got {value!r}")
    return value


def find_tool(name: str) -> str | None:
    """The path of a program; those of pip packages are found in an environment that is not activated as well."""
    return shutil.which(name, path=os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]))


def find_compiler() -> str | None:
    given = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [given.split()[0]] if given else ["c++", "g++", "clang++"])), None)


def find_torch() -> Torch | None:
    """The installed torch, without the seconds that its import takes."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    version = runpy.run_path(str(folder / "version.py"))
    return Torch(folder, str(version["__version__"]), version["cuda"])


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return (shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None) or shutil.which("nvcc")


def usable_torch() -> Torch:
    """The torch to build for, where everything that the extension needs is here."""
    torch = find_torch()
    if torch is None:
        raise Skip(f"torch is not installed for {sys.executable}; with it, use pip install --no-build-isolation")
    missing = [name for name in ("cmake", "ninja") if find_tool(name) is None]
    if importlib.util.find_spec("pybind11") is None:
        missing.append("pybind11")
    if find_compiler() is None:
        missing.append("a C++ compiler")
    if missing:
        raise Skip(f"missing: {', '.join(missing)}")
    return torch


def usable_nvcc(torch: Torch) -> str:
    """The nvcc to build the CUDA part with."""
    if torch.cuda is None:
        raise Skip(f"torch {torch.version} is not built for CUDA")
    nvcc = find_nvcc()
    if nvcc is None:
        raise Skip("nvcc is neither in CUDA_HOME/bin nor on PATH")
    printed = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    release = re.search(r"release ((\d+)\.\d+)", printed)
    if release is None:
        raise Skip(f"{nvcc} --version names no release")
    if release[2] != torch.cuda.split(".")[0]:
        raise Skip(f"{nvcc} is CUDA {release[1]}, torch {torch.version} is built for CUDA {torch.cuda}")
    return nvcc


def decide() -> tuple[Torch, str | None] | None:
    """The torch and, for the CUDA part, the nvcc to build with; None to build nothing."""
    extension, cuda = switch("SEQWARM_EXTENSION"), switch("SEQWARM_CUDA")
    if extension == "0":
        if cuda == "1":
            raise SystemExit("SEQWARM_CUDA=1 needs the extension, and SEQWARM_EXTENSION=0 leaves it out")
        say("installing without the extension, as SEQWARM_EXTENSION=0 says")
        return None
    try:
        torch = usable_torch()
    except Skip as reason:
        if "1" in (extension, cuda):
            raise SystemExit(f"the extension cannot be built: {reason}") from None
        say(f"installing without the extension: {reason}")
        return None
    if cuda == "0":
        return torch, None
    try:
        return torch, usable_nvcc(torch)
    except Skip as reason:
        if cuda == "1":
            raise SystemExit(f"SEQWARM_CUDA=1, and the CUDA part cannot be built: {reason}") from None
        say(f"building without the CUDA part: {reason}")
        return torch, None


class CMakeBuild(build_ext):
    """Compiles in build/, where an unchanged file is not compiled again."""

    torch: Torch
    nvcc: str | None

    def build_extension(self, extension: Extension) -> None:
        part = "cuda" if self.nvcc else "cpu"
        folder = ROOT / "build" / f"{sysconfig.get_config_var('SOABI')}-torch-{self.torch.version}-{part}"
        cmake = str(find_tool("cmake"))
        try:
            subprocess.run([cmake, *self.options(folder)], check=True)
            subprocess.run([cmake, "--build", str(folder)], check=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(
                f"seqwarm_kernels: the extension does not build (cmake ended with status {error.returncode}, "
                "see above); SEQWARM_EXTENSION=0 installs without it"
            ) from None
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(next(folder.glob("_C.*")), target)
        cache = (folder / "CMakeCache.txt").read_text()
        found = re.search(r"^SEQWARM_CUDA_BUILT:\w+=(.+)$", cache, re.MULTILINE)
        say(f"built the extension for torch {self.torch.version}: CPU{f' + {found[1]}' if found else ''}")

    def options(self, folder: Path) -> list[str]:
        import pybind11

        options = {
            "CMAKE_MAKE_PROGRAM": find_tool("ninja"),
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
            "TORCH_INSTALL_PREFIX": self.torch.folder,
            "SEQWARM_TORCH_VERSION": self.torch.version,
            "SEQWARM_CUDA": "ON" if self.nvcc else "OFF",
        }
        if self.nvcc:
            options["CMAKE_CUDA_COMPILER"] = self.nvcc
        return [
            "-G",
            "Ninja",
            "-S",
            str(ROOT),
            "-B",
            str(folder),
            *(f"-D{key}={value}" for key, value in options.items()),
        ]


def project_version() -> str:
    """`__version__` of the package, without importing it."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "seqwarm_kernels/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def local_label(torch: Torch, nvcc: str | None) -> str:
    """What the extension is built for, as the local part of a version."""
    release = ".".join(torch.version.split("+")[0].split(".")[:2])
    return (f"cu{torch.cuda.replace('.', '')}" if nvcc and torch.cuda else "") + f"torch{release}"


def main() -> None:
    is_labeled = os.environ.get("SEQWARM_VERSION_LABEL") == "1"
    commands = BUILDING_COMMANDS | ({"dist_info"} if is_labeled else set())  # metadata and wheel have one version
    decision = decide() if commands & set(sys.argv) else None
    if decision is None:
        setup(version=project_version())
        return
    CMakeBuild.torch, CMakeBuild.nvcc = decision
    setup(
        version=project_version() + (f"+{local_label(*decision)}" if is_labeled else ""),
        ext_modules=[Extension("seqwarm_kernels._C", sources=[])],
        cmdclass={"build_ext": CMakeBuild},
    )


if __name__ == "__main__":
    main()
