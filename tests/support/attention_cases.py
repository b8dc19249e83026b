"""The grid of attention calls for all kernels, in tables and as a strategy: options, shapes, slopes, memory layouts."""

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, alibi_slopes
from tests.support.kernels import check_attention

NAN = float("nan")


@dataclass(frozen=True)
class Case:
    """A call of `alibi_attention`. Hidden keys and their values hold NaN."""

    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, int] = (150, 200)
    heads: tuple[int, int] = (2, 1)
    batch_size: int = 1
    head_dim: int = 16
    slopes: Any = None  # as for `slopes_of`
    layout: str | tuple[str, str, str] = "contiguous"  # of query, key and value, if they differ
    mask: str | None = None
    bounded: bool = False  # whether the call gets a bound of the keys' norms

    def inputs(self, device="cpu", dtype=torch.float32, stretch=1):
        """query, key, value and slopes, and the options."""
        (query_length, key_length), (heads, key_heads) = (int(length * stretch) for length in self.lengths), self.heads
        shapes = (heads, query_length), (key_heads, key_length), (key_heads, key_length)
        tensors = [torch.randn(self.batch_size, *shape, self.head_dim, device=device).to(dtype) for shape in shapes]
        options = {"skip_tolerance": 0.0, **_on_device(self.options, device)}
        if self.bounded:
            options["key_norm_bound"] = tensors[1].float().norm(dim=-1).amax(-1)
        if self.mask is not None:
            mask = MASKS[self.mask](self.batch_size, key_length).to(device)
            options["key_padding_mask"] = mask
            tensors[1:] = [tensor.masked_fill(~mask[:, None, :, None], NAN) for tensor in tensors[1:]]
        layouts = (self.layout,) * 3 if isinstance(self.layout, str) else self.layout
        tensors = [LAYOUTS[layout](tensor) for layout, tensor in zip(layouts, tensors, strict=True)]
        return [*tensors, slopes_of(self.slopes, self.batch_size, heads, key_length).to(device)], options

    def call(self, *where):
        """query, key, value and slopes, and the function of these and a backend that returns out and lse."""
        leaves, options = self.inputs(*where)

        def attend(leaves, backend, **changes):
            return alibi_attention(*leaves, return_lse=True, backend=backend, **{**options, **changes})

        return leaves, attend


@dataclass(frozen=True)
class PackedCase:
    """A call of `alibi_attention_varlen`. Its last, `unused` tokens belong to no sequence, and hold NaN."""

    lengths: tuple[list[int], list[int]]  # of queries and keys
    unused: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    head_dim: int = 16
    slopes: Any = None  # as for `slopes_of`

    def inputs(self, device="cpu", dtype=torch.float32, stretch=1):
        """query, key, value and slopes; both cu_seqlens; both longest lengths; the options."""
        lengths = [[round(length * stretch) for length in each] for each in self.lengths]
        ends = [torch.tensor([0, *accumulate(each)], dtype=torch.int32, device=device) for each in lengths]
        longest = [max(each, default=0) for each in lengths]
        tensors = []
        for place, heads in enumerate((4, 2, 2)):
            tokens = sum(lengths[place > 0])
            tensors.append(torch.randn(tokens + self.unused, heads, self.head_dim, device=device).to(dtype))
            tensors[-1][tokens:] = NAN
        slopes = slopes_of(self.slopes, len(lengths[0]), 4, longest[1]).to(device)
        return [*tensors, slopes], ends, longest, {"skip_tolerance": 0.0, **_on_device(self.options, device)}

    def call(self, *where):
        """As of `Case`, with lse (T, Hq)."""
        leaves, ends, longest, options = self.inputs(*where)

        def attend(leaves, backend, **changes):
            *tensors, slopes = leaves
            given = {**options, "return_lse": True, "backend": backend, **changes}
            out, lse = alibi_attention_varlen(*tensors, *ends, *longest, slopes, **given)
            return out, lse.T

        return leaves, attend


def check_case(case, backend, device="cpu", dtype=torch.float32, stretch=1, *, rounds_scores=False):
    """The results of a backend beside those of the reference in float64.

    `rounds_scores`: the call may hide all keys near a query, as the mask "suffix" does and calls drawn at random may.
    """
    leaves, attend = case.call(device, dtype, stretch)
    rounds_scores |= getattr(case, "mask", None) == "suffix"
    return check_attention(backend, attend, leaves, rounds_scores=rounds_scores)


