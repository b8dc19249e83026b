"""The report: one figure, and one page in Markdown."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..utils.figures import FULL_LENGTH, WITH_WARMUP, ink, name_lines, new_figure, plot_run, write_figure
from ..utils.report_page import how_it_was_made, table, write_page
from ..utils.run_folder import RunFolder
from .records import BASELINE, WARMUP, Comparison, first_reaches, full_length_speed
from .settings import Settings
from .text import Corpus
from .training import METRICS, make_scheduler

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE, FIGURE = "report.md", "report.png"
LABELS = {BASELINE: FULL_LENGTH, WARMUP: WITH_WARMUP}

#: The losses of interest are at the end. The first steps would squeeze them into the last tenth of the axis.
FIRST_SHOWN_SHARE = 0.1


def write_report(
    folder: RunFolder, settings: Settings, corpus: Corpus, comparison: Comparison, command_line: str
) -> None:
    write_figure(lambda: progress_figure(comparison, settings), folder.path / FIGURE)
    made_by = {"text": corpus.describe(), **asdict(settings)}
    parts = [
        f"**{comparison.headline()}**",
        f"![Validation loss and sequence length against tokens](<{FIGURE}>)",
        result_table(comparison),
        f"## How to read it\n\n{_explanation(settings)}",
        f"## How it was made\n\n{how_it_was_made(command_line, made_by)}",
        f"Every evaluation is a line of [{METRICS}]({METRICS}).",
    ]
    write_page(folder.path / PAGE, "Sequence-length warmup: demo", parts)


def report_text(folder: RunFolder, comparison: Comparison) -> str:
    """The text to print."""
    return f"\n{result_table(comparison)}\n\n{comparison.headline()}\nReport: {folder.path / PAGE}"


def result_as_json(folder: RunFolder, settings: Settings, comparison: Comparison) -> dict[str, Any]:
    """Plain values: settings, crossings of the baseline's final loss, and all evaluations."""
    reached = comparison.baseline_crossing, comparison.warmup_crossing
    of_baseline, of_warmup = (None if crossing is None else asdict(crossing) for crossing in reached)
    return {
        "report": str(folder.path),
        "headline": comparison.headline(),
        "target_loss": comparison.target,
        "baseline_reached": of_baseline,
        "warmup_reached": of_warmup,
        "settings": asdict(settings),
        "records": [asdict(record) for record in (*comparison.baseline, *comparison.warmup)],
    }


def result_table(comparison: Comparison) -> str:
    head = ["run", "final validation loss", "steps", "tokens", "seconds", "tokens/s at full length"]
    rows = []
    for records in (comparison.baseline, comparison.warmup):
        last, speed, crossing = records[-1], full_length_speed(records), first_reaches(records, comparison.target)
        numbers = [f"{last.validation_loss:.4f}", f"{last.step:,}", f"{last.tokens:,}", f"{last.seconds:.1f}"]
        reached = "not" if crossing is None else f"{crossing.seconds:.1f} s, {crossing.tokens / 1e6:.2f} M tokens"
        rows.append([LABELS[last.run], *numbers, "-" if speed is None else f"{speed:,.0f}", reached])
    return table([*head, f"reached {comparison.target:.4f} after"], rows)


def _explanation(settings: Settings) -> str:
    return f"""\
- {settings.describe()} Both start from the same weights and train on the same windows.
- At equal tokens, both runs have the same learning rate.
- "Reached" is the first crossing of the baseline's final loss, linearly interpolated between evaluations.
- Seconds are those of training only. "Tokens/s at full length" should be about equal: both runs do the same work there.
  If they differ, the seconds cannot be compared.
- One seed is one sample. `--seed 1` gives another."""


# ---- the figure, which is also that of README


def progress_figure(comparison: Comparison, settings: Settings) -> Figure:
    """Validation loss at the full length, and below it the length that is trained on, against tokens."""
    figure = new_figure(9, 6.6)
    losses, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    for records in (comparison.baseline, comparison.warmup):
        tokens = [each.tokens / 1e6 for each in records]
        plot_run(losses, LABELS[records[0].run], tokens, [each.validation_loss for each in records])
    first = FIRST_SHOWN_SHARE * comparison.baseline[-1].tokens
    shown = [each.validation_loss for each in (*comparison.baseline, *comparison.warmup) if each.tokens >= first]
    margin = 0.12 * (max(shown) - min(shown) or 1)
    losses.set_ylim(min(shown) - margin, max(shown) + margin)
    losses.set_ylabel("validation loss at the full length\n(nats per byte)")
    losses.axhline(comparison.target, color=ink(), linestyle=":", label="final loss at the full length")
    _mark_crossings(losses, comparison)
    _draw_lengths(below, settings)
    below.set_xlabel("million tokens trained on")
    name_lines(figure)
    figure.suptitle(f"A small GPT with and without sequence-length warmup, seed {settings.seed} (lower is better)")
    return figure


def _mark_crossings(axes: Axes, comparison: Comparison) -> None:
    """Where each run reached the baseline's final loss."""
    for crossing, offset, vertical in (
        (comparison.warmup_crossing, (-5, -6), "top"),  # both curves fall: below and left is empty,
        (comparison.baseline_crossing, (0, 9), "bottom"),  # and so is above and right
    ):
        if crossing is not None:
            at = crossing.tokens / 1e6, comparison.target
            axes.plot(*at, "*", color=ink(), markersize=12, zorder=3, label="_reached")
            look: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": vertical, "fontweight": "bold"}
            axes.annotate(f"{at[0]:.3g} M", at, offset, **look)


def _draw_lengths(axes: Axes, settings: Settings) -> None:
    for run, label in LABELS.items():
        milestones = make_scheduler(run, settings).milestones()
        tokens = [*(milestone.progress / 1e6 for milestone in milestones), settings.total_tokens / 1e6]
        lengths = [*(milestone.seq_length for milestone in milestones), settings.seq_length]
        plot_run(axes, label, tokens, lengths, marker="none", drawstyle="steps-post")
    axes.set(ylabel="sequence length\n(tokens)", ylim=(0, 1.15 * settings.seq_length), xlim=(0, None))
