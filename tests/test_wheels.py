"""A source distribution, the wheels built from it, and what they install into a clean environment."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import seqwarm_kernels

ROOT = Path(__file__).parents[1]

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


@pytest.mark.parametrize("extension", ["0", "1"])
def test_wheel_of_the_source_distribution(source_distribution, environment, tmp_path, extension):
    build = ("wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", tmp_path, source_distribution)
    run(sys.executable, "-m", "pip", *build, SEQWARM_EXTENSION=extension, SEQWARM_VERSION_LABEL="1")
    (wheel,) = tmp_path.glob("*.whl")
    version, *tags = wheel.stem.split("-")[1:]
    release = ".".join(torch.__version__.split(".")[:2])
    if extension == "1":
        assert version == f"{seqwarm_kernels.__version__}+torch{release}"
    else:
        assert (version, tags) == (seqwarm_kernels.__version__, ["py3", "none", "any"])
    names = zipfile.ZipFile(wheel).namelist()
    assert sum(name.startswith("seqwarm_kernels/_C.") for name in names) == int(extension)
    folders = {name.partition("/")[0] for name in names}
    assert all(folder.startswith("seqwarm_kernels") for folder in folders), folders

    before = installed_files(environment)
    run(environment, "-m", "pip", "install", "--constraint", ROOT / "constraints.txt", wheel)
    run(environment, "-c", PROGRAM)
    printed = run(environment.with_name("seqwarm"), "info")
    assert ("cpu   native     available" in printed) == (extension == "1"), printed
    run(environment, "-m", "pip", "uninstall", "--yes", "seqwarm_kernels")
    left = {file for file in installed_files(environment) - before if "seqwarm" in str(file)}
    assert not left


def installed_files(python):
    return {path for path in python.parents[1].rglob("*") if path.is_file()}