def slopes_of(kind, rows, heads, key_length):
    """Slopes of a number, or by a word: None stands for the default, "flat" for such that all keys count."""
    if kind is None:
        return alibi_slopes(heads)
    if not isinstance(kind, str):
        return torch.full((heads,), kind)
    slopes = torch.rand((rows, heads) if "by row" in kind else heads)
    return (20 * slopes - 4) / key_length if "flat" in kind else slopes


def _on_device(options, device):
    return {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in options.items()}


def _fused(tensor):
    """One of the three parts of a (B, S, 3, H, D) tensor."""
    return torch.stack([tensor.transpose(1, 2)] * 3, dim=2)[:, :, 1].transpose(1, 2)


def _expanded(tensor):
    """The first head, expanded to all heads."""
    return tensor[:, :1].expand_as(tensor)


def _slice(tensor):
    """A part of a larger tensor of NaN, whose rows are not aligned."""
    batch_size, heads, length, head_dim = tensor.shape
    cache = tensor.new_full((batch_size + 1, heads + 1, 2 * length + 1, head_dim + 3), NAN)
    cache[1:, 1:, 1::2, 1:-2] = tensor
    return cache[1:, 1:, 1::2, 1:-2]


LAYOUTS = {
    "contiguous": lambda tensor: tensor,
    "projection": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "fused": _fused,
    "expanded": _expanded,
    "dims apart": lambda tensor: tensor.mT.contiguous().mT,
    "slice": _slice,
}
MASKS = {
    "random": lambda rows, keys: torch.rand(rows, keys) > 0.3,
    "suffix": lambda rows, keys: (torch.arange(keys) < 40).expand(rows, keys),
    "left": lambda rows, keys: torch.arange(keys) >= torch.randint(0, keys + 1, (rows, 1)),
    "everything": lambda rows, keys: torch.zeros(rows, keys, dtype=torch.bool),
    "all of some rows": lambda rows, keys: (torch.rand(rows, keys) > 0.3) & (torch.arange(rows) % 2 > 0)[:, None],
}


def _segments(length, **more):
    return Case({"segment_length": length, **more}, lengths=(200, 200))


def _unused(query_start, lengths, batch_size=1, mask=None, **more):
    options = {"query_start": query_start, "skip_tolerance": 2.0**-24, **more}
    return Case(options, lengths, batch_size=batch_size, slopes=0.01, mask=mask)


def _far(query_start, lengths=(150, 200), batch_size=1, **more):
    """The first row is so far from all keys that float32 holds no distance. Its scores have a bias of 3."""
    first = query_start[0] if isinstance(query_start, torch.Tensor) else query_start
    return Case({"query_start": query_start, **more}, lengths, batch_size=batch_size, slopes=3 / abs(int(first)))


