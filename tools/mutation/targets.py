"""The files that are mutated, and the tests that run on each mutant."""

from __future__ import annotations

from typing import NamedTuple


class Run(NamedTuple):
    tests: tuple[str, ...]  #: arguments of pytest
    environment: tuple[tuple[str, str], ...] = ()
    build: str = "this CPU"  #: of the kernels, for mutants of C++ files


class Target(NamedTuple):
    file: str
    tests: Run
    wider: tuple[Run, ...] = ()  #: what takes longer, for mutants that survive


def _in_folder(folder: str, names: str, *tests: str, wider: tuple[Run, ...] = ()) -> list[Target]:
    return [Target(f"{folder}/{name}", Run(tests), wider) for name in names.split()]


def _native(names: str, *tests: str, wider: tuple[str, ...]) -> list[Target]:
    """Files of native attention. All builds emulate AMX, so the tests run without it first, and with it afterwards."""
    without_amx = (("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"),)
    older = (("ATEN_CPU_CAPABILITY", "avx2"), ("ONEDNN_MAX_CPU_ISA", "AVX2"))
    runs = (
        Run(tests),
        Run(("tests/block_counts",), without_amx, "work"),
        Run(("tests/block_counts",), build="work"),
        Run(tests, older, "AVX2"),
        Run(tests, build="sanitizers"),
        Run(wider, without_amx),
        Run(wider),
    )
    return [Target(f"csrc/alibi_attention/cpu/{name}", Run(tests, without_amx), runs) for name in names.split()]


_RESIZE_BATCH = "tests/ops/test_resize_batch.py"
_RESIZE_PACKED = "tests/ops/test_resize_packed.py"
_RESIZING = ("tests/resizing", _RESIZE_BATCH)
_SERVED = "tests/ops/test_operators.py::test_every_backend_that_is_installed_serves_every_operator"
_MOMENTS = (_SERVED, "tests/ops/test_moment_statistics.py", "tests/ops/test_defaults.py", "-m", "not gpu", "-k")
_ATTENTION_GRID = ("tests/ops/test_attention_kernels.py", "tests/ops/test_attention_kernels_varlen.py", "-k")
_SHORT_ROWS = "tests/ops/test_attention_triton_short.py"
_CALL_KIND = "tests/ops/test_call_kind.py"
_CALLS = "tests/attention/test_fast_path.py"
_SKIPPING = "tests/attention/test_attended_share.py"

#: Compiles kernels for two chips, and looks at their loops and copies.
_COMPILED = Run(("tests/test_bench_compiled.py", "-k", "causal_kernels"))

