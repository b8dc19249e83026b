"""Benchmarks. `python -m bench COMMAND --help` lists the arguments of a command."""

from __future__ import annotations

import argparse
import importlib

#: Each command's module and purpose. Only the module of the chosen command is imported: some need optional packages.
COMMANDS = {
    "resize_batch": ("bench.resize_batch.cpu", "resize_batch on the CPU beside the same written by hand"),
    "resize_calls": ("bench.resize_batch.calls", "what a call of resize_batch costs on a small batch"),
    "resize_packed": ("bench.resize_batch.packed", "what a call of resize_batch costs on a packed batch"),
    "alibi_attention": ("bench.alibi_attention.cpu", "attention on the CPU beside torch's own"),
    "short": ("bench.alibi_attention.short", "attention on the CPU where warmup begins, beside torch's own"),
    "decoding": ("bench.alibi_attention.decoding", "one query over a long cache on the CPU, beside torch's own"),
    "calls": ("bench.alibi_attention.calls", "what a call of attention costs beside its arithmetic, GPUs pretended"),
    "batching": ("bench.batching.cpu", "batches by length: padding, planning beside infinibatch, resuming"),
    "files": ("bench.batching.files", "from compressed files to tensors, beside infinibatch: time and shares of it"),
    "readers": ("bench.batching.readers", "formats of tokens, each read beside the format's own library"),
    "large_corpus": ("bench.batching.large_corpus", "a billion tokens: first batch, resuming, memory"),
    "text_files": ("bench.batching.text_files", "text in chunk files, Parquet and Arrow: size, and time of reading"),
    "diagnostics": (
        "bench.moment_statistics.cpu",
        "cost of monitoring an optimizer on the CPU, beside a training step",
    ),
    "many_devices": ("bench.parallel.cpu", "bytes that ranks exchange for sharded tokens, and the balance of heads"),
    "aot": (
        "bench.alibi_attention.compiled",
        "registers, spills, memory and instructions of the Triton kernels, without a GPU",
    ),
    "device": (
        "bench.gpu.command",
        "everything that needs a GPU, in four parts: tests, attention, memory, tuning",
    ),
    "training": ("bench.training.command", "does warmup train better: time to a loss, stability, extrapolation, speed"),
    "page": ("bench.page", "the tables of the pages on benchmarks, stability and many devices, from the records"),
    "show": ("bench.shown", "copy a finished demo or search to the records, for its figure"),
    "pictures": ("bench.pictures", "figures that need no records: reach, a plan, a replay of the allocator"),
    "report": ("bench.report", "figures and tables from the records"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, purpose) in COMMANDS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    chosen, rest = parser.parse_known_args()
    module = importlib.import_module(COMMANDS[chosen.command][0])
    own = argparse.ArgumentParser(prog=f"python -m bench {chosen.command}", description=module.__doc__)
    module.add_arguments(own)
    module.main(own.parse_args(rest))


if __name__ == "__main__":
    main()
