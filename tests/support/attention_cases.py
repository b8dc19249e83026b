"""The grid of attention calls for all kernels: options, shapes, slopes and strides."""

from dataclasses import dataclass, field
from typing import Any

import torch

from seqwarm_kernels import alibi_slopes


@dataclass(frozen=True)
class Case:
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, int] = (150, 200)
    heads: tuple[int, int] = (4, 2)
    batch_size: int = 2
    head_dim: int = 16
    slopes: Any = None  # a number, or the shape of random slopes
    layout: str | tuple[str, str, str] = "contiguous"  # of query, key and value, if they differ
    mask: str | None = None


def segments(length, **more):
    return Case({"segment_length": length, **more}, lengths=(200, 200))


CASES = {
    # First: Triton's interpreter runs it in `make test`.
    "small": Case(lengths=(30, 40), batch_size=1, layout=("contiguous", "projection", "contiguous")),
    "causal": Case(),
    "full": Case({"causal": False}),
    "few queries": Case(lengths=(3, 200)),
    "one query over many keys": Case(lengths=(1, 1100)),
    "few queries over many keys": Case({"causal": False, "query_start": 300}, lengths=(4, 600), heads=(6, 2)),
    "one query beyond many keys": Case({"query_start": 650}, lengths=(1, 600)),
    "one query, mask": Case(lengths=(1, 600), mask="random", head_dim=20, layout="projection"),
    "one query, window and dropout": Case({"window": 520, "dropout_p": 0.3}, lengths=(1, 600), slopes=(2, 4)),
    "more queries than keys": Case(lengths=(200, 70)),
    "more queries than keys, full": Case({"causal": False}, lengths=(200, 70)),
    "far more queries than keys, full": Case({"causal": False}, lengths=(600, 30), slopes=0.9),
    "one token": Case(lengths=(1, 1), head_dim=1),
    "no queries": Case(lengths=(0, 9)),
    "no keys": Case(lengths=(9, 0)),
    "no rows": Case(batch_size=0),
    "segments of nothing": Case({"segment_length": 4}, lengths=(0, 0)),
    "window": Case({"window": 37}),
    "window, full": Case({"window": 37, "causal": False}),
    "window of itself": Case({"window": 0, "causal": False}),
    "window wider than a tile": Case({"window": 150}, lengths=(400, 400), heads=(1, 1)),
    "segments of 1": segments(1),
    "segments of 8": segments(8),
    "segments of 20, full": segments(20, causal=False),
    "segments of 64": segments(64),
    "segments of 70": segments(70),
    "segments of 100, full": segments(100, causal=False, window=60),
    "a segment longer than the row": segments(1000),
    "start before the keys": Case({"query_start": -30}),
    "start inside, full": Case({"query_start": 20, "causal": False}),
    "start beyond the keys": Case({"query_start": 300, "window": 250}),
    "start far beyond the keys": Case({"query_start": 900}, slopes=0.01),
    "starts in a tensor": Case({"query_start": torch.tensor([-40, 170]), "causal": False}),
    "one start in a tensor": Case({"query_start": torch.tensor(60, dtype=torch.int32)}),
    "scale": Case({"scale": 0.7}),
    "negative scale": Case({"scale": -0.4, "causal": False}),
    "mask": Case(mask="random"),
    "mask, full": Case({"causal": False}, mask="random"),
    "mask of the nearest": Case(lengths=(200, 200), mask="suffix"),
    "mask of everything": Case({"causal": False}, mask="everything"),
    "dropout": Case({"dropout_p": 0.3}),
    "dropout, full": Case({"dropout_p": 0.5, "causal": False, "window": 90}, mask="random"),
    "mqa": Case(heads=(6, 1), lengths=(70, 70)),
    "a slope for each row": Case(slopes=(2, 4)),
    "slopes of zero": Case({"causal": False}, slopes=0.0),
    "tiny slopes": Case(slopes=1e-30),
    "negative slopes": Case({"causal": False}, slopes=-0.05),
    "huge slopes": Case(slopes=1e4),
    "head_dim 5": Case(head_dim=5),
    "head_dim 20": Case({"causal": False}, head_dim=20),
    "head_dim 64": Case(head_dim=64),
    "head_dim 100": Case({"causal": False}, head_dim=100, heads=(2, 1)),
    "head_dim 128": Case(head_dim=128, heads=(2, 1), batch_size=1),
    "head_dim 256": Case(head_dim=256, heads=(2, 1), batch_size=1),
    "tokens outside of heads": Case(layout="projection"),
    "one tensor for all three": Case(layout="fused", lengths=(150, 150), heads=(4, 4)),
    "values outside of heads": Case(layout=("projection", "contiguous", "projection")),
    "expanded keys": Case(layout="expanded"),
    "strided dims": Case(layout="strided"),
    "rows that are not aligned": Case(layout="shifted"),
    "everything": Case(
        {"causal": False, "window": 70, "segment_length": 90, "dropout_p": 0.2, "scale": 0.3},
        lengths=(250, 250),
        slopes=(2, 4),
        mask="random",
        layout="projection",
    ),
}


