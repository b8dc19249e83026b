"""docs/figures/training_*.png, drawn from the results."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common.figures import label_lines, log_axis, mark, plot, save_both
from seqwarm_kernels.utils.figures import FULL_LENGTH, PLAIN_NUMBERS, WITH_WARMUP, ink, new_figure

from .plan import CAUSAL, EXTRAPOLATION, MASKED, PACKAGE, SPEED, STABILITY, TIME
from .results import TRAINS, Result, by_attention, shown_lengths
from .scales import Scale
from .statistics import SPIKE, Spread, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BASELINE, WARMUP, HALF_BATCH = FULL_LENGTH, WITH_WARMUP, "half the batch, full length"


def draw_all(results: Sequence[Result], folder: Path, scale: Scale) -> list[Path]:
    """Draw one figure for each experiment that has results. Returns their paths."""
    prefix, drawn = "training" if scale.device == "cpu" else f"training_{scale.name}", []
    for name, experiment, draw in (
        ("time", TIME, time_figure),
        ("stability", STABILITY, stability_figure),
        ("extrapolation", EXTRAPOLATION, extrapolation_figure),
        ("speed", SPEED, speed_figure),
    ):
        found = [r for r in results if r.experiment == experiment and r.failure is None]
        if found:
            drawn.append(save_both(functools.partial(draw, found, scale), folder / f"{prefix}_{name}.png"))
    return drawn


def _machine(scale: Scale) -> str:
    return "on 2 CPU cores" if scale.device == "cpu" else "on a GPU"


# ---- (a) time and tokens


def time_figure(results: list[Result], scale: Scale) -> Figure:
    """Left: loss curves of seed 0. Right: how much sooner each duration reaches the baseline's final loss."""
    figure = new_figure(12, 5)
    curves, ratios = figure.subplots(1, 2)
    draw_loss_curves(curves, results)
    draw_ratios(ratios, results)
    label_lines([curves])
    figure.suptitle(f"A longer warmup reaches the baseline's loss sooner (toy training {_machine(scale)})")
    return figure


def draw_loss_curves(axes: Axes, results: list[Result]) -> None:
    """Loss over tokens, which are exact, of seed 0. Longer warmups have stronger colors."""
    shown = [r for r in results if r.case["seed"] == 0 and r.figures["curve"]]
    for result in sorted(shown, key=lambda r: r.case["duration"]):
        tokens, _, losses = zip(*result.figures["curve"], strict=True)
        duration, name = result.case["duration"], _name(result, results)
        options = {"marker": "none", "label": _CURVE_LABELS.get(name, f"warmup {duration:.0%}")}
        if name == WARMUP:
            options |= {"alpha": 0.3 + 0.7 * duration, "linewidth": 0.8 + 2 * duration}
        plot(axes, name, [count / 1000 for count in tokens], losses, **options)
        if name == BASELINE:
            axes.axhline(losses[-1], color=ink(), linestyle=(0, (4, 3)), linewidth=1, zorder=1.5)
    late = [point[2] for r in results for point in r.figures["curve"] if point[0] > 0.25 * r.figures["tokens"]]
    axes.set(xlabel="tokens trained on, in thousands", ylabel="validation loss at the full length (nats per token)")
    if late:
        axes.set_ylim(min(late) - 0.05, max(late) + 0.1)
    axes.set_title("Loss of seed 0; dashed: final loss of the baseline")
    axes.xaxis.set_major_formatter(PLAIN_NUMBERS)


_CURVE_LABELS = {BASELINE: "full length", HALF_BATCH: "half the batch"}


def _name(result: Result, results: Iterable[Result]) -> str:
    if result.case["duration"] > 0:
        return WARMUP
    return HALF_BATCH if result.case["batch_size"] < max(r.case["batch_size"] for r in results) else BASELINE


