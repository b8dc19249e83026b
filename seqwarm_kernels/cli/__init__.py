"""The command line: `python -m seqwarm_kernels {info,plan,padding,tune,demo}`."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .. import __version__
from ..ops import backends
from . import demo, padding, plan, tune


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status of the process."""
    parsed = _parser().parse_args(arguments)
    return parsed.run(parsed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m seqwarm_kernels")
    subcommands = parser.add_subparsers(required=True, metavar="{info,plan,padding,tune,demo}")

    info_parser = subcommands.add_parser("info", help="show versions, devices, and the available backends")
    info_parser.add_argument("--json", action="store_true", help="print a JSON object")
    info_parser.set_defaults(run=_run_info)
    for name, command, text in (
        ("plan", plan, "show the lengths of a schedule, and the tokens and FLOPs that it saves"),
        ("padding", padding, "compare the padding of several ways of batching, on text"),
        ("tune", tune, "find a schedule that trains stably, by short trials"),
        ("demo", demo, "train a small model with and without warmup, and compare"),
    ):
        subparser = subcommands.add_parser(name, help=text)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _run_info(arguments: argparse.Namespace) -> int:
    info = collect_info()
    print(json.dumps(info, indent=2) if arguments.json else "\n".join(_info_lines(info)))
    return 0


def collect_info() -> dict[str, Any]:
    """Installed versions and available backends, as plain values. A `..._problem` says why a value is None."""
    triton, triton_problem = _triton_version()
    extension_problem = backends.problem("native")
    extension = None if extension_problem else importlib.import_module("seqwarm_kernels._C").build_info()
    return {
        "python": platform.python_version(),
        "seqwarm_kernels": __version__,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "triton": triton,
        "triton_problem": triton_problem,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "extension": extension,
        "extension_problem": extension_problem,
        "backends": {operator: _backend_problems(operator) for operator in backends.operators()},
    }


def _triton_version() -> tuple[str | None, str | None]:
    try:
        return importlib.import_module("triton").__version__, None
    except ImportError as error:
        return None, str(error)


def _backend_problems(operator: str) -> dict[str, dict[str, str | None]]:
    """Device type -> backend -> why the backend cannot serve the operator there, None if it can."""
    return {
        device_type: {backend: backends.why_not(operator, backend, device_type) for backend in backends.BACKENDS}
        for device_type in backends.DEVICE_TYPES
    }


def _info_lines(info: dict[str, Any]) -> Iterator[str]:
    def line(name: str, value: str) -> str:
        return f"{name:<16} {value}"

    for name in ("python", "seqwarm_kernels", "torch"):
        yield line(name, info[name])
    yield line("CUDA of torch", info["torch_cuda"] or "none")
    yield line("triton", info["triton"] or f"none: {info['triton_problem']}")
    yield line("GPUs", ", ".join(info["gpus"]) or "none")
    extension = info["extension"]
    if extension is None:
        yield line("extension", f"none: {info['extension_problem']}")
    else:
        versions = f"torch {extension['torch']}, CUDA {extension['cuda'] or 'none'}, {extension['compiler']}"
        yield line("extension", versions)
    for operator, device_types in info["backends"].items():
        yield ""
        yield operator
        for device_type, problems in device_types.items():
            for backend, problem in problems.items():
                state = "available" if problem is None else f"no: {problem}"
                yield f"  {device_type:<5} {backend:<10} {state}"