CASES = {
    "small": Case(lengths=(30, 40), layout=("contiguous", "projection", "contiguous")),
    "causal": Case(heads=(4, 2), batch_size=2),
    "full": Case({"causal": False}, heads=(4, 2), batch_size=2),
    "few queries": Case(lengths=(3, 200)),
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
    "segments of 20, full": _segments(20, causal=False),
    "segments of 70": _segments(70),
    "segments of 100, full": _segments(100, causal=False, window=60),
    "a segment longer than the row": _segments(1000),
    "start before the keys": Case({"query_start": -30}),
    "start inside, full": Case({"query_start": 20, "causal": False}),
    "start beyond the keys": Case({"query_start": 300, "window": 250}),
    "starts in a tensor": Case({"query_start": torch.tensor([-40, 170]), "causal": False}, batch_size=2),
    "one start in a tensor": Case({"query_start": torch.tensor(60, dtype=torch.int32)}, batch_size=2),
    "mask": Case(mask="random", batch_size=2),
    "mask of the nearest": Case(lengths=(200, 200), mask="suffix"),
    "mask of everything": Case({"causal": False}, mask="everything"),
    "dropout": Case({"dropout_p": 0.3}),
    "dropout, full": Case({"dropout_p": 0.5, "causal": False, "window": 90}, mask="random"),
    "mqa": Case(heads=(6, 1), lengths=(70, 70)),
    "a slope for each row": Case(slopes="by row", batch_size=2),
    "slopes of zero": Case({"causal": False}, slopes=0.0),
    "tiny slopes": Case(slopes=1e-30),
    "negative slopes and scale": Case({"causal": False, "scale": -0.4}, slopes=-0.05),
    "huge slopes": Case(slopes=1e4),
    "head_dim 5": Case(head_dim=5),
    "head_dim 20": Case({"causal": False}, head_dim=20),
    "head_dim 64": Case(head_dim=64),
    "head_dim 100": Case({"causal": False}, head_dim=100),
    "head_dim 128": Case(head_dim=128),
    "head_dim 256": Case(head_dim=256),
    "tokens outside of heads": Case(layout="projection", heads=(4, 2), batch_size=2),
    "one tensor for all three": Case(layout="fused", lengths=(150, 150), heads=(4, 4), batch_size=2),
    "values outside of heads": Case(layout=("projection", "contiguous", "projection")),
    "expanded keys": Case(layout="expanded", heads=(4, 2)),
    "strided dims": Case(layout="dims apart"),
    "one head of strided dims": Case(layout="dims apart", heads=(1, 1)),
    "a slice": Case(layout="slice", heads=(4, 2), batch_size=2),
    "queries before the keys, window": Case({"query_start": -35, "window": 32, "causal": False}),
    "mask of the first keys": Case(mask="left", batch_size=3),
    # Keys that no query sees, as those in the unused slots of a cache, where norms of keys decide what is skipped.
    "unused keys": _unused(45, (70, 200)),
    "unused keys, starts": _unused(torch.tensor([45, 99]), (70, 200), batch_size=2, mask="random"),
    "unused keys on both sides": _unused(101, (70, 250), window=30, causal=False),
    "far beyond the keys": _far(2**60),
    "far before the keys, full": _far(-(2**60), causal=False),
    "one row far beyond the keys": _far(torch.tensor([2**45 + 1, 3]), batch_size=2, causal=False),
    # With a short view a thread of the native kernels holds few blocks of keys at a time, and as many gradients.
    "many blocks": Case(lengths=(600, 600), head_dim=32),
    "many blocks, segments": Case({"segment_length": 100, "causal": False}, (600, 600), head_dim=32),
    "many blocks, window": Case({"window": 200, "causal": False}, (600, 600), head_dim=32),
    "everything": Case(
        {"causal": False, "window": 70, "segment_length": 90, "dropout_p": 0.2, "scale": 0.3},
        (150, 150),
        (4, 2),
        2,
        slopes="by row",
        mask="random",
        layout="projection",
    ),
}

#: Few queries over many keys, for which kernels cut the keys into chunks.
DECODING_CASES = {
    "three queries, dropout": Case(
        {"dropout_p": 0.3, "skip_tolerance": 2.0**-24}, (3, 520), (3, 1), slopes="random", mask="random", bounded=True
    ),
    "one query": Case(lengths=(1, 512), heads=(4, 2), batch_size=2),
    "one query, more chunks": Case(lengths=(1, 4500), slopes="flat", bounded=True),
    "one query, full": Case({"causal": False, "query_start": 300}, (1, 700), head_dim=20, layout="projection"),
    "one query beyond many keys": Case({"query_start": 650}, lengths=(1, 600)),
    "one query, window and dropout": Case(
        {"window": 520, "dropout_p": 0.3}, lengths=(1, 600), batch_size=2, slopes="by row"
    ),
    "one start": Case({"causal": False, "query_start": torch.tensor(300)}, lengths=(4, 600), heads=(6, 2)),
    "sixteen queries, window": Case({"window": 300}, (16, 700), (6, 1), slopes="flat", mask="random"),
    "starts": Case(
        {"causal": False, "window": 200, "query_start": torch.tensor([-1, 430])}, (2, 530), (1, 1), 2, slopes="by row"
    ),
    "one query, mask of everything": Case(lengths=(1, 700), mask="everything"),
    "three queries, unused keys": Case(
        {"query_start": torch.tensor([290, 40]), "window": 33, "skip_tolerance": 2.0**-24}, (3, 600), batch_size=2
    ),
    "two queries, skipped keys": Case({"skip_tolerance": 2.0**-24}, (2, 700), bounded=True),
    "two queries, skipped values": Case({"skip_tolerance": 2.0**-24}, (2, 700), layout="slice", mask="random"),
}

