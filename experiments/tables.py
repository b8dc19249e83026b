"""Tables of the results in Markdown. Experiments without a run are "not yet measured"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from typing import Any

from bench.common.records import markdown

from .plan import EXTRAPOLATION, LAST_WORDS, MASKED, PACKAGE, SPEED, STABILITY, SWEEP, TIME, TOKENS
from .results import Result, best_peak, by_attention, shown_lengths
from .scales import Scale
from .statistics import spread

NOT_YET = "not yet measured"


def report(results: Sequence[Result], scale: Scale) -> str:
    """The table of every experiment, under its own heading."""
    parts = {
        "Learning rate": (sweep_table, SWEEP),
        "(a) Time and tokens to the baseline's final loss": (time_table, TIME),
        "(b) Stability": (stability_table, STABILITY),
        "(b) Variance and loss ratio": (correlation_table, STABILITY),
        f"(c) Loss by length, trained at {scale.seq_length}": (extrapolation_table, EXTRAPOLATION),
        "(c) Last words": (last_words_table, LAST_WORDS),
        "(d) Speed": (speed_table, SPEED),
        "(e) Constant tokens in a step": (token_table, TOKENS),
    }
    sections = []
    for title, (make, experiment) in parts.items():
        found = [result for result in results if result.experiment == experiment]
        sections.append(f"## {title}\n\n{make(found) if found else NOT_YET}")
    return "\n\n".join(sections)


def _number(value: float | None, form: str = ".3f") -> str:
    return "—" if value is None else format(value, form)


def _kind(duration: float) -> str:
    return f"warmup {duration:g}" if duration else "baseline"


def sweep_table(results: Sequence[Result]) -> str:
    rows = []
    for (share, rate), found in _groups(results, lambda case: (case["lr_warmup_share"], case["learning_rate"])):
        losses = [result.figures["final_loss"] for result in found]
        whole = None if None in losses else mean(losses)
        rows.append([f"{share:g}", f"{rate:g}", ", ".join(_number(loss) for loss in losses), _number(whole)])
    names = ["share of tokens to the peak", "learning rate at the peak", "final loss of each seed", "mean"]
    if all(row[-1] == "—" for row in rows):
        return markdown(names, rows)
    best = best_peak(results)
    assert best is not None
    return f"{markdown(names, rows)}\n\nChosen: {best.rate:g} after {best.share:g} of the tokens"


def time_table(results: Sequence[Result]) -> str:
    names = ["duration", "batch", "seed", "final loss", "steps", "seconds", "sooner in tokens", "sooner in seconds"]
    names.append("tokens/s at full length")  # the same work in each run: if it differs, seconds are not comparable
    keys = [("final_loss", ".3f"), ("steps", "d"), ("seconds", ".1f"), ("sooner_in_tokens", ".2f")]
    keys += [("sooner_in_seconds", ".2f"), ("full_length_speed", ",.0f")]
    ordered = sorted(results, key=lambda r: (r.case["duration"], -r.case["batch_size"], r.case["seed"]))
    rows = [
        [
            f"{r.case['duration']:g}",
            r.case["batch_size"],
            r.case["seed"],
            *(_number(r.figures[name], form) for name, form in keys),
        ]
        for r in ordered
    ]
    return "\n\n".join([markdown(names, rows), *_diverged_baselines(results), *_time_spread(results)])


def token_table(results: Sequence[Result]) -> str:
    """Losses of each seed, and how much lower they are than the baseline's of the same seed."""
    names = ["", "rows at full length", "tokens of a step", "steps", "final loss of each seed"]
    names += ["mean", "less than the baseline", "sooner in tokens"]
    rows = []
    for (duration, batch, tokens), found in _groups(results, lambda c: (c["duration"], -c["batch_size"], c["tokens"])):
        losses = [r.figures["final_loss"] for r in found]
        lower = [
            None if None in (r.figures["final_loss"], r.figures["target_loss"])
            else r.figures["target_loss"] - r.figures["final_loss"]
            for r in found
        ]  # fmt: skip
        each = [
            ", ".join(dict.fromkeys(str(r.figures["steps"]) for r in found)),
            ", ".join(map(_number, losses)),
            _number(None if None in losses else mean(losses)),
            ", ".join(_number(value, "+.3f") for value in lower),
            ", ".join(_number(r.figures["sooner_in_tokens"], ".2f") for r in found),
        ]
        rows.append([_kind(duration), -batch, tokens if duration else "—", *each])
    return "\n\n".join([markdown(names, rows), *_diverged_baselines(results)])


def _diverged_baselines(results: Sequence[Result]) -> list[str]:
    seeds = sorted({r.case["seed"] for r in results if "target_loss" in r.figures and r.figures["target_loss"] is None})
    return [f"Seed {seed}: the baseline diverged, so there is no loss to reach" for seed in seeds]


def _time_spread(results: Sequence[Result]) -> list[str]:
    """Spread over the seeds of a duration. Seed 0 is shown separately: it chose the duration, so it is biased."""
    by_duration: dict[float, list[Result]] = {}
    for result in results:
        if result.case["duration"] > 0:
            by_duration.setdefault(result.case["duration"], []).append(result)
    lines = []
    for duration, found in by_duration.items():
        for unit in ("tokens", "seconds"):
            ratios = {r.case["seed"]: r.figures[f"sooner_in_{unit}"] for r in found}
            reached = [ratio for ratio in ratios.values() if ratio is not None]
            if len(ratios) < 2:
                continue
            low, middle, high = spread(reached) if reached else (None, None, None)
            times = f"{_number(middle, '.2f')} ({_number(low, '.2f')} to {_number(high, '.2f')})"
            others = ", ".join(_number(ratio, ".2f") for seed, ratio in sorted(ratios.items()) if seed)
            chose = f"seed 0, which chose the duration: {_number(ratios.get(0), '.2f')}; the others: {others}"
            seeds = f"reached in {len(reached)} of {len(ratios)} seeds"
            lines.append(f"Duration {duration:g}, times sooner in {unit}: {times}, {seeds}; {chose}")
    return lines


