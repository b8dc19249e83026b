"""Validation perplexity of every trial, as a PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..utils.checks import check_matplotlib
from ..utils.files import write_atomically
from .configuration import SearchConfiguration
from .trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Blue, orange and gray of Okabe and Ito, distinguishable with any color vision. Line styles differ as well.
_FOUND, _FLUCTUATES, _STABLE = "#0072B2", "#D55E00", "0.55"

#: The y axis ends at this multiple of the threshold above the stable trials, so that these are not squeezed together.
_HEADROOM = 3

#: Larger perplexities overflow in matplotlib's axis computations.
_HIGHEST = 1e100


def draw(configuration: SearchConfiguration, trials: Sequence[Trial], accepted: Trial | None, path: Path) -> None:
    """Write the figure of a search.

    Raises:
        ImportError: matplotlib is missing. The message says how to install it.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    bottom, top = _limits(configuration.max_rise, trials)
    for trial in trials:
        _draw_trial(axes, trial, trial is accepted, top)
    axes.set(xlabel=f"{configuration.unit}s", ylabel="validation perplexity at full length", yscale="log")
    axes.set_xlim(0, configuration.end)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_ylim(bottom, top)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_atomically(path, buffer.getvalue())


def _limits(max_rise: float, trials: Sequence[Trial]) -> tuple[float, float]:
    """Limits of the y axis. They ignore each trial's first validation: before training, perplexity is far higher."""
    seen = [perplexity for trial in trials for perplexity in _finite(trial)[1:]]
    calm = [perplexity for trial in trials if not trial.fluctuates for perplexity in _finite(trial)[1:]]
    calm = calm or [min(_finite(trial)) for trial in trials if _finite(trial)]
    if not calm:
        return 1, 10
    top = min(1.1 * max(seen or calm), _HEADROOM * max_rise * max(calm), _HIGHEST)
    return min(0.95 * min(seen or calm), 0.5 * top), top


def _finite(trial: Trial) -> list[float]:
    return [each.perplexity for each in trial.validations if math.isfinite(each.perplexity)]


def _draw_trial(axes: Axes, trial: Trial, is_accepted: bool, top: float) -> None:
    """Draw a trial. A cross marks a fluctuation, at the last finite perplexity or at the top of the figure."""
    progress = [each.progress for each in trial.validations if math.isfinite(each.perplexity)]
    perplexity = [min(each, _HIGHEST) for each in _finite(trial)]
    color = _FOUND if is_accepted else _FLUCTUATES if trial.fluctuates else _STABLE
    verdict = "found" if is_accepted else "fluctuates" if trial.fluctuates else "stable"
    axes.plot(
        progress,
        perplexity,
        color=color,
        linestyle="--" if trial.fluctuates else "-",
        linewidth=2.5 if is_accepted else 1.2,
        zorder=3 if is_accepted else 2,
        label=f"from {trial.min_seq_length} over {trial.duration:,}: {verdict}",
    )
    if trial.fluctuates and progress:
        end = min(perplexity[-1], top)
        outside = progress[-1] > trial.end
        axes.plot(progress[-1], end, "x", color=color, markersize=8, markeredgewidth=2, clip_on=outside)
