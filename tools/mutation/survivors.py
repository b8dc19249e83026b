"""Why mutants survive. They count as survivors, also those that no test can tell from the code."""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    file: str
    code: str  #: the line, without its indentation
    before: str
    after: str
    reason: str


_LOOK = "The look of the figure, which no test fixes."

REASONS = [
    Reason(
        "seqwarm_kernels/data/batch_planning/plan.py",
        "array = array.astype(np.int64, copy=False)",
        "False",
        "(True)",
        "Equivalent: a copy that nobody changes.",
    ),
    Reason(
        "seqwarm_kernels/data/batch_planning/planner.py",
        'order = np.argsort(shorter, kind="stable")',
        '"stable"',
        "('stableX')",
        "Equivalent: NumPy reads the first letter of the name.",
    ),
    Reason(
        "seqwarm_kernels/ops/moment_statistics/triton.py",
        "entries = entries.pin_memory().to(device, non_blocking=True)",
        "True",
        "(False)",
        "Runs on a GPU only, where the same values arrive later.",
    ),
    Reason(
        "seqwarm_kernels/ops/moment_statistics/triton.py",
        "maxima = torch.empty(table.chunks, dtype=torch.float32, device=device)",
        "torch.empty(table.chunks, dtype=torch.float32, device=device)",
        "(torch.empty(table.chunks, device=device))",
        "float32 is torch's default. With float64 as the default, the maxima are the same numbers.",
    ),
    Reason(
        "seqwarm_kernels/schedule/plan.py",
        'figure = Figure(figsize=(7, 4), layout="constrained")',
        'Figure(figsize=(7, 4), layout="constrained")',
        "(Figure(figsize=(7, 4)))",
        _LOOK,
    ),
    Reason(
        "seqwarm_kernels/schedule/plan.py",
        'figure.legend(loc="outside upper center", ncols=2)',
        'figure.legend(loc="outside upper center", ncols=2)',
        "(figure.legend(loc='outside upper center'))",
        _LOOK,
    ),
    Reason(
        "seqwarm_kernels/resizing/checked_call.py",
        "results = [self._view(tensor, kind, rows, length) for tensor, kind in zip(tensors, self.kinds, strict=True)]",
        "zip(tensors, self.kinds, strict=True)",
        "(zip(tensors, self.kinds))",
        "Equivalent: a kind is made for each tensor.",
    ),
    Reason(
        "seqwarm_kernels/allocator/snapshot.py",
        "torch.cuda.set_rng_state_all(self.cuda)",
        "torch.cuda.set_rng_state_all(self.cuda)",
        "pass",
        "A test that was added since should kill it; it has not been tried again.",
    ),
    Reason(
        "seqwarm_kernels/ops/moment_statistics/triton.py",
        "return torch.zeros((), dtype=torch.int32, device=device)",
        "torch.zeros((), dtype=torch.int32, device=device)",
        "(torch.zeros((), dtype=torch.int32))",
        "A test that was added since should kill it; it has not been tried again.",
    ),
    Reason(
        "seqwarm_kernels/ops/moment_statistics/triton.py",
        "totals = torch.empty(table.chunks, dtype=torch.float64, device=device)",
        "torch.empty(table.chunks, dtype=torch.float64, device=device)",
        "(torch.empty(table.chunks, dtype=torch.float64))",
        "On a CPU the result is the same, since the default device is the CPU.",
    ),
    Reason(
        "seqwarm_kernels/resizing/checked_call.py",
        "new_entries[name] = _repeated(entries[name], rows // max(self.batch_size, 1))",
        "1",
        "(2)",
        "A test that was added since should kill it; it has not been tried again.",
    ),
    Reason(
        "seqwarm_kernels/schedule/attachment.py",
        "return args, kwargs",
        "return args, kwargs",
        "return None",
        "A test that was added since should kill it; it has not been tried again.",
    ),
    Reason(
        "seqwarm_kernels/schedule/attachment.py",
        "named = len(names) == len(args) and not set(names) & kwargs.keys()",
        "len(names) == len(args) and not set(names) & kwargs.keys()",
        "(len(names) == len(args) or not set(names) & kwargs.keys())",
        "A test that was added since should kill it; it has not been tried again.",
    ),
    Reason(
        "seqwarm_kernels/schedule/plan.py",
        "changes = [milestone for milestone in scheduler.milestones() if milestone.progress < total]",
        "milestone.progress < total",
        "(milestone.progress <= total)",
        "A test that was added since should kill it; it has not been tried again.",
    ),
]
