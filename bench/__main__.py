"""Benchmarks. `python -m bench COMMAND --help` lists the arguments of a command."""

from __future__ import annotations

import argparse
import importlib
import sys

#: By subject: each command's module and purpose. Only the module of the chosen command is imported: some need optional
#: packages.
GROUPS = {
    "attention": {
        "alibi_attention": ("bench.alibi_attention.cpu", "on the CPU beside torch's own"),
        "attention_short": ("bench.alibi_attention.short", "where warmup begins, beside torch's own"),
        "attention_decoding": ("bench.alibi_attention.decoding", "one query over a long cache, beside torch's own"),
        "attention_calls": ("bench.alibi_attention.calls", "what a call costs beside its arithmetic, GPUs pretended"),
        "attention_compiled": (
            "bench.alibi_attention.compiled",
            "registers, spills, memory and instructions of the Triton kernels, without a GPU",
        ),
    },
    "resize_batch": {
        "resize_batch": ("bench.resize_batch.cpu", "on the CPU beside the same written by hand"),
        "resize_calls": ("bench.resize_batch.calls", "what a call costs on a small batch, in each layer"),
        "resize_packed": ("bench.resize_batch.packed", "what a call costs on a packed batch"),
    },
    "batches and files": {
        "batching": ("bench.batching.cpu", "batches by length: padding, planning beside infinibatch, resuming"),
        "batching_files": ("bench.batching.files", "from compressed files to tensors, beside infinibatch"),
        "batching_readers": ("bench.batching.readers", "formats of tokens, each beside the format's own library"),
        "batching_texts": ("bench.batching.text_files", "text in chunk files, Parquet and Arrow: size and time"),
        "batching_large": ("bench.batching.large_corpus", "a billion tokens: first batch, resuming, memory"),
    },
    "diagnostics": {
        "diagnostics": ("bench.moment_statistics.cpu", "cost of monitoring an optimizer beside a training step"),
    },
    "many devices": {
        "many_devices": ("bench.parallel.cpu", "bytes that ranks exchange for sharded tokens, balance of heads"),
    },
    "GPU": {
        "device": ("bench.gpu.command", "all that needs a GPU: tests, memory, training, attention"),
    },
    "training": {
        "ramp": ("bench.ramp", "times of all steps of a ramp, segments beside flatten, compiled"),
        "training": ("experiments.command", "does warmup train better: time, stability, extrapolation, speed"),
    },
    "records and pages": {
        "report": ("bench.report", "figures and tables from the records"),
        "page": ("bench.page", "write the tables of the pages of docs from the records"),
        "pictures": ("bench.pictures", "figures that need no records: reach, a plan, a replay of the allocator"),
        "keep": ("bench.shown", "copy a finished demo or search to the records, for its figure"),
    },
}
COMMANDS = {name: module for commands in GROUPS.values() for name, (module, _) in commands.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        usage="python -m bench COMMAND [ARGUMENTS]",
        description=__doc__,
        epilog="\n\n".join(map(_listed, GROUPS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, nargs="?", help=argparse.SUPPRESS)
    chosen = parser.parse_args(sys.argv[1:2]).command
    if chosen is None:
        parser.print_help()
        return
    module = importlib.import_module(COMMANDS[chosen])
    own = argparse.ArgumentParser(prog=f"python -m bench {chosen}", description=module.__doc__)
    if hasattr(module, "add_arguments"):
        module.add_arguments(own)
    module.main(own.parse_args(sys.argv[2:]))


def _listed(group: str) -> str:
    return "\n".join([f"{group}:", *(f"  {name:<20}{purpose}" for name, (_, purpose) in GROUPS[group].items())])


if __name__ == "__main__":
    main()
