"""The files that are mutated, and the tests that run on each mutant."""

from __future__ import annotations

import shlex
from typing import NamedTuple


class Run(NamedTuple):
    tests: tuple[str, ...]  #: arguments of pytest
    environment: tuple[tuple[str, str], ...] = ()
    build: str = "this CPU"  #: of the kernels, for mutants of C++ files


class Target(NamedTuple):
    file: str
    runs: tuple[Run, ...]  #: until one fails, the quickest first


def _tests(text: str) -> tuple[str, ...]:
    """Arguments of pytest: paths below tests/, and options after them."""
    words = shlex.split(text)
    paths = next((place for place, word in enumerate(words) if word.startswith("-")), len(words))
    return (*(f"tests/{word}" for word in words[:paths]), *words[paths:])


def _targets(folder: str, names: str, *runs: str | Run) -> list[Target]:
    found = tuple(Run(_tests(run)) if isinstance(run, str) else run for run in runs)
    return [Target(f"{folder}/{name}", found) for name in names.split()]


def _native(names: str, tests: str, wider: str) -> list[Target]:
    """Files of native attention. All builds emulate AMX, so the tests run without it first, and with it afterwards."""
    without_amx = (("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"),)
    older = (("ATEN_CPU_CAPABILITY", "avx2"), ("ONEDNN_MAX_CPU_ISA", "AVX2"))
    runs = (
        Run(_tests(tests), without_amx),
        Run(_tests(tests)),
        Run(_tests("block_counts"), without_amx, "work"),
        Run(_tests("block_counts"), build="work"),
        Run(_tests(tests), older, "AVX2"),
        Run(_tests(tests), build="sanitizers"),
        Run(_tests(wider), without_amx),
        Run(_tests(wider)),
    )
    return _targets("csrc/alibi_attention/cpu", names, *runs)


_RESIZE_BATCH, _RESIZE_PACKED = "ops/test_resize_batch.py", "ops/test_resize_packed.py"
_SERVED = "ops/test_operators.py::test_every_backend_that_is_installed_serves_every_operator"
_MOMENTS = f"{_SERVED} ops/test_moment_statistics.py ops/test_defaults.py -m 'not gpu' -k"
_GRID = "ops/test_attention_kernels.py"
_NATIVE = "ops/test_attention_native.py"
_NATIVE_SHORT, _NATIVE_DECODING = "ops/test_attention_native_short.py", "ops/test_attention_decoding.py -k 'not triton'"
_SHORT_ROWS = "ops/test_attention_triton_short.py"
_CALLS, _SKIPPING = "attention/test_fast_path.py", "attention/test_attended_share.py"
#: Compiles kernels for two chips, and looks at their loops and copies.
_COMPILED = "test_bench_compiled.py -k causal_kernels"
_OPS = "seqwarm_kernels/ops"

