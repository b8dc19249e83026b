"""The command `info`: versions, devices, and the available backends."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import __version__
from ..utils.switches import SWITCHES, switch
from .common import Result, usage_errors

HELP = "show versions, devices, and the available backends"
EXAMPLES = """\
examples:
  seqwarm info
  seqwarm info --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options of its own."""


def run(arguments: argparse.Namespace) -> Result:
    with usage_errors():
        list(map(switch, SWITCHES))
    info = collect_info()
    return Result(info, "\n".join(_lines(info)))


def collect_info() -> dict[str, Any]:
    """Installed versions and available backends, as plain values. A `..._problem` says why a value is None, or what it
    lacks."""
    import torch

    from ..ops import backends

    try:
        triton, triton_problem = importlib.import_module("triton").__version__, None
    except ImportError as error:
        triton, triton_problem = None, str(error)
    if triton_problem is None and torch.cuda.device_count():
        triton_problem = launcher_problem()
    problem = backends.problem("native")
    return {
        "python": platform.python_version(),
        "seqwarm_kernels": __version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "triton": triton,
        "triton_problem": triton_problem,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "kernels": None if problem else backends.kernels.build_info(),
        "kernels_problem": problem,
        "short_calls_problem": backends.kernels.module_problem,
        "bfloat16_instructions": backends.kernels.bfloat16_instructions(),
        "switches": {name: switch(name) for name in SWITCHES},
        "backends": {
            operator: {
                device: {backend: backends.why_not(operator, backend, device) for backend in backends.BACKENDS}
                for device in backends.DEVICE_TYPES
            }
            for operator in backends.operators()
        },
    }


def cpu_name() -> str:
    """As lscpu or sysctl name it, with the number of cores."""
    if platform.system() == "Darwin":
        name = _printed("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string").strip()
    elif shutil.which("lscpu"):
        entries = dict(line.split(":", 1) for line in _printed("lscpu").splitlines() if ":" in line)
        name = entries.get("Model name", "").strip()
    else:
        name = ""
    return f"{name or platform.processor()}, {os.cpu_count()} cores"


def _printed(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}).stdout


def launcher_problem() -> str | None:
    """What Triton lacks to launch kernels. On first use it compiles C code for that."""
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"Triton needs a C compiler, and {' or '.join(compilers)} is not found: install gcc, or set CC"
    header = Path(sysconfig.get_path("include", "posix_prefix")) / "Python.h"
    return None if header.exists() else f"Triton needs {header}: install the headers of Python (python3-dev)"


def _lines(info: dict[str, Any]) -> Iterator[str]:
    def line(name: str, value: str) -> str:
        return f"{name:<16} {value}"

    for name in ("python", "seqwarm_kernels", "torch"):
        yield line(name, info[name])
    yield line("CPU", f"{info['cpu']}, {info['cpu_capability']}")
    yield line("CUDA of torch", info["torch_cuda"] or "none")
    yield line("triton", ": ".join(filter(None, (info["triton"] or "none", info["triton_problem"]))))
    yield line("GPUs", ", ".join(info["gpus"]) or "none")
    kernels = info["kernels"]
    if kernels is None:
        yield line("kernels", f"none: {info['kernels_problem']}")
    else:
        yield line("kernels", f"built with torch {kernels['torch']}, {kernels['compiler']}")
        yield line("threads", str(info["threads"]))
        problem = info["short_calls_problem"]
        yield line("short calls", "yes" if problem is None else f"no, calls take some 25 µs longer: {problem}")
        yield line("bfloat16", f"multiplied by {info['bfloat16_instructions'] or 'float32 instructions'} on CPUs")
    for name, choice in info["switches"].items():
        yield f"{name} {choice} ({SWITCHES[name]})"
    for operator, device_types in info["backends"].items():
        yield f"\n{operator}"
        for device_type, problems in device_types.items():
            if device_type == "cuda" and info["torch_cuda"] is None and not info["gpus"]:
                continue  # "CUDA of torch: none" has said it
            for backend, problem in problems.items():
                state = "available" if problem is None else f"no: {problem}"
                yield f"  {device_type:<5} {backend:<10} {state}"
