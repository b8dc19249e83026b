"""The replay's policy against torch's own caching allocator, on a CUDA runtime without a device.

`make test-torch-allocator` runs it. It needs a torch for CUDA, which SEQWARM_CUDA_TORCH names, and the headers of nvcc.
"""

import os
import random
import re
import subprocess
from pathlib import Path

import pytest

from bench.allocator.replay import MIB, CachingAllocator

TORCH = Path(os.environ.get("SEQWARM_CUDA_TORCH", ""))
SOURCES = Path(__file__).parent / "torch_allocator"
EDGES = [512, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB, 19 * MIB, 20 * MIB]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    if not os.environ.get("SEQWARM_CUDA_TORCH"):
        pytest.skip("needs a torch built for CUDA: make test-torch-allocator")
    folder = tmp_path_factory.mktemp("torch_allocator")
    nvcc = subprocess.run(["nvcc", "--dryrun", "-x", "cu", os.devnull], stderr=subprocess.PIPE, text=True, check=True)
    headers = re.search(r'INCLUDES="(.*)"', nvcc.stderr)[1]
    needed = subprocess.check_output(["objdump", "-p", TORCH / "lib/libc10_cuda.so"], text=True)
    runtime = next(word for word in needed.split() if word.startswith("libcudart.so"))
    (folder / "versions").write_text(f"{runtime} {{ global: cuda*; local: *; }};")
    compiler = ["c++", "-std=c++20", "-w", headers]
    subprocess.check_call(
        [*compiler, "-shared", "-fPIC", SOURCES / "fake_runtime.cpp", "-o", folder / runtime,
         f"-Wl,-soname,{runtime}", f"-Wl,--version-script={folder / 'versions'}"]
    )  # fmt: skip
    subprocess.check_call(
        [*compiler, f"-I{TORCH / 'include'}", SOURCES / "play.cpp", "-o", folder / "play", f"-L{TORCH / 'lib'}",
         "-lc10", "-lc10_cuda", "-Wl,--allow-shlib-undefined", f"-Wl,-rpath,{TORCH / 'lib'}"]
    )  # fmt: skip
    return folder / "play", {"LD_PRELOAD": str(folder / runtime)}


def random_events(seed):
    """Sizes from a byte to 256 MiB, and those at which a rule changes. About 40 blocks live at a time."""
    generator, living = random.Random(seed), []
    for number in range(5000):
        if living and generator.random() < (0.5 if len(living) > 40 else 0.35):
            yield "f", living.pop(generator.randrange(len(living))), 0
        else:
            living.append(number)
            size = generator.choice(EDGES) if generator.random() < 0.1 else int(2 ** generator.uniform(0, 28))
            yield "a", number, size


@pytest.mark.parametrize("seed", range(10))
def test_counters_after_each_event(program, seed):
    events = list(random_events(seed))
    command, environment = program
    lines = "\n".join(f"a {number} {size}" if action == "a" else f"f {number}" for action, number, size in events)
    output = subprocess.run([command], input=lines, env=environment, capture_output=True, text=True, check=True).stdout
    allocator, blocks, counters = CachingAllocator(capacity=2**50), {}, []
    for action, number, size in events:
        if action == "a":
            blocks[number] = allocator.allocate(size)
        else:
            allocator.free(blocks.pop(number))
        counters.append(f"{allocator.device_calls} {allocator.reserved} {allocator.in_use}")
    assert output.splitlines() == counters