TARGETS = [
    *_targets(
        "seqwarm_kernels/schedule",
        "scheduler.py milestones.py pacing.py token_lr.py watch.py attachment.py",
        "schedule",
    ),
    *_targets(
        "seqwarm_kernels/trainers",
        "schedule_state.py",
        "trainers/test_schedule_state.py trainers/test_contract.py -k 'schedule_state or huggingface or lightning'",
        "trainers/test_context_parallel.py -m slow",
    ),
    *_targets(
        "seqwarm_kernels/trainers/huggingface",
        "added.py",
        "trainers/test_contract.py trainers/test_huggingface.py trainers/test_loss_huggingface.py -k huggingface",
        "trainers/test_loaders.py -k 'hugging_face or HuggingFace'",
        "trainers/test_parallelism_config.py -m slow",
    ),
    *_targets(
        "seqwarm_kernels/trainers/composer",
        "token_counter.py",
        "trainers/composer/test_callbacks.py trainers/test_contract.py -k composer",
    ),
    *_targets(
        "seqwarm_kernels/data/batch_planning",
        "planner.py plan.py packed.py padded.py",
        "data/test_planner.py data/test_packed.py data/test_batches.py data/test_budget.py data/test_pieces.py",
    ),
    *_targets(
        "seqwarm_kernels/resizing",
        "functional.py containers.py entry_names.py layout.py masks.py options.py plan.py packing.py packed.py "
        "buffers.py",
        f"resizing {_RESIZE_BATCH} ops/test_forward_mode.py -k '(not triton or serve) and not two_ranks'",
    ),
    *_targets(
        "seqwarm_kernels/allocator",
        "warmup.py rehearsal.py training_pass.py snapshot.py example_batch.py memory.py distributed.py compilation.py "
        "report.py",
        "allocator utils/test_progress.py -k 'not two_ranks and not inside_fully_shard'",
        "allocator/test_distributed.py -m slow",
    ),
    *_targets(
        "seqwarm_kernels/attention",
        "functional.py calls.py fast_path.py context_parallel.py slopes.py attended_share.py",
        "attention ops/test_host_values.py ops/test_dropout_offsets.py ops/test_forward_mode.py -k 'not triton'",
    ),
    *_targets(f"{_OPS}/moment_statistics", "triton_kernel.py triton.py", f"{_MOMENTS} 'not native'"),
    *_targets(
        f"{_OPS}/resize_batch",
        "triton_kernel.py triton.py",
        f"{_SERVED} {_RESIZE_BATCH} ops/test_resize_batch_launch.py ops/test_defaults.py -k 'triton or launch'",
    ),
    *_targets(f"{_OPS}/resize_packed", "triton_kernel.py triton.py", f"{_RESIZE_PACKED} -k 'triton or kernel'"),
    *_targets(
        f"{_OPS}/alibi_attention",
        "triton_tiles.py triton_reach.py triton_forward.py triton_backward_ranges.py triton_backward_key.py "
        "triton_backward_query.py",
        f"ops/test_attention_triton.py ops/test_attention_triton_parts.py {_SHORT_ROWS} {_SKIPPING} "
        "-k 'triton and not native'",
        f"{_GRID} ops/test_dropout_offsets.py -k triton",
        _COMPILED,
    ),
    *_targets(
        f"{_OPS}/alibi_attention",
        "triton.py triton_readers.py",
        f"{_SERVED} ops/test_attention_readers.py ops/test_attention_triton.py ops/test_attention_launch.py "
        "ops/test_attention_launch_arguments.py -k 'not pretended'",
        f"{_SHORT_ROWS} {_SKIPPING} {_GRID} -k triton",
    ),
    *_targets(
        f"{_OPS}/alibi_attention",
        "triton_decode.py triton_decode_kernel.py",
        "ops/test_attention_decoding.py -k triton",
        f"{_GRID} -k 'triton and quer'",
        f"{_SKIPPING} ops/test_attention_launch.py -k 'not pretended'",
    ),
    *_targets(
        f"{_OPS}/alibi_attention",
        "triton_short.py triton_short_kernel.py",
        _SHORT_ROWS,
        f"ops/test_dropout_offsets.py {_GRID} -k triton",
        _COMPILED,
    ),
    *_targets("csrc/resize_batch", "call.cpp cpu.cpp", f"{_SERVED} {_RESIZE_BATCH} -k native"),
    *_targets("csrc/resize_packed", "cpu.cpp", f"{_SERVED} {_RESIZE_PACKED} -k 'native or serves'"),
    *_targets("csrc/moment_statistics", "cpu.cpp", f"{_MOMENTS} 'not triton'"),
    *_native(
        "problem.h queries.h keys.h reach.h scores.h simd.h products.cpp cpu_features.cpp forward.cpp backward.cpp "
        "operator.cpp",
        f"{_NATIVE} ops/test_attention_native_ranges.py {_SKIPPING} {_GRID} -k native",
        f"{_NATIVE_SHORT} ops/test_host_values.py {_NATIVE_DECODING}",
    ),
    *_native(
        "dropout.h",
        "ops/test_dropout.py ops/test_dropout_offsets.py -k native",
        f"{_NATIVE} {_GRID} -k native",
    ),
    *_native(
        "short_tile.h short_scores.h short_products.h short_rows.h short_forward.cpp short_backward.cpp "
        "short_sequences.cpp tile_products.cpp pair_products.cpp",
        _NATIVE_SHORT,
        f"{_NATIVE} {_GRID} -k native",
    ),
    *_native("decode_forward.cpp", _NATIVE_DECODING, f"{_NATIVE} {_GRID} -k native"),
    *_targets(
        "csrc/alibi_attention/cpu",
        "options.cpp",
        "ops/test_host_values.py ops/test_attention_direct_calls.py -k 'native or direct_calls'",
    ),
    *_targets("csrc/alibi_attention", "direct.cpp", _CALLS),
    *_targets("csrc/calls", "key.cpp", f"ops/test_call_key.py {_CALLS} -k 'not triton'"),
]
