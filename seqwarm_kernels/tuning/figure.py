"""The figure of a search: the perplexity of every trial, and the rise that decides."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..utils.checks import check_matplotlib
from ..utils.figures import ACCENT, CONTRAST, QUIET, label_lines, log_axis, mark, new_figure, plain_numbers, png
from ..utils.files import write_atomically
from .configuration import SearchConfiguration
from .trial import Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The upper panel ends at this multiple of the threshold above the stable trials, which it would else squeeze together.
_HEADROOM = 3

#: Larger perplexities overflow in matplotlib's axis computations.
_HIGHEST = 1e100

_MARKERS = "os^vD<>pPhd*"  #: of the trials in turn, so that they differ without color


def draw(configuration: SearchConfiguration, trials: Sequence[Trial], accepted: Trial | None, path: Path) -> None:
    """Write the figure of a search as a PNG.

    Raises:
        ImportError: matplotlib is missing. The message says how to install it.
    """
    check_matplotlib()
    write_atomically(path, png(functools.partial(search_figure, configuration, trials, accepted)))


def search_figure(configuration: SearchConfiguration, trials: Sequence[Trial], accepted: Trial | None) -> Figure:
    """Above: validation perplexity. Below: each perplexity relative to the best before it, with the limit."""
    figure = new_figure(10, max(7, 3 + 0.3 * len(trials)))
    perplexities, rises = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    bottom, top = _limits(configuration.max_rise, trials)
    top_rise = 1 + 1.6 * (configuration.max_rise - 1)
    for index, trial in enumerate(trials):
        look = {**_look(trial, trial is accepted), "marker": _MARKERS[index % len(_MARKERS)]}
        label = f"{trial.label}: {trial.verdict(accepted)}"
        _draw_trial(perplexities, trial, _finite(trial), top, {**look, "label": label})
        _draw_trial(rises, trial, trial.rises, top_rise, {**look, "label": f"_{label}"})
    log_axis(perplexities.yaxis, _ticks(bottom, top))
    perplexities.set(ylabel="validation perplexity at the full length", ylim=(bottom, top))
    rises.set(xlabel=f"{configuration.unit}s of a trial", ylabel="perplexity / best so far", ylim=(0.98, top_rise))
    rises.set_xlim(0, configuration.end)
    plain_numbers(rises.xaxis)
    mark(rises, f"limit: {configuration.max_rise:g} times the best before", y=configuration.max_rise)
    if perplexities.lines:
        label_lines([perplexities])
    figure.suptitle("Trials of a search: minimum length, duration, outcome")
    return figure


def _look(trial: Trial, is_accepted: bool) -> dict:
    if is_accepted:
        return {"color": ACCENT, "linewidth": 2.4, "zorder": 3}
    return {"color": CONTRAST, "linestyle": "--"} if trial.fluctuates else {"color": QUIET}


def _limits(max_rise: float, trials: Sequence[Trial]) -> tuple[float, float]:
    """Limits of perplexity. They ignore each trial's first validation: before training, perplexity is far higher."""
    seen = [perplexity for trial in trials for perplexity in _finite(trial)[1:]]
    calm = [perplexity for trial in trials if not trial.fluctuates for perplexity in _finite(trial)[1:]]
    calm = calm or [min(_finite(trial)) for trial in trials if _finite(trial)]
    if not calm:
        return 1, 10
    top = min(1.1 * max(seen or calm), _HEADROOM * max_rise * max(calm), _HIGHEST)
    return min(0.95 * min(seen or calm), 0.5 * top), top


def _ticks(bottom: float, top: float) -> list[float]:
    """Some round numbers from bottom to top: 4 to 9 of them on a logarithmic axis."""
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7), tuple(each / 10 for each in range(10, 100, 2))):
        powers = range(math.floor(math.log10(bottom)), math.ceil(math.log10(top)))
        ticks = [step * 10.0**power for power in powers for step in steps if bottom <= step * 10.0**power <= top]
        if len(ticks) >= 4:
            break
    return ticks[:: 1 + len(ticks) // 10]


def _finite(trial: Trial) -> list[float]:
    return [each.perplexity for each in trial.validations if math.isfinite(each.perplexity)]


def _draw_trial(axes: Axes, trial: Trial, values: Sequence[float], top: float, look: dict) -> None:
    """Draw values of a trial. A cross marks a fluctuation, at its value or at the top of the axes."""
    points = list(zip([each.progress for each in trial.validations], values, strict=False))
    if not points:
        return
    progress, heights = zip(*[(at, min(value, _HIGHEST)) for at, value in points], strict=True)
    axes.plot(progress, heights, **look)
    if trial.fluctuates:
        cross = {"color": look["color"], "markersize": 10, "markeredgewidth": 2.5, "label": "_fluctuates"}
        axes.plot(progress[-1], min(heights[-1], top), "x", clip_on=progress[-1] > trial.end, **cross)
