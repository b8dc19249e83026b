"""Tables, goals and the figure of what ranks exchange, from the records."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from seqwarm_kernels.attention.slopes import alibi_slopes
from seqwarm_kernels.cli.exchanges import ALL_GATHER, HALO, RING, ULYSSES, ContextSize, Exchanges, Volume, megabytes
from seqwarm_kernels.parallel.balance import balanced_slopes, rank_work
from seqwarm_kernels.utils.figures import new_figure

from ..common.figures import label_lines, log_axis, plot, save_both
from ..common.records import RESULTS, markdown, read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORDS = "cpu_many_devices"  #: name of the records file
LENGTHS, RANKS = (2**13, 2**17, 2**20), (2, 4, 8, 16, 32, 64)
GOAL_LENGTH, GOAL_RANKS, BALANCED_RANKS = 2**17, 8, 8
_FIGURE_LENGTHS = [2**power for power in range(13, 21)]


@dataclass(frozen=True)
class Widths:
    """The halo of each key head, for one row of normal queries and keys."""

    size: dict[str, Any]  #: of a ContextSize
    score_std: float
    widths: list[int]
    what: str = "widths"


@dataclass(frozen=True)
class Counted:
    """The bytes of keys, values and their gradients that one rank received in a run, and those of the formula."""

    size: dict[str, Any]
    slopes: str
    widths: list[int]
    rank: int
    forward: int
    backward: int
    formula_forward: int
    formula_backward: int
    deciding: int  #: bytes of the sums that decide the widths
    what: str = "counted"


@dataclass(frozen=True)
class HeadShares:
    """The share of the visible keys that each head attends, from the steepest to the flattest slope."""

    heads: int
    head_dim: int
    length: int
    shares: list[float]
    what: str = "shares"


_Record = TypeVar("_Record", Widths, Counted, HeadShares)


def report(lines: list[dict[str, Any]], figures: Path) -> str:
    save_both(functools.partial(figure, lines), figures / "exchanged_bytes.png")
    return tables(lines)


def tables(lines: Sequence[dict[str, Any]]) -> str:
    return "\n\n".join(make(lines) for make in (exchange_table, width_table, counted_table, balance_table))


# ---- tables


def exchange_table(lines: Sequence[dict[str, Any]]) -> str:
    """The bytes in forward by length and number of ranks."""
    widths = _widths(lines, ContextSize(32, 32, 128, GOAL_LENGTH, GOAL_RANKS))
    rows = []
    for length in LENGTHS:
        for ranks in RANKS[::2]:
            volumes = Exchanges(ContextSize(32, 32, 128, length, ranks), tuple(widths)).volumes()
            cells = [_megabytes(volumes[name]) for name in (RING, ALL_GATHER, ULYSSES, HALO)]
            rows.append([f"{length:,}", str(ranks), *cells, *_fewer_texts(volumes)])
    header = ["tokens", "ranks", RING, ALL_GATHER, ULYSSES, f"**{HALO}**"]
    return markdown([*header, "ring / halo", "Ulysses / halo"], rows)


def width_table(lines: Sequence[dict[str, Any]]) -> str:
    """How wide the halo is for normal inputs."""
    rows = []
    for record in _of(Widths, lines):
        size = ContextSize(**record.size)
        widest, mean = max(record.widths), sum(record.widths) / size.key_heads
        volumes = Exchanges(size, tuple(record.widths)).volumes()
        of_size = [f"{size.length:,}", str(size.ranks), f"{record.score_std:g}", f"{mean:,.0f}", f"{widest:,}"]
        rows.append([_heads(size), *of_size, _megabytes(volumes[HALO]), *_fewer_texts(volumes)])
    header = ["heads", "tokens", "ranks", "scores' deviation", "mean width", "widest", "halo"]
    return markdown([*header, "ring / halo", "Ulysses / halo"], rows)


def counted_table(lines: Sequence[dict[str, Any]]) -> str:
    """What ranks received in runs, beside the formula. The rank that received most."""
    rows = []
    for size, records in _counted(lines):
        most = max(records, key=lambda record: record.forward)
        back = max(records, key=lambda record: record.backward)
        rows.append(
            [
                f"{_heads(size)}, {size.batch_size} × {size.length:,} tokens",
                f"{records[0].slopes}, {'causal' if size.causal else 'both sides'}",
                str(size.ranks),
                f"{most.forward:,}",
                f"{most.formula_forward:,}",
                f"{back.backward:,}",
                f"{back.formula_backward:,}",
                f"{most.deciding:,}",
            ]
        )
    header = ["rows", "slopes", "ranks", "forward", "formula", "backward", "formula", "to decide the widths"]
    return markdown(header, rows)


def balance_table(lines: Sequence[dict[str, Any]]) -> str:
    """The work of the slowest of 8 ranks relative to the mean, by the order of the slopes."""
    rows = []
    for record in _of(HeadShares, lines):
        usual, balanced = (rank_work(shares, BALANCED_RANKS) for shares in in_both_orders(record))
        cells = [f"{work.imbalance():.2f}" for work in (usual, balanced)]
        rows.append([f"{record.length:,}", f"{usual.mean():.1%}", *cells])
    return markdown(["tokens", "share of keys visited", "`alibi_slopes`", "**`balanced_slopes`**"], rows)


def in_both_orders(record: HeadShares) -> tuple[torch.Tensor, torch.Tensor]:
    """The shares of heads in the order of `alibi_slopes`, and of `balanced_slopes`."""
    steepest_first = torch.tensor(record.shares)
    orders = alibi_slopes(record.heads), balanced_slopes(record.heads, BALANCED_RANKS)
    usual, balanced = (steepest_first[(-slopes).argsort().argsort()] for slopes in orders)
    return usual, balanced


def _heads(size: ContextSize) -> str:
    shared = "" if size.heads == size.key_heads else f" on {size.key_heads}"
    return f"{size.heads}{shared} of {size.head_dim}"


def _megabytes(volume: Volume | str) -> str:
    return "not possible" if isinstance(volume, str) else megabytes(volume.forward)


def _fewer_texts(volumes: dict[str, Volume | str]) -> list[str]:
    halo = volumes[HALO]
    assert isinstance(halo, Volume)
    others = (volumes[name] for name in (RING, ULYSSES))
    return ["" if isinstance(other, str) else f"{other.forward / halo.forward:.1f}" for other in others]


# ---- records


def records_of_file() -> list[dict[str, Any]]:
    return read(RESULTS / f"{RECORDS}.jsonl")[1]


def _of(kind: type[_Record], lines: Sequence[dict[str, Any]]) -> list[_Record]:
    return [kind(**line) for line in lines if line["what"] == kind.what]


def _widths(lines: Sequence[dict[str, Any]], size: ContextSize) -> list[int]:
    """The widths of scores with a standard deviation of 1."""
    return next(r.widths for r in _of(Widths, lines) if (ContextSize(**r.size), r.score_std) == (size, 1.0))


def _counted(lines: Sequence[dict[str, Any]]) -> list[tuple[ContextSize, list[Counted]]]:
    """The records of all ranks, by run."""
    runs: dict[ContextSize, list[Counted]] = {}
    for record in _of(Counted, lines):
        runs.setdefault(ContextSize(**record.size), []).append(record)
    return list(runs.items())


# ---- the figure


def figure(lines: Sequence[dict[str, Any]]) -> Figure:
    """Forward and backward: over the length, and over the number of ranks."""
    widths = tuple(_widths(lines, ContextSize(32, 32, 128, GOAL_LENGTH, GOAL_RANKS)))
    drawn = new_figure(9.6, 4)
    over_lengths, over_ranks = drawn.subplots(1, 2, sharey=True)
    panels = (
        (over_lengths, _FIGURE_LENGTHS, [ContextSize(32, 32, 128, x, GOAL_RANKS) for x in _FIGURE_LENGTHS]),
        (over_ranks, RANKS, [ContextSize(32, 32, 128, GOAL_LENGTH, x) for x in RANKS]),
    )
    for axes, places, sizes in panels:
        volumes = [Exchanges(size, widths).volumes() for size in sizes]
        for name in (RING, ALL_GATHER, ULYSSES, HALO):
            found = [(x, of_size[name]) for x, of_size in zip(places, volumes, strict=True)]
            points = [(x, sum(volume) / 1e6) for x, volume in found if isinstance(volume, Volume)]
            plot(axes, name, *zip(*points, strict=True))
        log_axis(axes.xaxis, places[::2] if axes is over_lengths else places)
        log_axis(axes.yaxis, [10, 100, 1000, 10_000])
    over_lengths.set(
        title=f"{GOAL_RANKS} ranks", xlabel="tokens in a sequence", ylabel="MB received by a rank in a layer"
    )
    over_ranks.set(title=f"{GOAL_LENGTH:,} tokens", xlabel="ranks")
    label_lines([over_lengths, over_ranks], bold=HALO)
    return drawn