def tensors_of(case, device, dtype, stretch=1):
    """query, key and value in the case's layout, requiring gradients."""
    query_length, key_length = (length * stretch for length in case.lengths)
    shapes = [(case.heads[0], query_length), (case.heads[1], key_length), (case.heads[1], key_length)]
    dense = [torch.randn(case.batch_size, *shape, case.head_dim, device=device).to(dtype) for shape in shapes]
    layouts = (case.layout,) * 3 if isinstance(case.layout, str) else case.layout
    return [LAYOUTS[layout](tensor).requires_grad_() for layout, tensor in zip(layouts, dense, strict=True)]


def draw_tensor(layout, batch_size, heads, length, head_dim, **like):
    """A random tensor of "heads first", "tokens first", or "strided": a part of a larger one."""
    if layout == "tokens first":
        return torch.randn(batch_size, length, heads, head_dim, **like).transpose(1, 2)
    if layout == "strided":
        return torch.randn(batch_size, heads, 2 * length + 1, head_dim + 3, **like)[:, :, 1::2, 1:-2]
    return torch.randn(batch_size, heads, length, head_dim, **like)


def _projection(tensor):
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _fused(tensor):
    """One of the three parts of a (B, S, 3, H, D) tensor."""
    return torch.stack([tensor.transpose(1, 2)] * 3, dim=2)[:, :, 1].transpose(1, 2)


def _expanded(tensor):
    """The first head, expanded to all heads."""
    return tensor[:, :1].expand_as(tensor)


def _strided(tensor):
    return tensor.mT.contiguous().mT


def _shifted(tensor):
    padded = torch.nn.functional.pad(tensor, (1, 2))
    return padded[..., 1:-2]


LAYOUTS = {
    "contiguous": lambda tensor: tensor,
    "projection": _projection,
    "fused": _fused,
    "expanded": _expanded,
    "strided": _strided,
    "shifted": _shifted,
}


def slopes_of(case, device):
    heads = case.heads[0]
    if case.slopes is None:
        slopes = alibi_slopes(heads)
    elif isinstance(case.slopes, tuple):
        slopes = torch.rand(case.slopes)
    else:
        slopes = torch.full((heads,), case.slopes)
    return slopes.to(device).requires_grad_()


def options_of(case, device, stretch=1):
    options = dict(case.options)
    if isinstance(options.get("query_start"), torch.Tensor):
        options["query_start"] = options["query_start"].to(device)
    if case.mask is not None:
        length = case.lengths[1] * stretch
        mask = torch.rand(case.batch_size, length) > 0.3
        if case.mask == "suffix":
            mask = (torch.arange(length) < 40).expand(case.batch_size, length).contiguous()
        if case.mask == "everything":
            mask = torch.zeros_like(mask)
        options["key_padding_mask"] = mask.to(device)
    return options