#: Short rows and segments, which share tiles. Triton's kernels take rows with the same remainder by 4 and with others,
#: in one tile and in several.
SHORT_CASES = {
    "12 tokens, everything": Case(
        {"query_start": torch.tensor([-3, 0, 2, 5, 9, 14, 3]), "dropout_p": 0.3}, (12, 12), batch_size=7, mask="random"
    ),
    "1 token": Case({}, (1, 1), batch_size=150, layout="projection"),
    "3 tokens, full": Case({"causal": False}, (3, 3), batch_size=70),
    "7 tokens, mask": Case({}, (7, 7), batch_size=19, slopes="random", layout="slice", mask="random"),
    "16 tokens, window": Case({"window": 3}, (16, 16), batch_size=9, layout="projection"),
    "33 tokens, rows without keys": Case({}, (33, 33), batch_size=5, mask="all of some rows"),
    "6 tokens, far beyond the keys": _far(2**45 + 1, (6, 6), batch_size=9),
    "segments of 4": Case({"segment_length": 4}, (16, 16), batch_size=9, layout="slice"),
    "40 tokens, dropout": Case({"dropout_p": 0.3, "causal": False}, (40, 40), batch_size=3, head_dim=20),
    "one segment": Case({"segment_length": 100, "causal": False, "window": 20}, (64, 64), batch_size=3),
    "segments of 12, dropout": Case({"segment_length": 12, "dropout_p": 0.3}, (120, 120), mask="random", batch_size=2),
    "segments of 50": Case({"segment_length": 50, "causal": False}, (150, 150), layout="slice"),
    # Of these, backward alone has a tile for a whole row.
    "128 tokens": Case({}, (128, 128), (2, 2), 2, 40),
    "65 tokens, full": Case({"causal": False}, (65, 65), (2, 2), 3, 40, layout="projection", mask="random"),
    "100 tokens, dropout": Case({"dropout_p": 0.3, "window": 20}, (100, 100), (2, 2), 2, 40, layout="slice"),
    "segments of 80": Case({"segment_length": 80, "causal": False}, (240, 240), (2, 2), 1, 40),
    "odd dims": Case({}, (24, 24), batch_size=3, head_dim=33, layout="projection"),
    "wide dims": Case({}, (24, 24), batch_size=3, head_dim=200, layout=("projection", "contiguous", "slice")),
}
CASES |= DECODING_CASES | SHORT_CASES

