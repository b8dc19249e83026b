"""Record what Triton and torch.compile compile while a block of code runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Yield a list that holds the name of everything compiled in the block, once the block has ended.

    A kernel that Triton reads from its cache on disk counts, because it also stalls a step, if for a shorter time.
    Triton's interpreter compiles nothing.
    """
    names: list[str] = []
    graphs_before = _count_graphs()
    with _record_triton_kernels(names):
        yield names
    names += ["graph of torch.compile"] * (_count_graphs() - graphs_before)


@contextmanager
def no_compilation() -> Iterator[None]:
    """Assert that a block compiles nothing, for example a training step after `warmup_allocator`.

    Raises:
        RuntimeError: Something was compiled. The message names it. Raised when the block ends.
    """
    with compilations() as names:
        yield
    if names:
        counted = [f"{name} ({names.count(name)} times)" for name in dict.fromkeys(names)]
        raise RuntimeError(f"no_compilation: the block compiled {', '.join(counted)}")


def _count_graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")  # not loaded: nothing has been compiled
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]


@contextmanager
def _record_triton_kernels(names: list[str]) -> Iterator[None]:
    triton = sys.modules.get("triton")
    if triton is None:
        yield
        return
    runtime = triton.knobs.runtime
    hook_before = runtime.jit_post_compile_hook

    def record(*arguments: Any, fn: Any, **options: Any) -> Any:
        names.append(fn.name)
        return None if hook_before is None else hook_before(*arguments, fn=fn, **options)

    runtime.jit_post_compile_hook = record
    try:
        yield
    finally:
        runtime.jit_post_compile_hook = hook_before
