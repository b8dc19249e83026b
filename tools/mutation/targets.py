"""The files that are mutated, and the tests that run on each mutant."""

from __future__ import annotations

from typing import NamedTuple


class Target(NamedTuple):
    file: str
    first: tuple[str, ...]  #: arguments of pytest: the tests that fail soonest
    then: tuple[str, ...]  #: the tests that run on a mutant which passes the first ones


def _in_folder(folder: str, names: str, first: tuple[str, ...], then: tuple[str, ...]) -> list[Target]:
    return [Target(f"{folder}/{name}", first, then) for name in names.split()]


_PLANNING = ("tests/data/test_planner.py", "tests/data/test_packed.py")
_PLANNING_USERS = ("tests/data/test_warmup.py", "tests/data/test_sampler.py", "tests/data/test_arguments.py")
_ALLOCATOR = ("tests/allocator/test_warmup.py", "tests/allocator/test_memory.py")
_ALLOCATOR_USERS = ("tests/allocator",)
_RESIZING = ("tests/resizing", "tests/ops/test_resize_batch.py")
_RESIZING_USERS = (
    "tests/ops/test_operators.py",
    "tests/ops/test_resize_batch_launch.py",
    "tests/schedule/test_attachment.py",
)
_MOMENTS = ("tests/ops/test_moment_statistics.py",)
_MOMENTS_USERS = ("tests/diagnostics/test_moments.py",)
_ATTENTION = ("tests/ops/test_attention_kernels.py", "tests/ops/test_attention_kernels_varlen.py")
_ATTENTION_USERS = ("tests/ops", "tests/attention")

TARGETS = [
    *_in_folder(
        "seqwarm_kernels/schedule",
        "scheduler.py plan.py attachment.py",
        ("tests/schedule",),
        ("tests/test_silent_results.py", "tests/data/test_warmup.py", "tests/trainers/test_schedule_state.py"),
    ),
    *_in_folder(
        "seqwarm_kernels/data/batch_planning", "planner.py plan.py packed.py padded.py", _PLANNING, _PLANNING_USERS
    ),
    Target("seqwarm_kernels/resizing/checked_call.py", _RESIZING, _RESIZING_USERS),
    Target("seqwarm_kernels/allocator/snapshot.py", _ALLOCATOR, _ALLOCATOR_USERS),
    *_in_folder(
        "seqwarm_kernels/ops/moment_statistics",
        "triton_kernel.py triton.py",
        (*_MOMENTS, "-k", "triton"),
        (*_MOMENTS, *_MOMENTS_USERS),
    ),
    *_in_folder(
        "seqwarm_kernels/ops/resize_batch",
        "triton_kernel.py triton.py",
        ("tests/ops/test_resize_batch.py", "tests/ops/test_resize_batch_launch.py", "-k", "triton"),
        (*_RESIZING, *_RESIZING_USERS),
    ),
    *_in_folder(
        "seqwarm_kernels/ops/alibi_attention",
        "triton_tiles.py triton_reach.py triton_forward.py triton_backward_terms.py triton_backward_key.py "
        "triton_backward_query.py triton.py",
        (*_ATTENTION, "-k", "triton"),
        (*_ATTENTION_USERS, "-k", "triton or launch or share"),
    ),
    *_in_folder("csrc/resize_batch", "call.cpp cpu.cpp", _RESIZING, _RESIZING_USERS),
    Target("csrc/moment_statistics/cpu.cpp", (*_MOMENTS, "-k", "native"), (*_MOMENTS, *_MOMENTS_USERS)),
    *_in_folder(
        "csrc/alibi_attention/cpu",
        "problem.h queries.h keys.h reach.h scores.h dropout.h simd.h products.cpp forward.cpp backward.cpp "
        "operator.cpp",
        (*_ATTENTION, "-k", "native"),
        (*_ATTENTION_USERS, "-k", "native or share or distributed"),
    ),
]
