"""Builds the native kernels with CMake: a library and a module. pyproject.toml says the rest.

`_kernels` has the operators for CPUs, on PyTorch's stable ABI: for any torch from 2.11 on and any Python. The module
`_C_torch_<version>` is for one torch and one Python: the same operators, and shorter ways to call them and Triton's.

Environment variables decide what is built:

SEQWARM_KERNELS       0: neither. 1 (the default): both, or fail where they cannot be built.
SEQWARM_SHORT_CALLS   0: not the module for one torch, for wheels that are handed on. 1 (the default): both.
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
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BUILDING_COMMANDS = {"build", "build_ext", "bdist_wheel", "editable_wheel", "install", "develop"}


class Torch(NamedTuple):
    folder: Path
    version: str

    def module(self) -> str:
        """The name of the module for this torch, as ops/kernels.py looks for it."""
        return "_C_torch_" + re.sub(r"\W", "_", self.version)


class Plan(NamedTuple):
    torch: Torch
    short_calls: bool  # whether to build the module for this torch


class Skip(Exception):
    """Why a part cannot be built."""


def say(message: str) -> None:
    print(f"seqwarm_kernels: {message}", file=sys.stderr, flush=True)


def switch(name: str) -> bool:
    value = os.environ.get(name) or "1"
    if value not in ("0", "1"):
        raise SystemExit(f"{name} must be 0 or 1, got {value!r}")
    return value == "1"


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
    return Torch(folder, str(version["__version__"]))


def usable_torch() -> Torch:
    """The torch to build for, where everything that the build needs is here."""
    torch = find_torch()
    if torch is None:
        raise Skip(f"torch is not installed for {sys.executable}")
    missing = [name for name in ("cmake", "ninja") if find_tool(name) is None]
    if switch("SEQWARM_SHORT_CALLS") and importlib.util.find_spec("pybind11") is None:
        missing.append("pybind11")
    if find_compiler() is None:
        missing.append("a C++ compiler")
    if missing:
        raise Skip(f"missing: {', '.join(missing)}")
    return torch


def decide() -> Plan | None:
    """What to build; None for nothing."""
    if not switch("SEQWARM_KERNELS"):
        say("installing without kernels, as SEQWARM_KERNELS=0 says")
        return None
    if sys.platform == "win32":
        say("installing without kernels: they do not build on Windows, where the PyTorch reference serves")
        return None
    try:
        return Plan(usable_torch(), switch("SEQWARM_SHORT_CALLS"))
    except Skip as reason:
        raise SystemExit(
            f"seqwarm_kernels: the kernels cannot be built: {reason}; SEQWARM_KERNELS=0 installs without them"
        ) from None


class CMakeBuild(build_ext):
    """Compiles in build/, where an unchanged file is not compiled again."""

    plan: Plan

    def run(self) -> None:
        folder = ROOT / "build" / f"{sysconfig.get_config_var('SOABI')}-torch-{self.plan.torch.version}"
        cmake = str(find_tool("cmake"))
        try:
            subprocess.run([cmake, *self.options(folder)], check=True)
            subprocess.run([cmake, "--build", str(folder)], check=True)
        except subprocess.CalledProcessError as error:
            raise SystemExit(
                f"seqwarm_kernels: the kernels do not build (cmake ended with status {error.returncode}, "
                "see above); SEQWARM_KERNELS=0 installs without them"
            ) from None
        self.folder = folder
        self.remove_others()
        super().run()
        say(f"built the kernels with torch {self.plan.torch.version}")

    def remove_others(self) -> None:
        """Remove what a build with other options has left. In the sources, modules for other torches stay."""
        for library in Path(self.build_lib, "seqwarm_kernels").glob("*.so"):
            library.unlink()
        if self.inplace:
            (ROOT / self.get_ext_filename(f"seqwarm_kernels.{self.plan.torch.module()}")).unlink(missing_ok=True)

    def build_extension(self, extension: Extension) -> None:
        target = Path(self.get_ext_fullpath(extension.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(self.folder / target.name, target)

    def get_ext_filename(self, fullname: str) -> str:
        """Python's name for the module, and `_kernels.so` for the library, which no Python needs to import."""
        name = str(super().get_ext_filename(fullname))
        return str(Path(name).with_name("_kernels.so")) if fullname.endswith("_kernels") else name

    def options(self, folder: Path) -> list[str]:
        plan = self.plan
        options = {
            "CMAKE_MAKE_PROGRAM": find_tool("ninja"),
            "Python_EXECUTABLE": sys.executable,
            "TORCH_INSTALL_PREFIX": plan.torch.folder,
            "SEQWARM_TORCH_VERSION": plan.torch.version,
            "SEQWARM_SHORT_CALLS": "ON" if plan.short_calls else "OFF",
        }
        if plan.short_calls:
            import pybind11

            options |= {"SEQWARM_MODULE": plan.torch.module(), "pybind11_DIR": pybind11.get_cmake_dir()}
        return [
            "-G",
            "Ninja",
            "-S",
            str(ROOT),
            "-B",
            str(folder),
            *(f"-D{key}={value}" for key, value in options.items()),
        ]


class StableWheel(bdist_wheel):
    """A wheel of the library alone, for any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def project_version() -> str:
    """`__version__` of the package, without importing it."""
    found = re.search(r'^__version__ = "(.+)"$', (ROOT / "seqwarm_kernels/__init__.py").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def main() -> None:
    plan = decide() if BUILDING_COMMANDS & set(sys.argv) else None
    if plan is None:
        setup(version=project_version())
        return
    CMakeBuild.plan = plan
    names = ["_kernels", plan.torch.module()] if plan.short_calls else ["_kernels"]
    setup(
        version=project_version(),
        ext_modules=[Extension(f"seqwarm_kernels.{name}", sources=[]) for name in names],
        cmdclass={"build_ext": CMakeBuild, **({} if plan.short_calls else {"bdist_wheel": StableWheel})},
    )


if __name__ == "__main__":
    main()