def draw_ratios(axes: Axes, results: list[Result]) -> None:
    """Times sooner at the baseline's final loss: a point for each run. Seconds of half the batch are not comparable."""
    for name in (WARMUP, HALF_BATCH):
        same = [r for r in results if _name(r, results) == name]
        for unit, filled, shift in (("tokens", True, -0.008), ("seconds", False, 0.008)):
            points = [(r.case["duration"] + shift, r.figures[f"sooner_in_{unit}"]) for r in same]
            reached = [point for point in points if point[1] is not None]
            if reached and not (name == HALF_BATCH and unit == "seconds"):
                label = f"in {unit}" if name == WARMUP else "half the batch,\nin tokens"
                fill: dict[str, Any] = {} if filled else {"markerfacecolor": "none"}
                plot(axes, name, *zip(*reached, strict=True), linestyle="none", label=label, **fill)
    missed = [r.case["duration"] for r in results if r.case["duration"] > 0 and r.figures["sooner_in_tokens"] is None]
    if missed:
        axes.plot(missed, [0] * len(missed), "x", color=ink(), label="never reached", clip_on=False)
    if axes.lines:
        axes.legend(loc="lower right")
    mark(axes, "as soon as the baseline", y=1)
    axes.set(
        xlabel="warmup, share of the tokens", ylabel="reached this many times sooner", ylim=(0, None), xlim=(-0.05, 1)
    )
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title("When the final loss of the baseline was reached, each seed")


# ---- (b) stability


def stability_figure(results: list[Result], scale: Scale) -> Figure:
    """Final loss for each batch size, and the largest loss ratio, over the learning rate."""
    batches = sorted({r.case["batch_size"] for r in results})
    figure = new_figure(12, 4.8)
    panels = figure.subplots(1, len(batches) + 1)
    losses = [r.figures["final_loss"] for r in results if r.figures["final_loss"] is not None]
    for axes, batch in zip(panels, batches, strict=False):
        same = [r for r in results if r.case["batch_size"] == batch]
        _draw_runs(axes, same, "final_loss")
        baseline = [r for r in same if r.case["duration"] == 0 and r.case["learning_rate_factor"] == 1]
        if baseline and baseline[0].figures["final_loss"] is not None:
            mark(axes, "trains below", y=TRAINS * baseline[0].figures["final_loss"])
        axes.set_title(f"{batch} rows in a batch")
        axes.set_ylabel("final validation loss (nats per token)")
        if losses:
            axes.set_ylim(min(losses) - 0.2, max(losses) + 0.2)
    _draw_runs(panels[-1], results, "largest_ratio", hollow=batches[1:])
    mark(panels[-1], f"a spike: above {SPIKE:g}", y=SPIKE)
    panels[-1].set_title(f"Spikes, hollow: {', '.join(map(str, batches[1:]))} rows" if batches[1:] else "Spikes")
    panels[-1].set_ylabel("largest loss, relative to the smallest before")
    handles = {line.get_gid(): line for line in panels[0].lines if line.get_gid()}
    title = f"{_seeds(results)}; trains: at most {TRAINS:g} times the baseline's loss at × 1"
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=2, title=title)
    return figure


def _seeds(results: Iterable[Result]) -> str:
    count = len({r.case["seed"] for r in results})
    return "1 seed" if count == 1 else f"{count} seeds"


def _draw_runs(axes: Axes, results: list[Result], value: str, hollow: Sequence[int] = ()) -> None:
    for name, is_warm, shift in ((BASELINE, False, 1 / 1.05), (WARMUP, True, 1.05)):
        for batch in sorted({r.case["batch_size"] for r in results}):
            same = [r for r in results if (r.case["duration"] > 0, r.case["batch_size"]) == (is_warm, batch)]
            points = [(shift * r.case["learning_rate_factor"], r.figures[value]) for r in same]
            points = sorted(point for point in points if point[1] is not None)
            if points:
                fill: dict[str, Any] = {"markerfacecolor": "none"} if batch in hollow else {}
                plot(axes, name, *zip(*points, strict=True), linestyle="none", markersize=7, **fill)
    log_axis(axes.xaxis, sorted({r.case["learning_rate_factor"] for r in results}))
    axes.set_xlabel("times the baseline's best learning rate")