def stability_table(results: Sequence[Result]) -> str:
    names = ["batch", "learning rate ×", "", "seeds", "steps", "spikes", "largest ratio"]
    names += ["diverged", "trains", "final loss"]
    rows = []
    for group in _groups(results, lambda c: (c["batch_size"], c["learning_rate_factor"], c["duration"])):
        (batch, factor, duration), found = group
        losses = ", ".join(_number(r.figures["final_loss"]) for r in found)
        each = [", ".join(_shown(r.figures[name]) for r in found) for name in ("steps", "spikes", "largest_ratio")]
        counts = [_count([r.figures[name] for r in found]) for name in ("diverged", "trains")]
        rows.append([batch, f"{factor:g}", _kind(duration), len(found), *each, *counts, losses])
    return markdown(names, rows)


def _count(values: Sequence[bool | None]) -> str:
    """Number of true values. If some are None, also the number of known values."""
    known = [value for value in values if value is not None]
    return "—" if not known else str(sum(known)) + (f" of {len(known)}" if len(known) < len(values) else "")


def _shown(value: float | None) -> str:
    return _number(value, "d" if isinstance(value, int) else ".2f")


def _groups(results: Iterable[Result], key: Callable[[dict[str, Any]], Any]) -> list[tuple[Any, list[Result]]]:
    groups: dict[Any, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result.case), []).append(result)
    return sorted(groups.items())


def correlation_table(results: Sequence[Result]) -> str:
    names = ["batch", "learning rate ×", "", "seed", "r with max √v", "p", "r with l1 √v", "p"]
    rows, lacks_p = [], False
    for result in results:
        case = result.case
        row = [case["batch_size"], f"{case['learning_rate_factor']:g}", _kind(case["duration"]), case["seed"]]
        for name in ("ratio_with_variance_max", "ratio_with_variance_l1"):
            found = result.figures[name]
            row += ["—", "—"] if found is None else [f"{found['r']:+.2f}", _number(found["p"], ".1g")]
            lacks_p |= found is not None and found["p"] is None
        rows.append(row)
    return markdown(names, rows) + ("\n\np needs scipy, which was not installed" if lacks_p else "")


def extrapolation_table(results: Sequence[Result]) -> str:
    lengths = sorted({length for r in results for length in r.figures["loss_by_length"]}, key=int)
    rows = [
        [
            r.case["objective"],
            _kind(r.case["duration"]),
            r.case["seed"],
            *(_number(r.figures["loss_by_length"].get(length)) for length in lengths),
        ]
        for r in sorted(results, key=lambda r: (r.case["objective"] == MASKED, r.case["duration"], r.case["seed"]))
    ]
    return markdown(["objective", "", "seed", *(f"loss at {length}" for length in lengths)], rows)


def last_words_table(results: Sequence[Result]) -> str:
    ordered = sorted(results, key=lambda r: (r.case["duration"], r.case["seed"]))
    rows = [
        [
            _kind(r.case["duration"]),
            r.case["seed"],
            r.figures["items"],
            f"{r.figures['accuracy']:.1%}",
            _number(r.figures["perplexity"], ".1f"),
            _number(r.figures.get("p"), ".2g"),
            f"{r.figures['nats_fewer']:.2f} ± {_number(r.figures['nats_fewer_error'], '.2f')}"
            if "p" in r.figures
            else "—",
        ]
        for r in ordered
    ]
    names = ["", "seed", "items", "right", "perplexity of the word", "p of the difference", "nats per word saved"]
    return markdown(names, rows)


def speed_table(results: Sequence[Result]) -> str:
    found = by_attention(results)
    ours = [r for r in found[PACKAGE] if r.failure is None]
    lengths = shown_lengths({stage[0] for r in results if r.failure is None for stage in r.figures["by_length"]})
    at_lengths = [f"at {length}" for length in lengths]
    names = ["attention", "tokens/s, whole ramp", *at_lengths, "peak MB", "time / package's time"]
    rows = []
    for attention, runs in found.items():
        failures = [run.failure for run in runs if run.failure is not None]
        if failures or not runs:
            rows.append([attention, failures[0] if failures else NOT_YET, *[""] * (len(lengths) + 2)])
            continue
        whole = spread([run.figures["tokens_per_second"] for run in runs])
        stages = [stage for run in runs for stage in run.figures["by_length"]]
        at = [_number(_median_at(stages, length), ",.0f") for length in lengths]
        peaks = [max((stage[2] or 0 for stage in run.figures["by_length"]), default=0) for run in runs]
        memory = spread(peaks).median / 1e6
        ratio = spread([o.figures["tokens_per_second"] for o in ours]).median / whole.median if ours else None
        speed = f"{whole.median:,.0f} ({whole.lowest:,.0f} to {whole.highest:,.0f})"
        rows.append([attention, speed, *at, f"{memory:,.0f}", _number(ratio, ".2f")])
    return markdown(names, rows)


def _median_at(stages: Sequence[Sequence[float]], length: int) -> float | None:
    """The median speed. None if no run reached this length."""
    found = [stage[1] for stage in stages if stage[0] == length and stage[1]]
    return spread(found).median if found else None
