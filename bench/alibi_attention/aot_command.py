"""Compile every configuration of the Triton kernels for chips that are not here; print what the compiler made of it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from tqdm import tqdm

from .compiled import CHIPS, HEAD_DIMS, cases, compile_kernel, table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chips", type=int, nargs="+", choices=CHIPS, default=CHIPS, help="90 for capability 9.0")
    parser.add_argument("--head-dims", type=int, nargs="+", choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each kernel, as they come")


def main(arguments: argparse.Namespace) -> None:
    reports = []
    everything = list(cases(tuple(arguments.chips), tuple(arguments.head_dims)))
    for case in tqdm(everything, desc="aot", unit="kernel", disable=arguments.json):
        reports.append(compile_kernel(*case))
        if arguments.json:
            print(json.dumps(asdict(reports[-1])), flush=True)
    if not arguments.json:
        print(table(reports))
