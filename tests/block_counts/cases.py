"""Calls whose work is counted: the basic blocks that native kernels execute, without the libraries that they call."""

import ctypes
import json
import platform
from functools import partial
from pathlib import Path

import torch

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, resize_batch
from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.library import overload

RECORDS = Path(__file__).with_name("records.json")


def counter():
    """The function that reads the count, or None in a build that does not count."""
    if backends.module is None:
        return None
    read = getattr(ctypes.CDLL(backends.module.__file__), "seqwarm_work", None)
    if read is not None:
        read.restype = ctypes.c_int64
    return read


def machine():
    """Other compilers and CPUs execute other blocks."""
    compiler = backends.module.build_info()["compiler"]
    instructions = backends.module.bfloat16_instructions()
    return f"{platform.machine()}, {compiler}, {torch.backends.cpu.get_cpu_capability()}, bfloat16: {instructions}"


def records():
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}


def measure(case, read):
    """The work of one call on one thread. Calls before it fill caches and keep memory."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    call = case()
    for _ in range(3):
        before = read()
        call()
    torch.set_num_threads(threads)
    return read() - before


def attention(
    length, *, batch_size=2, heads=(4, 4), head_dim=64, dtype=torch.float32, layout="heads first", backward=True,
    keys=None, mask=False, slopes=None, **options
):  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def leaf(number, tokens):
        shape = (batch_size, number, tokens, head_dim)
        if layout == "tokens first":
            shape = (batch_size, tokens, number, head_dim)
        tensor = torch.randn(shape, generator=generator).to(dtype)
        return (tensor if layout == "heads first" else tensor.transpose(1, 2)).requires_grad_(backward)

    keys = length if keys is None else keys
    tensors = [leaf(heads[0], length), leaf(heads[1], keys), leaf(heads[1], keys)]
    if mask:
        options["key_padding_mask"] = (
            torch.arange(keys) < torch.tensor([keys, keys // 2]).repeat(batch_size // 2)[:, None]
        )

    def call():
        torch.manual_seed(0)
        out = alibi_attention(*tensors, slopes, backend="native", **options)
        if backward:
            torch.autograd.grad(out.sum(), tensors)

    return call


def packed_attention(lengths, *, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor([0, *lengths]).cumsum(0).int()
    tensors = [torch.randn(sum(lengths), 4, 64, generator=generator).to(dtype).requires_grad_() for _ in range(3)]

    def call():
        out = alibi_attention_varlen(*tensors, ends, ends, max(lengths), max(lengths), backend="native")
        torch.autograd.grad(out.sum(), tensors)

    return call


def resize(seq_len, *, rows=300, length=64, square=False, **options):
    mask = (torch.arange(length) < torch.arange(rows)[:, None] % length + 1).long()
    ids = torch.arange(rows * length).view(rows, length)
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask, "weights": ids.float(), "row": ids[:, 0]}
    if square:
        batch["pairs_mask"] = torch.ones(rows, length, length, dtype=torch.bool)

    def call():
        resize_batch(batch, seq_len, backend="native", **options)

    return call


def resize_packed(seq_len, *, sequences=400, **options):
    lengths = torch.arange(sequences) % 50 + 1
    ends = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()])
    ids = torch.arange(int(ends[-1]))[None]
    batch = {"input_ids": ids, "labels": ids.clone(), "cu_seq_lens_q": ends, "cu_seq_lens_k": ends,
             "max_length_q": 50, "max_length_k": 50}  # fmt: skip
    return partial(resize_batch, batch, seq_len, backend="native", **options)


def moments(dtype=torch.float32):
    tensors = [torch.ones(size, dtype=dtype) for size in (5, 70, 3000, 40_000)]
    operator = overload("moment_statistics", "native")
    return partial(operator, tensors, tensors, tensors)


HALF = torch.bfloat16
CASES = {
    **{
        f"{length} tokens, {str(dtype)[6:]}, {layout}, {'with backward' if backward else 'forward'}": partial(
            attention, length, batch_size=12, dtype=dtype, layout=layout, backward=backward
        )
        for length in (3, 8, 16, 17, 32, 33, 64, 128)
        for dtype in (torch.float32, HALF)
        for layout in ("heads first", "tokens first")
        for backward in (False, True)
    },
    "300 tokens": partial(attention, 300),
    "300 tokens, bfloat16": partial(attention, 300, dtype=HALF),
    "300 tokens, float16": partial(attention, 300, dtype=torch.float16),
    "300 tokens, head_dim 40": partial(attention, 300, head_dim=40),
    "300 tokens, head_dim 40, bfloat16": partial(attention, 300, head_dim=40, dtype=HALF),
    "300 tokens, both sides": partial(attention, 300, causal=False),
    "300 tokens, window": partial(attention, 300, window=40),
    "300 tokens, window on both sides": partial(attention, 300, window=40, causal=False),
    "300 tokens, segments": partial(attention, 300, segment_length=90),
    "300 tokens, mask": partial(attention, 300, mask=True),
    "300 tokens, mask, bfloat16": partial(attention, 300, mask=True, dtype=HALF),
    "300 tokens, mask, both sides": partial(attention, 300, mask=True, causal=False),
    "300 tokens, dropout": partial(attention, 300, dropout_p=0.1),
    "300 tokens, groups of heads": partial(attention, 300, heads=(8, 2)),
    "300 tokens, one row": partial(attention, 300, batch_size=1, heads=(1, 1)),
    "129 tokens": partial(attention, 129),
    "1,000 tokens": partial(attention, 1000, batch_size=1),
    "1,000 tokens, no skipping": partial(attention, 1000, batch_size=1, skip_tolerance=0.0),
    "1,000 tokens, both sides": partial(attention, 1000, batch_size=1, causal=False),
    "1,000 tokens, flat slopes": partial(attention, 1000, batch_size=1, slopes=torch.full((4,), 1e-5)),
    **{
        f"{length} tokens, 300 keys, {str(dtype)[6:]}": partial(attention, length, keys=300, dtype=dtype)
        for length in (16, 17, 32, 33)
        for dtype in (torch.float32, HALF)
    },
    "1 token, 600 keys": partial(attention, 1, keys=600, backward=False),
    "1 token, 600 keys, bfloat16": partial(attention, 1, keys=600, backward=False, dtype=HALF),
    "1 token, 3,000 keys, flat slopes": partial(attention, 1, keys=3000, backward=False, slopes=torch.full((4,), 1e-3)),
    "1 token, 3,000 keys, one row": partial(attention, 1, keys=3000, backward=False, batch_size=1),
    "3 tokens, 600 keys, groups of heads": partial(attention, 3, keys=600, backward=False, heads=(8, 2)),
    "1 token, 600 keys, mask": partial(attention, 1, keys=600, backward=False, mask=True),
    "1 token, 600 keys, window": partial(attention, 1, keys=600, backward=False, window=100),
    "packed, short": partial(packed_attention, [5, 20, 0, 64, 1]),
    "packed, short, bfloat16": partial(packed_attention, [5, 20, 0, 64, 1], dtype=HALF),
    "packed, long": partial(packed_attention, [150, 3, 0, 400]),
    "packed, long, bfloat16": partial(packed_attention, [150, 3, 0, 400], dtype=HALF),
    "truncate": partial(resize, 24),
    "truncate, masks over pairs": partial(resize, 24, square=True),
    "truncate, last tokens": partial(resize, 24, keep_last_token=True),
    "truncate, info": partial(resize, 24, return_info=True),
    "reshape": partial(resize, 24, mode="reshape"),
    "reshape, padded": partial(resize, 24, mode="reshape", remainder="pad", return_info=True),
    "reshape, overlap": partial(resize, 24, mode="reshape", remainder="overlap", return_info=True),
    "flatten": partial(resize, 24, mode="flatten", keys=["input_ids", "labels", "attention_mask"]),
    "reshape, many rows": partial(resize, 24, rows=3000, mode="reshape", return_info=True),
    "packed, truncate": partial(resize_packed, 24),
    "packed, reshape, info": partial(resize_packed, 24, mode="reshape", remainder="pad", return_info=True),
    "moments": moments,
    "moments, bfloat16": partial(moments, HALF),
}  # fmt: skip
