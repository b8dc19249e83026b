"""Why mutants survive. They count as survivors, also those that no test can tell from the code."""

from __future__ import annotations

from typing import NamedTuple

from .mutants import Mutant


class Reason(NamedTuple):
    file: str
    code: str  #: the line, without its indentation
    before: str
    after: str
    reason: str


REASONS = [
    Reason(
        "csrc/resize_batch/call.cpp",
        "const bool readable = input.device() == device || (device.is_cuda() && input.is_cpu() && input.is_pinned());",
        "&&",
        "||",
        "Runs on a GPU only.",
    ),
    Reason(
        "seqwarm_kernels/data/batch_planning/packed.py",
        'by_length = np.argsort(lengths, kind="stable")',
        '"stable"',
        "('stableX')",
        "Equivalent: NumPy reads the first letter of the name.",
    ),
    Reason(
        "seqwarm_kernels/data/batch_planning/padded.py",
        "_MAX_MOVED, _MIN_MOVED, _MOVED_SCALE = 16, 2, 10_000",
        "10_000",
        "(10001)",
        "The extent of a search. With another one batches are as valid.",
    ),
    Reason(
        "seqwarm_kernels/data/batch_planning/padded.py",
        "_INFEASIBLE = np.int64(1) << 60",
        "1",
        "(2)",
        "Equivalent: any number larger than all sums.",
    ),
    Reason(
        "seqwarm_kernels/data/batch_planning/padded.py",
        "_INFEASIBLE = np.int64(1) << 60",
        "60",
        "(61)",
        "Equivalent: any number larger than all sums.",
    ),
    Reason(
        "seqwarm_kernels/data/batch_planning/padded.py",
        "inside = full[(full > runs.begins[run]) & (full < greedy)]",
        "full > runs.begins[run]",
        "(full >= runs.begins[run])",
        "Equivalent: a boundary is tried twice.",
    ),
    Reason(
        "seqwarm_kernels/data/batch_planning/padded.py",
        "inside = full[(full > runs.begins[run]) & (full < greedy)]",
        "full < greedy",
        "(full <= greedy)",
        "Equivalent: a boundary is tried twice.",
    ),
    Reason(
        "seqwarm_kernels/data/batch_planning/plan.py",
        'if array.dtype.kind not in "iu" and array.size:',
        '"iu"',
        "('iuX')",
        "Equivalent: NumPy has no kind X.",
    ),
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
        'if device.type == "cuda":',
        '"cuda"',
        "('cudaX')",
        "Runs on a GPU only.",
    ),
    Reason(
        "seqwarm_kernels/ops/moment_statistics/triton.py",
        "entries = entries.pin_memory().to(device, non_blocking=True)",
        "entries.pin_memory().to(device, non_blocking=True)",
        "(entries.pin_memory().to(device))",
        "Runs on a GPU only, where the same values arrive later.",
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
        "stream = 0",
        "0",
        "(1)",
        "On a CPU the number only names an entry of a cache.",
    ),
    Reason(
        "seqwarm_kernels/ops/moment_statistics/triton.py",
        "if torch.cuda.is_current_stream_capturing():",
        "torch.cuda.is_current_stream_capturing()",
        "(not torch.cuda.is_current_stream_capturing())",
        "Runs on a GPU only.",
    ),
    Reason(
        "seqwarm_kernels/ops/moment_statistics/triton.py",
        "totals = torch.empty(table.chunks, dtype=torch.float64, device=device)",
        "torch.empty(table.chunks, dtype=torch.float64, device=device)",
        "(torch.empty(table.chunks, dtype=torch.float64))",
        "On a CPU the result is the same, since the default device is the CPU.",
    ),
    Reason(
        "seqwarm_kernels/ops/moment_statistics/triton.py",
        "maxima = torch.empty(table.chunks, dtype=torch.float32, device=device)",
        "torch.empty(table.chunks, dtype=torch.float32, device=device)",
        "(torch.empty(table.chunks, device=device))",
        "float32 is torch's default. With float64 as the default, the maxima are the same numbers.",
    ),
    Reason(
        "seqwarm_kernels/ops/moment_statistics/triton.py",
        "maxima = torch.empty(table.chunks, dtype=torch.float32, device=device)",
        "torch.empty(table.chunks, dtype=torch.float32, device=device)",
        "(torch.empty(table.chunks, dtype=torch.float32))",
        "On a CPU the result is the same.",
    ),
    Reason(
        "seqwarm_kernels/ops/moment_statistics/triton_kernel.py",
        "if start >= lead and start + BLOCK <= end:",
        "start + BLOCK <= end",
        "(start + BLOCK < end)",
        "Equivalent: a full block is then read with a mask.",
    ),
    Reason(
        "seqwarm_kernels/ops/moment_statistics/triton_kernel.py",
        'total += tl.load(totals + index, mask=index < end, other=0, cache_modifier=".cg")',
        'tl.load(totals + index, mask=index < end, other=0, cache_modifier=".cg")',
        "(tl.load(totals + index, mask=index < end, cache_modifier='.cg'))",
        "The interpreter reads 0 where the mask hides; a GPU may read anything.",
    ),
    Reason(
        "seqwarm_kernels/ops/moment_statistics/triton_kernel.py",
        "base = tl.load(table + BASE * entries + entry)",
        "table + BASE * entries",
        "(table - BASE * entries)",
        "Equivalent: BASE is 0.",
    ),
    Reason(
        "seqwarm_kernels/ops/resize_batch/triton_kernel.py",
        "if PADS and KIND != ROW:",
        "PADS and KIND != ROW",
        "(PADS or KIND != ROW)",
        "Equivalent: only padding reaches beyond the source, and a row has no more new rows than tokens.",
    ),
    Reason(
        "seqwarm_kernels/resizing/checked_call.py",
        "out.keep_while_read(tensors if mask is None else [*tensors, mask])",
        "mask is None",
        "(mask is not None)",
        "Runs on a GPU only: it keeps pinned memory alive while it is read.",
    ),
    Reason(
        "seqwarm_kernels/resizing/checked_call.py",
        "torch.empty(shape, dtype=dtype, device=tensors[0].device)",
        "torch.empty(shape, dtype=dtype, device=tensors[0].device)",
        "(torch.empty(shape, dtype=dtype))",
        "On a CPU the result is the same.",
    ),
    Reason(
        "seqwarm_kernels/resizing/checked_call.py",
        "torch.empty(shape, dtype=dtype, device=tensors[0].device)",
        "0",
        "(1)",
        "Equivalent: the tensors of a batch are on one device.",
    ),
    Reason(
        "seqwarm_kernels/schedule/plan.py",
        'figure = Figure(figsize=(7, 4), layout="constrained")',
        'Figure(figsize=(7, 4), layout="constrained")',
        "(Figure(figsize=(7, 4)))",
        "The look of the figure, which no test fixes.",
    ),
    Reason(
        "seqwarm_kernels/schedule/plan.py",
        'figure.legend(loc="outside upper center", ncols=2)',
        'figure.legend(loc="outside upper center", ncols=2)',
        "(figure.legend(loc='outside upper center'))",
        "The look of the figure, which no test fixes.",
    ),
    Reason(
        "seqwarm_kernels/ops/resize_batch/triton.py",
        "return Entry(source, out, row_stride, inner[0], 1, 1)",
        "1",
        "(2)",
        "Equivalent: with one item in a token, its stride is not used.",
    ),
    Reason(
        "seqwarm_kernels/ops/resize_batch/triton.py",
        "return torch.zeros((), dtype=torch.int64, device=device)",
        "torch.zeros((), dtype=torch.int64, device=device)",
        "(torch.zeros((), device=device))",
        "Runs on a GPU only.",
    ),
    Reason(
        "seqwarm_kernels/ops/resize_batch/triton.py",
        "return _running_total_of(device, torch.cuda.current_stream(device).cuda_stream)",
        "return _running_total_of(device, torch.cuda.current_stream(device).cuda_stream)",
        "return None",
        "Runs on a GPU only.",
    ),
    Reason(
        "seqwarm_kernels/allocator/pinned_buffers.py",
        "_BYTES = 2**24",
        "2**24",
        "(2 * 24)",
        "Changes speed only: with other sizes the copies are the same.",
    ),
    Reason(
        "seqwarm_kernels/allocator/pinned_buffers.py",
        "_BYTES = 2**24",
        "2",
        "(3)",
        "Changes speed only: with other sizes the copies are the same.",
    ),
    Reason(
        "seqwarm_kernels/allocator/pinned_buffers.py",
        "_BYTES = 2**24",
        "24",
        "(25)",
        "Changes speed only: with other sizes the copies are the same.",
    ),
    Reason(
        "seqwarm_kernels/allocator/pinned_buffers.py",
        'self.buffers = [torch.empty(_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]',
        'torch.empty(_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)',
        "(torch.empty(_BYTES, dtype=torch.uint8, pin_memory=True))",
        "Differs only under another default device.",
    ),
    Reason(
        "seqwarm_kernels/ops/alibi_attention/triton_tiles.py",
        "ends = tl.load(cu_seqlens + candidate, mask=inside, other=2**31 - 1)",
        "1",
        "(2)",
        "Equivalent: `inside` hides the value as well.",
    ),
    Reason(
        "seqwarm_kernels/ops/alibi_attention/triton_backward_query.py",
        "scores = tl.dot(rows.query, tl.trans(key), input_precision=PRECISION) * scale2",
        "tl.dot(rows.query, tl.trans(key), input_precision=PRECISION)",
        "(tl.dot(rows.query, tl.trans(key)))",
        "Runs on a GPU only: the interpreter multiplies in float32.",
    ),
    Reason(
        "csrc/moment_statistics/cpu.cpp",
        "largest[index] = sizes[index] > largest[index] ? sizes[index] : largest[index];  // not NaN; the sum keeps it",
        ">",
        ">=",
        "Equivalent: an equal number takes its place.",
    ),
    Reason(
        "seqwarm_kernels/ops/alibi_attention/triton_backward_ranges.py",
        "attended_begin = tl.load(ranges + blocks * 2, mask=present, other=FAR)",
        "tl.load(ranges + blocks * 2, mask=present, other=FAR)",
        "(tl.load(ranges + blocks * 2, mask=present))",
        "Equivalent: the end of such a block is 0, so it hits no tile.",
    ),
    Reason(
        "seqwarm_kernels/ops/alibi_attention/triton_reach.py",
        "_RELATIVE_MARGIN = tl.constexpr(1 + 2**-9)",
        "2",
        "(3)",
        "Another margin for rounding. No known input needs the whole margin.",
    ),
    Reason(
        "seqwarm_kernels/ops/alibi_attention/triton_reach.py",
        "_ABSOLUTE_MARGIN = tl.constexpr(2**-4)",
        "2",
        "(3)",
        "Another margin for rounding. No known input needs the whole margin.",
    ),
    Reason(
        "seqwarm_kernels/ops/alibi_attention/triton_tiles.py",
        "tile = tl.where(kept[:, None], tile, 0.0)",
        "0.0",
        "(1.0)",
        "Equivalent: any finite number, since its weights are 0.",
    ),
    Reason(
        "csrc/alibi_attention/cpu/short_tile.h",
        "int64_t head_ = 0;",
        "0",
        "(0 + 1)",
        "Equivalent: set_head comes before head.",
    ),
    Reason(
        "seqwarm_kernels/allocator/snapshot.py",
        "_PIECE = 2**22",
        "2",
        "(3)",
        "Changes memory and speed only.",
    ),
    Reason(
        "seqwarm_kernels/allocator/snapshot.py",
        "weights ^= weights >> 29",
        "weights >> 29",
        "(weights << 29)",
        "Other weights that look random.",
    ),
    Reason(
        "seqwarm_kernels/allocator/snapshot.py",
        "total = 3 * total + (piece * weights).sum()",
        "3 * total + (piece * weights).sum()",
        "(3 * total - (piece * weights).sum())",
        "Another sum that shows changes as well.",
    ),
    Reason(
        "seqwarm_kernels/allocator/snapshot.py",
        "return tensor.is_cuda",
        "return tensor.is_cuda",
        "return None",
        "Runs on a GPU only.",
    ),
    Reason(
        "seqwarm_kernels/allocator/snapshot.py",
        "weights = torch.arange(1, len(piece) + 1, device=piece.device)",
        "torch.arange(1, len(piece) + 1, device=piece.device)",
        "(torch.arange(1, len(piece) + 1))",
        "On a CPU the result is the same.",
    ),
    Reason(
        "seqwarm_kernels/ops/alibi_attention/triton_reach.py",
        "_RELATIVE_MARGIN = tl.constexpr(1 + 2**-9)",
        "9",
        "(10)",
        "Another margin for rounding. No known input needs the whole margin.",
    ),
    Reason(
        "csrc/alibi_attention/cpu/short_tile.h",
        "int64_t num_columns_ = 0, num_keys_ = 0, num_spans_ = 0, num_pieces_ = 0;",
        "0",
        "(0 + 1)",
        "Equivalent: `place` sets all of them first.",
    ),
    Reason(
        "csrc/alibi_attention/cpu/short_forward.cpp",
        "query_rows_.open_queries(problem_.query, tile_, false);",
        "false",
        "true",
        "Changes speed only: queries without a key are cleared later.",
    ),
    Reason(
        "csrc/alibi_attention/cpu/short_backward.cpp",
        "const Vec zero = Vec::loadu(log2_sum_ + first), grad_lse = Vec::loadu(grad_lse_ + first);",
        "+",
        "-",
        "With AVX-512, on which the mutants ran, `first` is 0.",
    ),
    Reason(
        "csrc/calls/kind.cpp",
        "int overflow = 0;",
        "0",
        "(0 + 1)",
        "Equivalent: Python's function sets it.",
    ),
]

_REASON_OF = {entry[:4]: entry.reason for entry in REASONS}


def reason_of(mutant: Mutant) -> str | None:
    return _REASON_OF.get((mutant.file, mutant.code, mutant.before, mutant.after))
