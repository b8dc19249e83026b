"""The files that are mutated, and the tests that run on each mutant."""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    file: str
    tests: tuple[str, ...]  #: arguments of pytest
    wider: tuple[str, ...] = ()  #: those of tests that take longer, for mutants that survive the others


def _in_folder(folder: str, names: str, *tests: str, wider: tuple[str, ...] = ()) -> list[Target]:
    return [Target(f"{folder}/{name}", tests, wider) for name in names.split()]


_SILENT_RESULTS = "tests/test_silent_results.py"
_RESIZE_BATCH = "tests/ops/test_resize_batch.py"
_RESIZE_PACKED = "tests/ops/test_resize_packed.py"
_RESIZING = ("tests/resizing", _RESIZE_BATCH)
_SERVED = "tests/ops/test_operators.py::test_every_backend_that_is_installed_serves_every_operator"
_MOMENTS = (_SERVED, "tests/ops/test_moment_statistics.py", "tests/ops/test_defaults.py", "-m", "not gpu", "-k")
_ATTENTION_GRID = ("tests/ops/test_attention_kernels.py", "tests/ops/test_attention_kernels_varlen.py", "-k")
_SHORT_ROWS = "tests/ops/test_attention_triton_short.py"
_CALL_KIND = "tests/ops/test_call_kind.py"
_SKIPPING = "tests/attention/test_attended_share.py"

TARGETS = [
    *_in_folder(
        "seqwarm_kernels/schedule",
        "scheduler.py pacing.py plan.py",
        "tests/schedule/test_scheduler.py",
        "tests/schedule/test_plan.py",
        _SILENT_RESULTS,
    ),
    Target("seqwarm_kernels/schedule/token_lr.py", ("tests/schedule/test_token_lr.py",)),
    Target(
        "seqwarm_kernels/schedule/attachment.py",
        ("tests/schedule/test_attachment.py", _SILENT_RESULTS, "-k", "not processes"),
    ),
    Target(
        "seqwarm_kernels/trainers/huggingface/logs.py",
        ("tests/trainers/test_tokens_huggingface.py", "tests/trainers/test_monitor_huggingface.py"),
    ),
    Target(
        "seqwarm_kernels/trainers/composer/token_counter.py",
        ("tests/trainers/composer/test_token_counter.py",),
        wider=("tests/trainers/composer/test_two_ranks.py",),
    ),
    *_in_folder(
        "seqwarm_kernels/data/batch_planning",
        "planner.py plan.py packed.py padded.py",
        *("tests/data/test_planner.py", "tests/data/test_packed.py", "tests/data/test_arguments.py"),
    ),
    Target(
        "seqwarm_kernels/resizing/checked_call.py",
        (*_RESIZING, _SILENT_RESULTS, "-k", "(not triton or serve) and not two_ranks"),
    ),
    *_in_folder(
        "seqwarm_kernels/allocator",
        "snapshot.py pinned_buffers.py",
        *(
            "tests/allocator/test_snapshot.py",
            "tests/allocator/test_pinned_buffers.py",
            "tests/allocator/test_warmup.py",
        ),
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
        wider=(_RESIZE_BATCH, "-k", "triton and padding", "-m", "not gpu"),
    ),
    *_in_folder(
        "seqwarm_kernels/ops/resize_packed", "triton_kernel.py triton.py", _RESIZE_PACKED, "-k", "triton or kernel"
    ),
    *_in_folder(
        "seqwarm_kernels/ops/alibi_attention",
        "triton_tiles.py triton_reach.py triton_forward.py triton_backward_ranges.py triton_backward_key.py "
        "triton_backward_query.py",
        *("tests/ops/test_attention_triton.py", _SHORT_ROWS, _SKIPPING, "-k", "triton and not native"),
        wider=(*_ATTENTION_GRID[:2], "tests/ops/test_dropout_origins.py", "-k", "triton"),
    ),
    *_in_folder(
        "seqwarm_kernels/ops/alibi_attention",
        "triton.py triton_readers.py",
        *(_SERVED, "tests/ops/test_attention_triton.py", "tests/ops/test_attention_launch.py", "-k", "not pretended"),
        wider=(_SHORT_ROWS, _SKIPPING, *_ATTENTION_GRID, "triton"),
    ),
    *_in_folder(
        "seqwarm_kernels/ops/alibi_attention",
        "triton_decode.py triton_decode_kernel.py",
        "tests/ops/test_attention_triton_decoding.py",
        wider=(_SKIPPING, "tests/ops/test_attention_launch.py", "-k", "not pretended"),
    ),
    Target("csrc/resize_batch/call.cpp", (_SERVED, _RESIZE_BATCH, "tests/cuda_shim", "-k", "native")),
    Target("csrc/resize_batch/direct.cpp", _RESIZING),
    Target("csrc/resize_batch/cpu.cpp", (_SERVED, _RESIZE_BATCH, "-k", "native")),
    Target("csrc/resize_packed/cpu.cpp", (_SERVED, _RESIZE_PACKED, "-k", "native or serves")),
    Target("csrc/resize_batch/cuda.cu", ("tests/cuda_shim", "-k", "native")),
    Target("csrc/moment_statistics/cpu.cpp", (*_MOMENTS, "not triton")),
    *_in_folder(
        "csrc/alibi_attention/cpu",
        "problem.h queries.h keys.h reach.h scores.h simd.h products.cpp forward.cpp backward.cpp operator.cpp",
        *("tests/ops/test_attention_native.py", _SKIPPING, *_ATTENTION_GRID, "native"),
    ),
    Target(
        "csrc/alibi_attention/cpu/dropout.h",
        (
            "tests/ops/test_dropout.py",
            "tests/ops/test_dropout_origins.py",
            "tests/ops/test_attention_native.py",
            *_ATTENTION_GRID,
            "native",
        ),
    ),
    *_in_folder(
        "csrc/alibi_attention/cpu",
        "short_tile.h short_scores.h short_products.h short_rows.h short_forward.cpp short_backward.cpp "
        "short_sequences.cpp tile_products.cpp pair_products.cpp",
        "tests/ops/test_attention_native_short.py",
        wider=("tests/ops/test_attention_native.py", *_ATTENTION_GRID, "native"),
    ),
    Target(
        "csrc/alibi_attention/cpu/decode_forward.cpp",
        ("tests/ops/test_attention_native_decoding.py",),
        wider=("tests/ops/test_attention_native.py", *_ATTENTION_GRID, "native"),
    ),
    Target("csrc/alibi_attention/direct.cpp", (_CALL_KIND,)),
    Target("csrc/calls/kind.cpp", (_CALL_KIND, "-k", "not triton")),
]
