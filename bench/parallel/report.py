"""Tables, goals and the figure of what ranks exchange, from the records."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch

from seqwarm_kernels.attention.slopes import alibi_slopes
from seqwarm_kernels.cli.exchanges import ALL_GATHER, HALO, RING, ULYSSES, ContextSize, Exchanges, Volume, megabytes
from seqwarm_kernels.parallel.balance import balanced_slopes, rank_work
from seqwarm_kernels.utils.figures import new_figure

from ..common.figures import label_lines, log_axis, plot
from ..common.records import markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORDS = "cpu_many_devices"  #: name of the records file
LENGTHS, RANKS = (2**13, 2**17, 2**20), (2, 4, 8, 16, 32, 64)
GOAL_LENGTH, GOAL_RANKS, BALANCED_RANKS = 2**17, 8, 8
_FIGURE_LENGTHS = [2**power for power in range(13, 21)]
#: Kinds of lines: the halo of each key head, for a row of normal queries and keys; the bytes that a rank received; the
#: share of the visible keys that each head attends, from the steepest to the flattest slope.
WIDTHS, COUNTED, SHARES = "widths", "counted", "shares"

Lines = Sequence[dict[str, Any]]


def tables(lines: Lines) -> str:
    return "\n\n".join(make(lines) for make in (exchange_table, width_table, counted_table, balance_table))


# ---- tables


def exchange_table(lines: Lines) -> str:
    """The bytes in forward by length and number of ranks."""
    widths = _widths(lines, ContextSize(32, 32, 128, GOAL_LENGTH, GOAL_RANKS))
    rows = []
    for length in LENGTHS:
        for ranks in RANKS[::2]:
            volumes = Exchanges(ContextSize(32, 32, 128, length, ranks), widths).volumes()
            cells = [_megabytes(volumes[name]) for name in (RING, ALL_GATHER, ULYSSES, HALO)]
            rows.append([f"{length:,}", str(ranks), *cells, *_fewer_texts(volumes)])
    header = ["tokens", "ranks", RING, ALL_GATHER, ULYSSES, f"**{HALO}**"]
    return markdown([*header, "ring / halo", "Ulysses / halo"], rows)


def width_table(lines: Lines) -> str:
    """How wide the halo is for normal inputs."""
    rows = []
    for line in _of(WIDTHS, lines):
        size, widths = ContextSize(**line["size"]), line["widths"]
        volumes = Exchanges(size, widths).volumes()
        of_size = f"{size.length:,}", str(size.ranks), f"{line['score_std']:g}"
        of_widths = f"{sum(widths) / size.key_heads:,.0f}", f"{max(widths):,}"
        rows.append([_heads(size), *of_size, *of_widths, _megabytes(volumes[HALO]), *_fewer_texts(volumes)])
    header = ["heads", "tokens", "ranks", "scores' deviation", "mean width", "widest", "halo"]
    return markdown([*header, "ring / halo", "Ulysses / halo"], rows)


def counted_table(lines: Lines) -> str:
    """What ranks received in runs, beside the formula. The rank that received most."""
    runs: dict[ContextSize, list[dict[str, Any]]] = {}
    for line in _of(COUNTED, lines):
        runs.setdefault(ContextSize(**line["size"]), []).append(line)
    rows = []
    for size, of_ranks in runs.items():
        most, back = (max(of_ranks, key=itemgetter(way)) for way in ("forward", "backward"))
        counts = most["forward"], most["formula_forward"], back["backward"], back["formula_backward"], most["deciding"]
        tokens = f"{_heads(size)}, {size.batch_size} × {size.length:,} tokens"
        slopes = f"{most['slopes']}, {'causal' if size.causal else 'both sides'}"
        rows.append([tokens, slopes, str(size.ranks), *(f"{count:,}" for count in counts)])
    header = ["rows", "slopes", "ranks", "forward", "formula", "backward", "formula", "to decide the widths"]
    return markdown(header, rows)


def balance_table(lines: Lines) -> str:
    """The work of the slowest of 8 ranks relative to the mean, with the heads in either order of the slopes."""
    rows = []
    for line in _of(SHARES, lines):
        steepest_first = torch.tensor(line["shares"])
        orders = alibi_slopes(line["heads"]), balanced_slopes(line["heads"], BALANCED_RANKS)
        usual, balanced = (
            rank_work(steepest_first[(-slopes).argsort().argsort()], BALANCED_RANKS) for slopes in orders
        )
        imbalances = f"{usual.imbalance():.2f}", f"{balanced.imbalance():.2f}"
        rows.append([f"{line['length']:,}", f"{usual.mean():.1%}", *imbalances])
    return markdown(["tokens", "share of keys visited", "`alibi_slopes`", "**`balanced_slopes`**"], rows)


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


def _of(what: str, lines: Lines) -> Lines:
    return [line for line in lines if line["what"] == what]


def _widths(lines: Lines, size: ContextSize) -> list[int]:
    """The widths of scores with a standard deviation of 1."""
    return next(
        line["widths"] for line in _of(WIDTHS, lines) if (ContextSize(**line["size"]), line["score_std"]) == (size, 1.0)
    )


# ---- the figure


def figure(lines: Lines) -> Figure:
    """Forward and backward: over the length, and over the number of ranks."""
    widths = _widths(lines, ContextSize(32, 32, 128, GOAL_LENGTH, GOAL_RANKS))
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
