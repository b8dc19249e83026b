"""The figure of a search: the perplexity of every trial, and the rise that decides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..utils.figures import ACCENT, CONTRAST, PLAIN_NUMBERS, QUIET, ink, new_figure
from .configuration import SearchConfiguration
from .trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The upper panel ends at this multiple of the threshold above the stable trials, which it would else squeeze together.
_HEADROOM = 1.5

#: Far above an untrained model, whose perplexity is about its vocabulary. Axes to such numbers would show nothing.
_DIVERGED = 1e9

_MARKERS = "os^vD<>pPhd*"  #: of the trials in turn, so that they differ without color


def search_figure(configuration: SearchConfiguration, trials: Sequence[Trial], accepted: Trial | None) -> Figure:
    """Above: validation perplexity. Below: each perplexity relative to the best before it, with the limit."""
    figure = new_figure(10, max(7, 3 + 0.3 * len(trials)))
    perplexities, rises = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    limits = _limits(configuration.max_rise, trials)
    top_rise = 1 + 1.6 * (configuration.max_rise - 1)
    for index, trial in enumerate(trials):
        look = {**_look(trial, trial == accepted), "marker": _MARKERS[index % len(_MARKERS)]}
        label = f"{trial.label}: {trial.verdict(accepted)}"
        _draw_trial(perplexities, trial, [each.perplexity for each in trial.validations], limits[1], label, look)
        _draw_trial(rises, trial, trial.rises, top_rise, f"_{label}", look)
    perplexities.set(ylabel="validation perplexity at the full length", ylim=limits)
    rises.set(xlabel=f"{configuration.unit}s of a trial", ylabel="perplexity / best so far", ylim=(0.98, top_rise))
    rises.set_xlim(0, configuration.end)
    rises.xaxis.set_major_formatter(PLAIN_NUMBERS)
    limit = f"limit: {configuration.max_rise:g} times the best before"
    rises.axhline(configuration.max_rise, color=ink(), linestyle=":", label=limit)
    figure.legend(loc="outside right upper")
    figure.suptitle("Trials of a search: minimum length, duration, outcome")
    return figure


def _look(trial: Trial, is_accepted: bool) -> dict[str, Any]:
    if is_accepted:
        return {"color": ACCENT, "linewidth": 2.4, "zorder": 3}
    return {"color": CONTRAST, "linestyle": "--"} if trial.fluctuates else {"color": QUIET}


def _limits(max_rise: float, trials: Sequence[Trial]) -> tuple[float, float]:
    """Limits of perplexity. They ignore each trial's first validation: before training, perplexity is far higher."""
    seen = [each.perplexity for trial in trials for each in trial.validations[1:] if each.perplexity < _DIVERGED]
    calm = [each.perplexity for trial in trials if not trial.fluctuates for each in trial.validations[1:]]
    calm = calm or [min(seen)] if seen else [10.0]
    top = min(1.05 * max(seen or calm), _HEADROOM * max_rise * max(calm))
    bottom = min(seen or [1.0])
    return bottom - 0.05 * (top - bottom), top


def _draw_trial(
    axes: Axes, trial: Trial, values: Sequence[float], top: float, label: str, look: dict[str, Any]
) -> None:
    """Draw values of a trial. A cross marks a fluctuation, at its value or at the top of the axes."""
    progress = [each.progress for each in trial.validations]
    # Far above the axes, so that a line leads there, and not so far that matplotlib overflows.
    heights = [min(value, 10 * top) if math.isfinite(value) else 10 * top for value in values]
    axes.plot(progress, heights, **look, label=label)
    if trial.fluctuates:
        cross = {"color": look["color"], "markersize": 10, "markeredgewidth": 2.5, "label": "_fluctuates"}
        axes.plot(progress[-1], min(heights[-1], top), "x", clip_on=progress[-1] > trial.end, **cross)
