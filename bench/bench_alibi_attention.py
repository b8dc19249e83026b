"""alibi_attention on the CPU beside the ways to get ALiBi, or at least causal attention, from torch itself."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from seqwarm_kernels import alibi_attention, alibi_bias, alibi_slopes

from .measure import Record, measure, relative_error, table, write

BATCH_SIZE, HEADS, HEAD_DIM = 2, 12, 64
LENGTHS = (128, 1024)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
    return (query @ key.mT * HEAD_DIM**-0.5 + bias).softmax(-1) @ value


def compiled_flex(length: int, slopes: Tensor) -> Attend:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score + slopes[h] * (j - i)

    def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return i >= j

    block_mask = create_block_mask(causal, None, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda query, key, value: compiled(query, key, value, score_mod=score_mod, block_mask=block_mask)


def implementations(length: int) -> Iterator[tuple[str, Attend, bool]]:
    """Name, function, and whether it has a backward."""
    slopes = alibi_slopes(HEADS)
    bias = alibi_bias(slopes, length, length)
    yield "eager with bias", lambda q, k, v: eager(q, k, v, bias), True
    yield "SDPA with bias mask", lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=bias), True
    yield "FlexAttention, compiled", compiled_flex(length, slopes), False
    yield "SDPA causal, no bias", lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), True
    yield "alibi_attention reference", lambda q, k, v: alibi_attention(q, k, v, slopes, backend="reference"), True


def forward(attend: Attend, inputs: list[Tensor]) -> Callable[[], Tensor]:
    detached = [tensor.detach() for tensor in inputs]  # FlexAttention on the CPU takes no others
    return lambda: attend(*detached)


def forward_and_backward(attend: Attend, inputs: list[Tensor], grad_out: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(attend(*inputs), inputs, grad_out)


def run(seconds: float) -> list[Record]:
    records = []
    for length in tqdm(LENGTHS, desc="alibi_attention", unit="length"):
        inputs = [torch.randn(BATCH_SIZE, HEADS, length, HEAD_DIM, requires_grad=True) for _ in range(3)]
        grad_out = torch.randn_like(inputs[0])
        double = [tensor.detach().double() for tensor in inputs]
        exact = eager(double[0], double[1], double[2], alibi_bias(alibi_slopes(HEADS).double(), length, length))
        for name, attend, has_backward in implementations(length):
            error = None if name == "SDPA causal, no bias" else relative_error(forward(attend, inputs)(), exact)
            calls: dict[str, Callable[[], object]] = {"forward": forward(attend, inputs)}
            if has_backward:
                calls["forward + backward"] = forward_and_backward(attend, inputs, grad_out)
            for work, call in calls.items():
                records.append(
                    measure(
                        call,
                        operator="alibi_attention",
                        case=f"{work}, causal, float32 B{BATCH_SIZE} H{HEADS} S{length} D{HEAD_DIM}",
                        implementation=name,
                        threads=torch.get_num_threads(),
                        seconds=seconds,
                        max_error=error if work == "forward" else None,
                    )
                )
    return sorted(records, key=lambda record: record.case)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time of each row of the table")


def main(arguments: argparse.Namespace) -> None:
    records = run(arguments.seconds)
    path = write("cpu_alibi_attention", records)
    print(f"{table(records)}\n\nwritten to {path}")