PACKED_CASES = {
    "few tokens": PackedCase(([3, 20], [3, 20]), 2),
    "same lengths": PackedCase(([30, 100, 3], [30, 100, 3]), slopes="by row"),
    # Without a window, NaN in the keys of the fourth sequence may reach its neighbors in a tile.
    "empty sequences": PackedCase(
        ([0, 70, 0, 0, 9, 0], [0, 70, 0, 5, 9, 0]), 0, {"causal": False, "window": 90}, slopes="by row"
    ),
    "more keys": PackedCase(([5, 90, 20], [80, 100, 150])),
    "far fewer keys": PackedCase(([600, 10], [3, 9]), 0, {"causal": False}),
    "rows without keys in a tile": PackedCase(([9, 87], [0, 270]), 9),
    "many short ones": PackedCase(([3, 8, 1, 5, 2, 7, 4] * 4,) * 2),
    "unused tokens, window": PackedCase(([140, 20],) * 2, 9, {"window": 25, "causal": False}, slopes="by row"),
    "dropout": PackedCase(([30, 60], [50, 60]), 0, {"dropout_p": 0.3}),
    "starts, few tokens": PackedCase(([3, 0, 4], [3, 2, 9]), 2, {"query_start": torch.tensor([-1, 0, 20])}),
    "starts": PackedCase(
        ([5, 0, 90, 20, 70], [80, 6, 100, 0, 40]),
        3,
        {"query_start": torch.tensor([-2, 3, 50, 7, 200])},
        slopes="by row",
    ),
    "starts, window": PackedCase(
        ([70, 40], [200, 60]), 0, {"query_start": torch.tensor([90, -9], dtype=torch.int32), "window": 25}
    ),
    "far beyond the keys": PackedCase(([150] * 2,) * 2, 0, {"query_start": torch.tensor([2**60, 3])}, slopes=3 / 2**60),
    "far before the keys, full": PackedCase(
        ([150] * 2,) * 2, 0, {"query_start": torch.tensor([-(2**45) - 1, 3]), "causal": False}, slopes=3 / 2**45
    ),
    "one start": PackedCase(([30, 60], [50, 60]), 5, {"query_start": 0, "causal": False}),
    "one query each": PackedCase(
        ([1] * 9, [50, 3, 0, 9, 70, 1, 20, 33, 5]), 0, {"query_start": torch.arange(9) * 5}, slopes="by row"
    ),
    "starts, dropout": PackedCase(([30, 60], [50, 60]), 0, {"query_start": torch.tensor([5, 20]), "dropout_p": 0.3}),
    "sequences without enough keys": PackedCase(([5, 4, 11], [5, 0, 9])),
    "unused keys": PackedCase(
        ([3, 70, 0, 5], [100, 130, 6, 30]), 0, {"window": 20, "query_start": torch.tensor([40, 60, 6, -5])}
    ),
    "unused keys, skipping": PackedCase(([3, 70, 5], [100, 130, 30]), 0, {"window": 20, "skip_tolerance": 2.0**-24}),
    # A tile of queries sees whole tiles of keys of two sequences of 96, or the keys of seven sequences.
    "many sequences": PackedCase(([*[96] * 4, *range(0, 50, 3)],) * 2, 0, {"causal": False}, 32, "by row"),
    "few queries of many sequences": PackedCase(([10] * 10, [100] * 10), head_dim=32),
    "no sequences": PackedCase(([], []), 12),
}


def a_third_of(name):
    """The case with a third of its tokens and of what is counted in tokens, and few heads."""
    case = CASES[name]
    counts = {name: case.options[name] for name in ("window", "segment_length", "query_start") if name in case.options}
    options = case.options | {name: -(-count // 3) for name, count in counts.items()}
    lengths = tuple(-(-length // 3) for length in case.lengths)
    start = options.get("query_start")
    batch_size = start.numel() if isinstance(start, torch.Tensor) else min(case.batch_size, 1)
    return replace(case, options=options, lengths=lengths, heads=(2, 1), batch_size=batch_size)


@st.composite
def cases(draw, lengths, **fixed):
    """Calls with any combination of options. Seeds torch, which draws the inputs.

    Args:
        lengths: A strategy of the numbers of queries and keys.
        fixed: Strategies of other fields of `Case`.
    """
    queries, keys = draw(lengths)
    strategies = {
        "heads": st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
        "batch_size": st.integers(1, 3),
        "head_dim": st.sampled_from([1, 5, 16, 17, 40, 64]),
        "layout": st.sampled_from([*LAYOUTS]),
        "mask": st.sampled_from([None, None, "random", "left", "everything", "all of some rows"]),
        "slopes": st.sampled_from([None, "random", "by row", 0.0, 1e-30, -0.2, 1e4]),
        **fixed,
    }
    fields = {name: draw(strategy, name) for name, strategy in strategies.items()}
    scales = st.integers(-8, 8).map(lambda quarters: quarters / 4 * fields["head_dim"] ** -0.5)  # none underflows
    options = {
        "causal": draw(st.booleans(), "causal"),
        "window": draw(st.none() | st.integers(0, keys + 1), "window"),
        "scale": draw(st.none() | scales, "scale"),
        "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.3]), "dropout_p"),
    }
    start = st.integers(-queries - 3, keys + 3)
    if queries == keys and draw(st.booleans(), "segments"):
        options["segment_length"] = draw(st.integers(1, keys + 1), "segment_length")
    elif draw(st.booleans(), "starts"):
        of_rows = st.lists(start, min_size=fields["batch_size"], max_size=fields["batch_size"])
        starts = draw(start | of_rows, "query_start")
        options["query_start"] = torch.tensor(starts, dtype=torch.int64) if isinstance(starts, list) else starts
    torch.manual_seed(draw(st.integers(0, 2**16), "seed"))
    return Case(options, (queries, keys), **fields)
