"""Validation perplexity of every trial, as a PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...files import write_atomically
from .configuration import Configuration
from .trials import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Blue, orange and grey of Okabe and Ito, told apart with any colour vision; the lines differ, too.
_FOUND, _FLUCTUATES, _STABLE = "#0072B2", "#D55E00", "0.55"


def check_matplotlib() -> None:
    """
    Raises:
        ImportError: matplotlib is missing; says how to install it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "seqwarm_kernels[demo]"') from error


def draw(configuration: Configuration, trials: Sequence[Trial], accepted: Trial | None, path: Path) -> None:
    """
    Raises:
        ImportError: matplotlib is missing; says how to install it.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    for trial in trials:
        _draw_trial(axes, trial, trial is accepted)
    axes.set(xlabel=f"{configuration.unit}s", ylabel="validation perplexity at full length", yscale="log")
    axes.set_xlim(0, configuration.end)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    _leave_out_the_fall_at_first(axes, trials)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(path, buffer.getvalue())


def _leave_out_the_fall_at_first(axes: Axes, trials: Sequence[Trial]) -> None:
    """Before any training perplexity is so high that the rest would be squeezed into the lowest part."""
    rest = [each.perplexity for trial in trials for each in trial.validations[1:] if math.isfinite(each.perplexity)]
    if rest:
        axes.set_ylim(0.95 * min(rest), 1.1 * max(rest))


def _draw_trial(axes: Axes, trial: Trial, is_accepted: bool) -> None:
    """A cross ends a trial that was broken off, at the last finite perplexity."""
    finite = [each for each in trial.validations if math.isfinite(each.perplexity)]
    progress, perplexity = [each.progress for each in finite], [each.perplexity for each in finite]
    colour = _FOUND if is_accepted else _FLUCTUATES if trial.fluctuates else _STABLE
    verdict = "found" if is_accepted else "fluctuates" if trial.fluctuates else "stable"
    axes.plot(
        progress,
        perplexity,
        color=colour,
        linestyle="--" if trial.fluctuates else "-",
        linewidth=2.5 if is_accepted else 1.2,
        zorder=3 if is_accepted else 2,
        label=f"from {trial.min_seq_length} over {trial.duration:,}: {verdict}",
    )
    if trial.fluctuates and finite:
        axes.plot(progress[-1], perplexity[-1], "x", color=colour, markersize=8, markeredgewidth=2)
