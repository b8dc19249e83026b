"""A source distribution, the wheels built from it, and what they install into a clean environment."""

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

import seqwarm_kernels
from seqwarm_kernels.ops.kernels import module_name

ROOT = Path(__file__).parents[1]
PYTHON = f"cp{sys.version_info.major}{sys.version_info.minor}"
PLATFORM = sysconfig.get_platform().replace("-", "_").replace(".", "_")

pytestmark = pytest.mark.exhaustive

PROGRAM = """
import pathlib, sys
import torch
import seqwarm_kernels
from seqwarm_kernels import alibi_attention, resize_batch

assert pathlib.Path(seqwarm_kernels.__file__).is_relative_to(sys.prefix)
query = torch.randn(2, 4, 33, 16)
found = alibi_attention(query, query, query)
error = (found - alibi_attention(query, query, query, backend="reference")).abs().max()
assert error < 1e-5, error
assert resize_batch({"input_ids": torch.ones(2, 33)}, 16)["input_ids"].shape == (2, 16)
"""


def run(*command, cwd="/", **environment):
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def source_distribution(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT)
    (found,) = folder.iterdir()
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The Python of a new environment, in which torch is installed."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    run(python, "-m", "pip", "install", "--constraint", ROOT / "constraints.txt", "torch", "numpy", "tqdm")
    return python


def test_the_source_distribution_holds_what_its_tests_import(source_distribution, tmp_path):
    run("tar", "xf", source_distribution, "-C", tmp_path)
    (tree,) = tmp_path.iterdir()
    run(sys.executable, "-m", "pytest", "--collect-only", cwd=tree)
    run(sys.executable, "-m", "pytest", "tests/docs", "tests/test_structure.py", "tests/test_build.py", cwd=tree)


@pytest.mark.parametrize(
    ("switches", "libraries", "tags"),
    [
        ({"SEQWARM_KERNELS": "0"}, [], ["py3", "none", "any"]),
        ({"SEQWARM_SHORT_CALLS": "0"}, ["_kernels"], ["py3", "none", PLATFORM]),
        ({}, [module_name(torch.__version__), "_kernels"], [PYTHON, PYTHON, PLATFORM]),
    ],
)
def test_wheel_of_the_source_distribution(source_distribution, environment, tmp_path, switches, libraries, tags):
    build = ("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path, source_distribution)
    run(sys.executable, "-m", "pip", *build, **switches)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.stem.split("-")[1:] == [seqwarm_kernels.__version__, *tags]
    names = zipfile.ZipFile(wheel).namelist()
    assert sorted(Path(name).name.partition(".")[0] for name in names if name.endswith(".so")) == libraries
    folders = {name.partition("/")[0] for name in names}
    assert all(folder.startswith("seqwarm_kernels") for folder in folders), folders

    before = installed_files(environment)
    run(environment, "-m", "pip", "install", "--constraint", ROOT / "constraints.txt", wheel)
    run(environment, "-c", PROGRAM)
    printed = run(environment.with_name("seqwarm"), "info")
    assert ("cpu   native     available" in printed) == bool(libraries), printed
    run(environment, "-m", "pip", "uninstall", "--yes", "seqwarm_kernels")
    left = {file for file in installed_files(environment) - before if "seqwarm" in str(file)}
    assert not left


def installed_files(python):
    return {path for path in python.parents[1].rglob("*") if path.is_file()}
