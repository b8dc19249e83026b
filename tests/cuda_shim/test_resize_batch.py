"""resize_batch's CUDA kernel, built for the CPU with a sanitizer, through the tests of all backends."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TORCH = Path(torch.__file__).parent
COMPILER = os.environ.get("CXX", "c++")

TESTS = ("tests/cuda_shim/test_group_sizes.py", "tests/ops/test_resize_batch.py")
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"}
#: Libraries that must be loaded before Python.
RUNTIMES = {"address": ("libasan.so", "libstdc++.so"), "thread": ("libtsan.so", "libstdc++.so"), "undefined": ()}


def compiled(*arguments):
    run = subprocess.run([COMPILER, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def build(folder, sanitizer):
    flags = ["-std=c++20", "-O1", "-g1", "-fPIC", "-fno-omit-frame-pointer", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
    compiled(*flags, "-c", FOLDER / "blocks.cpp", "-o", folder / "blocks.o")
    library = folder / "resize_batch.so"
    include = [f"-I{FOLDER / 'include'}", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc' / 'resize_batch'}"]
    include += ["-isystem", TORCH / "include", "-isystem", TORCH / "include/torch/csrc/api/include"]
    libraries = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    flags += ["-Werror", "-Wno-parentheses"]  # mutants come without parentheses
    flags += [f"-fsanitize={sanitizer}", f"-fno-sanitize-recover={sanitizer}"]
    compiled(*flags, *include, "-shared", FOLDER / "resize_batch.cpp", folder / "blocks.o", "-o", library, *libraries)
    return library


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which(COMPILER) is None, reason="needs Linux and a C++ compiler")
@pytest.mark.parametrize(
    ("sanitizer", "tier"),
    [
        ("undefined", "not slow and not exhaustive"),
        pytest.param("address", "", marks=pytest.mark.exhaustive),
        pytest.param("thread", "", marks=pytest.mark.exhaustive),
    ],
)
def test_cuda_kernel_passes_the_tests_of_the_native_backend(sanitizer, tier, tmp_path):
    library = build(tmp_path, sanitizer)
    preloaded = " ".join(compiled(f"-print-file-name={name}") for name in RUNTIMES[sanitizer])
    options = ["-p", "tests.cuda_shim.plugin", "-m", tier, "-k", "native-cpu or test_group_sizes", "-x"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *TESTS],
        cwd=ROOT,
        env={**os.environ, **OPTIONS, "LD_PRELOAD": preloaded, "SEQWARM_CUDA_SHIM": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-8000:]
