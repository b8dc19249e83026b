"""docs/figures/training_*.png, drawn from the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .plan import CAUSAL, EXTRAPOLATION, MASKED, PACKAGE, SPEED, STABILITY, TIME
from .results import Result, by_attention
from .scales import Scale
from .statistics import SPIKE, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BASELINE_COLOR, WARMUP_COLOR = "#0072B2", "#D55E00"  #: as in the demo: Okabe and Ito's blue and orange


def draw_all(results: Sequence[Result], folder: Path, scale: Scale) -> list[Path]:
    """Draw one figure for each experiment that has results. Returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    prefix, drawn = "training" if scale.device == "cpu" else f"training_{scale.name}", []
    for name, experiment, draw, columns in (
        ("time", TIME, _draw_time, 2),
        ("stability", STABILITY, _draw_stability, 2),
        ("extrapolation", EXTRAPOLATION, _draw_extrapolation, 2),
        ("speed", SPEED, _draw_speed, 1),
    ):
        found = [r for r in results if r.experiment == experiment and r.failure is None]
        if not found:
            continue
        size = (9 if columns == 2 else 6, 3.8)
        figure, axes = plt.subplots(1, columns, figsize=size, layout="constrained", squeeze=False)
        draw(list(axes[0]), found)
        figure.suptitle(f"{scale.size}, {scale.device}", fontsize=9)
        for axis in axes[0]:
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
        drawn.append(folder / f"{prefix}_{name}.png")
        figure.savefig(drawn[-1], dpi=110)
        plt.close(figure)
    return drawn


def _draw_time(axes: list[Axes], results: list[Result]) -> None:
    """Left: loss curves of seed 0. Right: how much sooner each duration reaches the baseline's final loss."""
    curves, ratios = axes
    import matplotlib

    batch_size = max(result.case["batch_size"] for result in results)
    shades = matplotlib.colormaps["viridis"]
    for result in sorted(results, key=lambda r: r.case["duration"]):
        duration = result.case["duration"]
        if result.case["seed"] == 0 and result.figures["curve"]:
            _, seconds, losses = zip(*result.figures["curve"], strict=True)
            is_half = result.case["batch_size"] < batch_size
            label = f"{duration:g}{', half the batch' if is_half else ''}"
            color = "black" if duration == 0 else shades(duration)
            curves.plot(seconds, losses, label=label, color=color, linestyle=":" if is_half else "-")
            if duration == 0 and not is_half:
                curves.axhline(losses[-1], color="0.4", linestyle="--", linewidth=1)
    late = [point[2] for r in results for point in r.figures["curve"] if point[0] > 0.25 * r.figures["tokens"]]
    curves.set(xlabel="seconds of training", ylabel="validation loss at full length")
    if late:
        curves.set_ylim(min(late) - 0.05, max(late) + 0.1)
    if curves.lines:
        curves.legend(title="duration, seed 0", fontsize=7, title_fontsize=7)
    for unit, color, marker in (("seconds", WARMUP_COLOR, "o"), ("tokens", BASELINE_COLOR, "s")):
        points = [(r.case["duration"], r.figures[f"sooner_in_{unit}"]) for r in results if r.case["duration"] > 0]
        reached = [point for point in points if point[1] is not None]
        if reached:
            durations, times = zip(*reached, strict=True)
            ratios.plot(durations, times, marker, color=color, markersize=5, alpha=0.8, label=unit)
    missed = [r.case["duration"] for r in results if r.case["duration"] > 0 and r.figures["sooner_in_tokens"] is None]
    if missed:
        ratios.plot(missed, [0] * len(missed), "x", color="black", label="never reached", clip_on=False)
    ratios.axhline(1, color="0.4", linestyle="--", linewidth=1)
    ratios.set(xlabel="duration, share of tokens", ylabel="times sooner at the baseline's final loss", ylim=(0, None))
    if len(ratios.lines) > 1:
        ratios.legend(fontsize=7)


def _draw_stability(axes: list[Axes], results: list[Result]) -> None:
    """Left: final loss. Right: largest loss ratio. Both over the learning rate, with a point for each run."""
    batches = sorted({r.case["batch_size"] for r in results})
    for axis, value, label in (
        (axes[0], lambda f: f["final_loss"], "final validation loss"),
        (axes[1], lambda f: f["largest_ratio"], "largest loss ratio"),
    ):
        for batch, marker in zip(batches, "os^v", strict=False):
            for warm, color in ((False, BASELINE_COLOR), (True, WARMUP_COLOR)):
                same = [r for r in results if r.case["batch_size"] == batch and (r.case["duration"] > 0) == warm]
                shift = 1.06 if warm else 1 / 1.06  # so that points do not hide each other
                points = [(shift * r.case["learning_rate_factor"], value(r.figures)) for r in same]
                points = [point for point in points if point[1] is not None]
                if points:
                    factors, values = zip(*points, strict=True)
                    name = f"{'warmup' if warm else 'baseline'}, batch {batch}"
                    filled = color if batch == batches[0] else "none"
                    axis.plot(factors, values, marker, color=color, markerfacecolor=filled, label=name)
        _set_powers_of_two(axis, [r.case["learning_rate_factor"] for r in results])
        axis.set(xlabel="times the baseline's best learning rate", ylabel=label)
    axes[1].axhline(SPIKE, color="0.4", linestyle="--", linewidth=1)
    axes[0].legend(fontsize=7)


def _set_powers_of_two(axis: Axes, values: Iterable[float]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(set(values)), [f"{value:g}" for value in sorted(set(values))])


def _draw_extrapolation(axes: list[Axes], results: list[Result]) -> None:
    """Left: causal training. Right: masked training."""
    for axis, objective in zip(axes, (CAUSAL, MASKED), strict=True):
        same = [result for result in results if result.case["objective"] == objective]
        for result in same:
            warm = result.case["duration"] > 0
            losses = {int(length): loss for length, loss in result.figures["loss_by_length"].items()}
            color, marker, name = (WARMUP_COLOR, "s", "warmup") if warm else (BASELINE_COLOR, "o", "baseline")
            label = name if result.case["seed"] == 0 else None
            axis.plot(list(losses), list(losses.values()), color=color, marker=marker, label=label)
            if losses:  # a run that diverged has none
                _set_powers_of_two(axis, losses)
        axis.set(title=objective, xlabel="tokens in a validation window", ylabel="validation loss")
        if same:
            axis.legend(fontsize=7)


def _draw_speed(axes: list[Axes], results: list[Result]) -> None:
    [axis] = axes
    for attention, runs in by_attention(results).items():
        stages = [stage for run in runs for stage in run.figures["by_length"] if stage[1]]
        if not stages:
            continue
        lengths = sorted({stage[0] for stage in stages})
        found = [spread([stage[1] for stage in stages if stage[0] == length]) for length in lengths]
        middle = [each.median for each in found]
        down = [each.median - each.lowest for each in found]
        up = [each.highest - each.median for each in found]
        width = 2 if attention == PACKAGE else 1
        axis.errorbar(lengths, middle, (down, up), marker="o", capsize=3, linewidth=width, label=attention)
    axis.set(xlabel="sequence length in the ramp", ylabel="tokens per second of training", ylim=(0, None))
    axis.legend(fontsize=7)
