"""The command `check`: does every operator compute the right results on this machine, and how fast is it?"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from .common import Result
from .info import collect_info

HELP = "compare every operator with its reference on this machine, and time it"
EXAMPLES = """\
Every backend that runs here runs small calls of every operator, forward and
backward. The results are compared with the reference in float64. The command
ends with status 1 after a mismatch, or if a backend is missing. On a CPU all
takes less than a minute; on a GPU the first run compiles its kernels.

examples:
  seqwarm check
  seqwarm check --backends reference
  seqwarm check --json
"""

#: As in seqwarm_kernels.ops.backends, whose import takes seconds.
BACKENDS = ("triton", "native", "reference")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backends",
        nargs="+",
        choices=BACKENDS,
        metavar="BACKEND",
        help=f"what is checked, and must run: {', '.join(BACKENDS)} (default: all that run are checked; native "
        "must run on Linux and on Apple silicon, triton on GPUs)",
    )


def run(arguments: argparse.Namespace) -> Result:
    from ..self_check.run import check_backends, expected_backends, missing_backends
    from ..self_check.speed import time_all

    start = time.perf_counter()
    missing = missing_backends(arguments.backends or expected_backends())
    results = [asdict(row) for row in check_backends(arguments.backends or BACKENDS)]
    failed = bool(missing) or any(row["mismatches"] for row in results)
    report = {
        "environment": collect_info(),
        "missing": missing,
        "results": results,
        "times": [] if failed else list(time_all()),  # a kernel that fails cannot be timed
        "seconds": time.perf_counter() - start,
    }
    return Result(report, "\n".join(_lines(report)), int(failed))


def _lines(report: dict[str, Any]) -> Iterator[str]:
    layout = "{:<23}{:<8}{:<11}{:<10}{:<12}{}"
    yield layout.format("operator", "device", "backend", "dtype", "result", "largest error, as a share of its budget")
    mismatches = []
    for row in report["results"]:
        where = row["operator"], row["device"], row["backend"], row["dtype"]
        worst = f"{row['worst_share']:.2f} ({row['worst']})" if row["worst_share"] else "0"
        yield layout.format(*where, "MISMATCH" if row["mismatches"] else "ok", worst)
        mismatches += [f"  {' '.join(where)}, {mismatch}" for mismatch in row["mismatches"]]
    yield ""
    if report["results"]:
        yield f"{len(mismatches)} mismatches" if mismatches else "all results are within their budgets"
    yield from mismatches
    for backend, reason in report["missing"].items():
        yield f"{backend} is missing: {reason}"
    if report["times"]:
        names = list(report["times"][0]["milliseconds"])
        yield "\n" + "{:<58}".format("milliseconds") + "".join(f"{name:>20}" for name in names)
    for case in report["times"]:
        times = (f"{case['milliseconds'][name]:.3g}" if name in case["milliseconds"] else "-" for name in names)
        yield f"{case['case']:<58}" + "".join(f"{milliseconds:>20}" for milliseconds in times)
