"""What compiles while a block of code runs: Triton's kernels and the graphs of torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that has everything compiled inside, by name, when the block ends.

    A kernel that Triton reads from its cache on disk counts: it stalls a step, if for a shorter time. Triton's
    interpreter compiles nothing.
    """
    names: list[str] = []
    graphs_before = _graphs()
    with _triton_kernels(names):
        yield names
    names += ["graph of torch.compile"] * (_graphs() - graphs_before)


@contextmanager
def no_compilation() -> Iterator[None]:
    """Asserts that a block compiles nothing, a step of training after `warmup_allocator`, say.

    Raises:
        RuntimeError: something was compiled; the message names it. Raised when the block ends.
    """
    with compilations() as names:
        yield
    if names:
        counted = [f"{name} ({names.count(name)} times)" for name in dict.fromkeys(names)]
        raise RuntimeError(f"no_compilation: the block compiled {', '.join(counted)}")


def _graphs() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")  # not loaded: nothing was compiled yet
    return 0 if dynamo is None else dynamo.counters["stats"]["unique_graphs"]


@contextmanager
def _triton_kernels(names: list[str]) -> Iterator[None]:
    triton = sys.modules.get("triton")
    if triton is None:
        yield
        return
    runtime = triton.knobs.runtime
    before = runtime.jit_post_compile_hook

    def note(*arguments: Any, fn: Any, **options: Any) -> Any:
        names.append(fn.name)
        return None if before is None else before(*arguments, fn=fn, **options)

    runtime.jit_post_compile_hook = note
    try:
        yield
    finally:
        runtime.jit_post_compile_hook = before