TARGETS = [
    *_in_folder(
        "seqwarm_kernels/schedule",
        "scheduler.py milestones.py pacing.py",
        *("tests/schedule/test_scheduler.py", "tests/schedule/test_state.py", "tests/schedule/test_watch.py"),
    ),
    *_in_folder("seqwarm_kernels/schedule", "token_lr.py", "tests/schedule/test_token_lr.py"),
    *_in_folder("seqwarm_kernels/schedule", "watch.py", "tests/schedule/test_watch.py"),
    *_in_folder(
        "seqwarm_kernels/schedule",
        "attachment.py",
        *("tests/schedule/test_attachment.py", "tests/schedule/test_attachment_options.py"),
        *("tests/schedule/test_watch.py", "tests/resizing/test_masks.py", "-k", "not processes"),
    ),
    *_in_folder(
        "seqwarm_kernels/trainers",
        "schedule_state.py",
        *("tests/trainers/test_schedule_state.py", "tests/trainers/test_contract.py"),
        *("-k", "schedule_state or huggingface or lightning"),
        wider=(Run(("tests/trainers/test_context_parallel.py", "-m", "slow")),),
    ),
    *_in_folder(
        "seqwarm_kernels/trainers/huggingface",
        "added.py",
        *("tests/trainers/test_contract.py", "tests/trainers/test_monitors.py"),
        *("tests/trainers/test_monitor_huggingface.py", "tests/trainers/test_loss_huggingface.py"),
        *("-k", "huggingface"),
        wider=(
            Run(("tests/trainers/test_loaders.py", "-k", "TestTrainer")),
            Run(("tests/trainers/test_parallelism_config.py", "-m", "slow")),
        ),
    ),
    *_in_folder(
        "seqwarm_kernels/trainers/composer",
        "token_counter.py",
        *("tests/trainers/composer/test_callbacks.py", "tests/trainers/test_contract.py", "-k", "composer"),
    ),
    *_in_folder(
        "seqwarm_kernels/data/batch_planning",
        "planner.py plan.py packed.py padded.py",
        *("tests/data/test_planner.py", "tests/data/test_packed.py"),
        *("tests/data/test_counted_lengths.py", "tests/data/test_pieces.py", "tests/data/test_prepare.py"),
    ),
    *_in_folder(
        "seqwarm_kernels/resizing",
        "functional.py containers.py entry_names.py layout.py masks.py options.py plan.py packing.py packed.py "
        "buffers.py",
        *(*_RESIZING, "tests/ops/test_forward_mode.py"),
        *("-k", "(not triton or serve) and not two_ranks"),
    ),
    *_in_folder(
        "seqwarm_kernels/allocator",
        "warmup.py rehearsal.py training_pass.py snapshot.py example_batch.py memory.py",
        *("tests/allocator/test_snapshot.py", "tests/allocator/test_warmup.py", "tests/allocator/test_arguments.py"),
        *("tests/allocator/test_memory.py", "tests/allocator/test_example_batch.py"),
        *("tests/allocator/test_transformers.py", "tests/allocator/test_distributed.py"),
        "tests/utils/test_progress.py",
        *("-k", "not two_ranks and not inside_fully_shard"),
    ),
    *_in_folder(
        "seqwarm_kernels/attention",
        "functional.py calls.py fast_path.py context_parallel.py slopes.py",
        *("tests/attention", "tests/ops/test_host_values.py", "tests/ops/test_dropout_origins.py"),
        *("tests/ops/test_forward_mode.py", "-k", "not triton"),
    ),
    *_in_folder("seqwarm_kernels/attention", "reach.py", "tests/attention/test_reach.py"),
    *_in_folder(
        "seqwarm_kernels/attention",
        "attended_share.py",
        *(_SKIPPING, f"{_CALLS}::test_attended_share_has_the_options_of_attention", "-k", "not triton"),
    ),
    *_in_folder(
        "seqwarm_kernels/allocator",
        "distributed.py compilation.py report.py",
        *("tests/allocator/test_zoo.py", "tests/allocator/test_distributed.py", "tests/allocator/test_compilation.py"),
        *("tests/allocator/test_memory.py", "tests/allocator/test_warmup.py"),
        wider=(Run(("tests/allocator/test_distributed.py", "-m", "slow")),),
    ),
    *_in_folder("seqwarm_kernels/ops/moment_statistics", "triton_kernel.py triton.py", *_MOMENTS, "not native"),
    *_in_folder(
        "seqwarm_kernels/ops/resize_batch",
        "triton_kernel.py triton.py",
        *(
            _SERVED,
            _RESIZE_BATCH,
            "tests/ops/test_resize_batch_launch.py",
            "tests/ops/test_defaults.py",
        ),
        *("-k", "triton or launch"),
        wider=(Run((_RESIZE_BATCH, "-k", "triton and padding", "-m", "not gpu")),),
    ),
    *_in_folder(
        "seqwarm_kernels/ops/resize_packed", "triton_kernel.py triton.py", _RESIZE_PACKED, "-k", "triton or kernel"
    ),
    *_in_folder(
        "seqwarm_kernels/ops/alibi_attention",
        "triton_tiles.py triton_reach.py triton_forward.py triton_backward_ranges.py triton_backward_key.py "
        "triton_backward_query.py",
        *("tests/ops/test_attention_triton.py", "tests/ops/test_attention_triton_parts.py", _SHORT_ROWS, _SKIPPING),
        *("-k", "triton and not native"),
        wider=(Run((*_ATTENTION_GRID[:2], "tests/ops/test_dropout_origins.py", "-k", "triton")), _COMPILED),
    ),
    *_in_folder(
        "seqwarm_kernels/ops/alibi_attention",
        "triton.py triton_readers.py",
        *(_SERVED, "tests/ops/test_attention_readers.py", "tests/ops/test_attention_triton.py"),
        *("tests/ops/test_attention_launch.py", "tests/ops/test_attention_launch_arguments.py", "-k", "not pretended"),
        wider=(Run((_SHORT_ROWS, _SKIPPING, *_ATTENTION_GRID, "triton")),),
    ),
    *_in_folder(
        "seqwarm_kernels/ops/alibi_attention",
        "triton_decode.py triton_decode_kernel.py",
        "tests/ops/test_attention_triton_decoding.py",
        wider=(Run((_SKIPPING, "tests/ops/test_attention_launch.py", "-k", "not pretended")),),
    ),
    *_in_folder(
        "seqwarm_kernels/ops/alibi_attention",
        "triton_short.py triton_short_kernel.py",
        _SHORT_ROWS,
        wider=(Run(("tests/ops/test_dropout_origins.py", *_ATTENTION_GRID, "triton")), _COMPILED),
    ),
    *_in_folder("csrc/resize_batch", "call.cpp cpu.cpp", *(_SERVED, _RESIZE_BATCH, "-k", "native")),
    *_in_folder("csrc/resize_packed", "cpu.cpp", *(_SERVED, _RESIZE_PACKED, "-k", "native or serves")),
    *_in_folder("csrc/moment_statistics", "cpu.cpp", *_MOMENTS, "not triton"),
    *_native(
        "problem.h queries.h keys.h reach.h scores.h simd.h products.cpp cpu_features.cpp forward.cpp backward.cpp "
        "operator.cpp",
        *("tests/ops/test_attention_native.py", "tests/ops/test_attention_native_ranges.py", _SKIPPING),
        *(*_ATTENTION_GRID, "native"),
        wider=(
            *("tests/ops/test_attention_native_short.py", "tests/ops/test_attention_native_decoding.py"),
            "tests/ops/test_host_values.py",
        ),
    ),
    *_native(
        "dropout.h",
        *("tests/ops/test_dropout.py", "tests/ops/test_dropout_origins.py", "-k", "native"),
        wider=("tests/ops/test_attention_native.py", *_ATTENTION_GRID, "native"),
    ),
    *_native(
        "short_tile.h short_scores.h short_products.h short_rows.h short_forward.cpp short_backward.cpp "
        "short_sequences.cpp tile_products.cpp pair_products.cpp",
        "tests/ops/test_attention_native_short.py",
        wider=("tests/ops/test_attention_native.py", *_ATTENTION_GRID, "native"),
    ),
    *_native(
        "decode_forward.cpp",
        "tests/ops/test_attention_native_decoding.py",
        wider=("tests/ops/test_attention_native.py", *_ATTENTION_GRID, "native"),
    ),
    *_in_folder(
        "csrc/alibi_attention/cpu",
        "options.cpp",
        *("tests/ops/test_host_values.py", "tests/ops/test_attention_direct_calls.py", "-k", "native or direct_calls"),
    ),
    *_in_folder("csrc/alibi_attention", "direct.cpp", _CALLS),
    *_in_folder("csrc/calls", "kind.cpp", *(_CALL_KIND, _CALLS, "-k", "not triton")),
]