# ---- (c) longer than trained


def extrapolation_figure(results: list[Result], scale: Scale) -> Figure:
    """Loss over the length of the validation windows, causal and masked, on equal axes."""
    objectives = [each for each in (CAUSAL, MASKED) if any(r.case["objective"] == each for r in results)]
    figure = new_figure(6 * len(objectives), 4.6)
    panels = list(figure.subplots(1, len(objectives), sharey=True, squeeze=False)[0])
    for axes, objective in zip(panels, objectives, strict=True):
        same = [r for r in results if r.case["objective"] == objective and r.figures["loss_by_length"]]
        _draw_losses_by_length(axes, same)
        axes.set(xlabel="tokens in a validation window", ylabel="validation loss (nats per token)")
        axes.set_title(f"{objective} training, {_seeds(same)}")
        mark(axes, f"trained at {scale.seq_length}", x=scale.seq_length)
    losses = [loss for r in results for loss in r.figures["loss_by_length"].values()]
    if losses:
        panels[0].set_ylim(0, 1.15 * max(losses))
    label_lines(panels)
    figure.suptitle("Loss on windows longer than in training")
    return figure


def _draw_losses_by_length(axes: Axes, results: list[Result]) -> None:
    """A line for each run that did not diverge. The label has the losses of all seeds at the longest windows."""
    for name, is_warm in ((BASELINE, False), (WARMUP, True)):
        runs = [r.figures["loss_by_length"] for r in results if (r.case["duration"] > 0) == is_warm]
        for index, losses in enumerate(runs):
            lengths = [int(length) for length in losses]
            last = sorted(run[str(max(lengths))] for run in runs)
            ends = " to ".join(dict.fromkeys(f"{loss:.2f}" for loss in (last[0], last[-1])))
            label = f"{name}:\n{ends} at {max(lengths):,}" if index == 0 else f"_{name}"
            plot(axes, name, lengths, list(losses.values()), label=label)
            log_axis(axes.xaxis, lengths)


# ---- (d) speed

_ATTENTIONS = {PACKAGE: "this package", "eager": "eager, slicing", "flex": "FlexAttention"}


def speed_figure(results: list[Result], scale: Scale) -> Figure:
    """Median speed at each length of the ramp, with the range of the runs."""
    figure = new_figure(8, 4.8)
    axes = figure.subplots()
    speeds = {_ATTENTIONS[name]: speeds_by_length(runs) for name, runs in by_attention(results).items()}
    for index, (name, found) in enumerate((name, found) for name, found in speeds.items() if found):
        line = plot(axes, name, list(found), [each.median for each in found.values()])
        shift = 2 * (index - (len(speeds) - 1) / 2)  # so that no range hides another
        lows, highs = [each.lowest for each in found.values()], [each.highest for each in found.values()]
        axes.vlines([length + shift for length in found], lows, highs, color=line.get_color(), linewidth=3, alpha=0.4)
    axes.set(xlabel="sequence length in the ramp (tokens)", ylabel="tokens per second of training", ylim=(0, None))
    axes.set_xticks(shown_lengths({length for found in speeds.values() for length in found}))
    axes.yaxis.set_major_formatter(PLAIN_NUMBERS)
    label_lines([axes], bold=_ATTENTIONS[PACKAGE])
    figure.suptitle("Training speed during a ramp: median and range of the runs (higher is better)")
    return figure


def speeds_by_length(runs: Iterable[Result]) -> dict[int, Spread]:
    """Tokens per second of all runs at each length."""
    stages = [stage for run in runs for stage in run.figures["by_length"] if stage[1]]
    lengths = sorted({stage[0] for stage in stages})
    return {length: spread([stage[1] for stage in stages if stage[0] == length]) for length in lengths}
