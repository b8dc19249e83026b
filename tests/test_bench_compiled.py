"""The Triton kernels compile for every chip and configuration, and use the chip's matrix and copy instructions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
ROOT = Path(__file__).parent.parent

#: Bytes of shared memory that a program may use. Chips 8.6 and 8.9 use the tiles of chip 80 and have 99 KiB.
SHARED_LIMIT = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
#: Whether this is the compiler that the tiles were chosen with. Other compilers may need more registers.
PINNED = triton.__version__.startswith("3.7.")
PRODUCTS = ("forward", "backward_query", "backward_key")


def compile_all(chip, head_dim, *options):
    """Compiles in a process of its own, because the interpreter of other tests cannot compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench", "aot", "--json", "--chips", str(chip), "--head-dims", str(head_dim)]
    run = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("chip", [80, 90])
def test_causal_kernels_compile_into_the_right_instructions(chip):
    check_reports(compile_all(chip, 16, "--variants", "causal"), chip, 16)


CONFIGURATIONS = [(chip, head_dim) for head_dim in (16, 32, 64, 128, 256) for chip in (80, 90, 100)]
COMMON = [(80, 64), (90, 64), (100, 64), (90, 256)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "head_dim"),
    [pytest.param(*each, marks=[] if each in COMMON else pytest.mark.exhaustive) for each in CONFIGURATIONS],
)
def test_every_configuration_compiles_into_the_right_instructions(chip, head_dim):
    check_reports(compile_all(chip, head_dim), chip, head_dim)


def check_reports(reports, chip, head_dim):
    assert {report["kernel"] for report in reports} == {*PRODUCTS, "norms", "backward_terms"}
    for report in reports:
        assert report["shared_bytes"] <= SHARED_LIMIT[chip], report
        assert report["registers"] > 16, f"compiled to an empty kernel: {report}"
        if report["dtype"] == "fp32":
            continue
        if report["kernel"] in PRODUCTS:
            assert report["matrix"] > 0, report
            if chip == 80 or report["variant"] != "mask":  # a mask hides single rows, which rules out bulk copies
                assert report["copies"] > 0, report
        if head_dim <= 128:  # with a mask or packing, kernels may spill a little: they clear tiles in registers
            plain = report["variant"] in ("causal", "full")
            most = 0 if plain and PINNED else 256
            assert report["spilled_bytes"] <= most, report
