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
SHARED_LIMIT = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
#: Bytes that a causal or full kernel with 16-bit inputs and head_dim at most 128 may spill. On 90 the fastest tiles do.
SPILL_LIMIT = {80: 56, 90: 104, 100: 0, 120: 80}
#: Whether this is the compiler that the tiles were chosen with. Other compilers may need more registers.
PINNED = triton.__version__.startswith("3.7.")
NEWER = not triton.__version__.startswith(("3.6.", "3.7."))
PRODUCTS = ("forward", "backward_query", "backward_key")
SHORT = ("short_forward", "short_backward")
GLUON = ("gluon_forward", "gluon_backward_query", "gluon_backward_key")
#: Instructions for spills in the loops of both consumers.
LOOP_SPILL_LIMIT = {"gluon_forward": 96 if NEWER else 40, "gluon_backward_query": 24, "gluon_backward_key": 48}
#: Kernels, head_dims and variants of which a compiler moves exponentials behind the last wait in one of the loops.
NOT_OVERLAPPED = {("gluon_backward_query", 128, "window")}
NOT_OVERLAPPED_BY_NEWER = {("gluon_backward_query", 64, "slopes"), ("gluon_backward_query", 128, "slopes")}
#: Kernels of which two programs fit on a multiprocessor of chip 90.
TWO_PROGRAMS = (*PRODUCTS, *SHORT)


def compile_all(chips, head_dim, *options):
    """Compiles in a process of its own, because the interpreter of other tests cannot compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    sizes = ["--chips", *map(str, chips), "--head-dims", str(head_dim)]
    command = [sys.executable, "-m", "bench", "attention_compiled", "--json", *sizes, *options]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_the_forward_kernels_compile():
    reports = compile_all([90], 64, "--kernels", "forward", "gluon_forward", "--variants", "causal")
    assert [report["kernel"] for report in reports] == ["forward", "gluon_forward"]
    for report in reports:
        check(report)


@pytest.mark.slow
def test_causal_kernels_compile_into_the_right_instructions():
    """On this one, mutants of the kernels are tried."""
    for report in compile_all([80, 90], 16, "--variants", "causal"):
        check(report)


CONFIGURATIONS = [(chip, head_dim) for head_dim in (16, 32, 64, 128, 256) for chip in (80, 90, 100, 120)]


@pytest.mark.exhaustive  # `make test-triton-oldest` and `make test-triton-newest` compile those of chip 90
@pytest.mark.parametrize(("chip", "head_dim"), CONFIGURATIONS)
def test_every_configuration_compiles_into_the_right_instructions(chip, head_dim):
    reports = compile_all([chip], head_dim)
    others = {"decode", "merge", "key_norms", "backward_ranges", *SHORT}
    hopper = set(GLUON) if chip == 90 and head_dim in (64, 128) else set()
    assert {report["kernel"] for report in reports} == {*PRODUCTS, *others, *hopper}
    for report in reports:
        check(report)


def check(report):
    chip, head_dim = report["chip"], report["head_dim"]
    assert report["shared_bytes"] <= SHARED_LIMIT[chip], report
    two = report["kernel"] in TWO_PROGRAMS and report["variant"] != "128 tokens"  # which fills one alone
    if chip == 90 and head_dim in (64, 128) and report["dtype"] != "fp32" and two:
        assert 2 * report["shared_bytes"] <= SHARED_LIMIT[chip] - 1024, report  # 1 KiB belongs to each program
        assert 2 * report["registers"] * 32 * num_warps(report) <= 65536, report
    assert report["registers"] > 16, f"compiled to an empty kernel: {report}"
    if report["dtype"] == "fp32" and report["variant"] != "tf32":
        return
    if report["kernel"] in GLUON:
        check_gluon(report)
        return
    if report["kernel"] in PRODUCTS:
        assert report["matrix"] > 0, report
        assert report["pipelined"] == report["loops"] >= 2, report
    if head_dim <= 128:  # kernels that clear tiles in registers, or are not the default, may spill a little
        plain = report["variant"].startswith(("causal", "full"))
        most = SPILL_LIMIT[chip] if plain and PINNED else 256
        if report["kernel"] in SHORT:  # waiting for memory alone would cost more
            most = {"head_offsets": 1024, "grouped": 1024}.get(report["variant"], 512)
        assert report["spilled_bytes"] <= most, report


def check_gluon(report):
    assert report["shared_bytes"] <= SHARED_LIMIT[90], report
    assert report["consumers"] == report["loops"] == 2, report
    call = report["kernel"], report["head_dim"], report["variant"]
    if call not in NOT_OVERLAPPED and not (NEWER and call in NOT_OVERLAPPED_BY_NEWER):
        assert report["overlapped"] == 2, report
    assert report["spilled_in_loops"] <= LOOP_SPILL_LIMIT[report["kernel"]], report


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_every_gluon_kernel_compiles_as_the_page_says(head_dim):
    reports = compile_all([90], head_dim, "--kernels", *GLUON)
    for report in reports:
        check_gluon(report)
    of_call = {(report["kernel"], report["variant"]): report for report in reports if report["dtype"] == "bf16"}
    page = (ROOT / "docs" / "kernels" / "attention_gpu.md").read_text()
    for kernel in GLUON:
        row = page_row(of_call[kernel, "full"], of_call[kernel, "causal"])
        assert row in page or not PINNED, row


def page_row(full, causal):
    tiles, _, stages = full["tiles"].split(", ")
    loops = ", ".join(f"{report['overlapped']} of {report['loops']}" for report in (full, causal))
    spills = [f"{full[name]}, {causal[name]}" for name in ("spilled_bytes", "spilled_in_loops")]
    shared = f"{full['shared_bytes'] / 1024:.1f}"
    cells = [full["kernel"], full["head_dim"], f"{tiles}, {stages}", full["consumers"], loops, *spills, shared]
    return "| " + " | ".join(map(str, cells)) + " |"


AMD_LIMIT = 64 * 1024  # bytes of shared memory on gfx942, of which gfx950 has 160 KiB


@pytest.mark.parametrize(
    ("chip", "head_dim", "options"),
    [
        pytest.param("gfx942", 64, ("--variants", "causal", "full"), marks=pytest.mark.slow),
        *(
            pytest.param(chip, head_dim, (), marks=pytest.mark.exhaustive)
            for chip in ("gfx942", "gfx950")
            for head_dim in (16, 32, 64, 128, 256)
        ),
    ],
)
def test_kernels_for_amd_spill_nothing(chip, head_dim, options):
    reports = compile_all([chip], head_dim, *options)
    others = {"decode", "merge", "key_norms", "backward_ranges"}
    assert {report["kernel"] for report in reports} == {*PRODUCTS, *SHORT, *others}
    for report in reports:
        check_amd(report)


def check_amd(report):
    assert report["spilled_bytes"] == 0, report
    assert report["shared_bytes"] <= AMD_LIMIT, report
    assert report["registers"] > 8, f"compiled to an empty kernel: {report}"
    if report["kernel"] in (*PRODUCTS, *SHORT, "decode"):
        assert report["matrix"] > 0, report
        assert report["wide_loads"] > 0 or report["head_dim"] < 64, report
    if report["kernel"] != "decode":  # which reads its few queries item by item
        assert report["other_loads"] == 0, report  # the compiler knows that tiles are aligned, and below 2 GiB


def num_warps(report):
    return int(report["tiles"].split(", ")[1])
