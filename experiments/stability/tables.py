"""The tables of docs/benchmarks/stability.md, from the records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import mean
from typing import Any

from bench.common.records import markdown

from . import outcomes, search
from .arms import FIRST, LARGE, MAIN, Comparison
from .outcomes import ARMS, SEARCH, TUNER, Run
from .running import Record

NOT_YET = "not yet measured"


def report(records: Sequence[Record]) -> str:
    """Every table, under its heading."""
    tables = {"search": search_table, **TABLES, "final loss": _cells(_loss_cell), "tuner": tuner_table}
    return "\n\n".join(f"## {title}\n\n{make(records)}" for title, make in tables.items())


def compared(records: Sequence[Record], comparison: Comparison = MAIN) -> list[Run]:
    """The judged runs of a comparison."""
    return outcomes.judge(_of_comparison(records, comparison), FIRST)


def best_baseline(records: Sequence[Record]) -> float | None:
    """The final loss that the runs of the main comparison are judged by."""
    same = _of_comparison(records, MAIN)
    return outcomes.best_baseline(record for record in same if record["name"] == FIRST)


def _of_comparison(records: Sequence[Record], comparison: Comparison) -> list[Record]:
    same = [record for record in records if record["part"] == ARMS]
    return [record for record in same if record["comparison"] == comparison.name]


def _of_part(records: Sequence[Record], part: str) -> dict[str, list[Record]]:
    """The records of a part by their names."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record["part"] == part:
            found.setdefault(record["name"], []).append(record)
    return found


def _loss(run: Run) -> str:
    loss = run.figures["final_loss"]
    return "not finite" if loss is None else f"{loss:.2f}"


def _count(runs: Sequence[Run], holds: Callable[[Run], bool]) -> str:
    return f"{sum(map(holds, runs))} of {len(runs)}"


# ---- the search


def search_table(records: Sequence[Record]) -> str:
    """For each regime and rate: the final losses of the seeds, in brackets if they do not train, and spikes."""
    regimes = {name: outcomes.judge(found, name) for name, found in _of_part(records, SEARCH).items()}
    rates = sorted({run.rate for runs in regimes.values() for run in runs})
    if not rates:
        return NOT_YET
    rows = []
    for name, runs in regimes.items():
        cells = [_search_cell(outcomes.of(runs, name, rate)) for rate in rates]
        rows.append([name, *cells, "**unstable**" if outcomes.is_unstable_regime(runs) else ""])
    return markdown(["regime", *(f"{rate:g}" for rate in rates), ""], rows)


def _search_cell(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    losses = ", ".join(_loss(run) if run.trains else f"({_loss(run)})" for run in runs)
    spikes = ", ".join(str(run.figures["spikes"]) for run in runs)
    diverged = sum(run.figures["diverges"] for run in runs)
    return f"{losses}; {spikes} spikes" + (f"; {diverged} diverge" if diverged else "")


# ---- the arms


def _arm_table(runs: Sequence[Run], cell: Callable[[list[Run]], str]) -> str:
    rates = outcomes.rates_of(runs)
    if not rates:
        return NOT_YET
    names = dict.fromkeys(run.arm for run in runs)
    rows = [[name, *(cell(outcomes.of(runs, name, rate)) for rate in rates)] for name in names]
    return markdown(["", *(f"{rate:g}" for rate in rates)], rows)


def _share_cell(runs: list[Run]) -> str:
    return _count(runs, lambda run: run.trains) if runs else ""


def _loss_cell(runs: list[Run]) -> str:
    losses = [run.figures["final_loss"] for run in runs]
    if not losses:
        return ""
    if None in losses:
        return f"{losses.count(None)} of {len(losses)} not finite"
    return f"{mean(losses):.2f} ({min(losses):.2f} to {max(losses):.2f})"


def summary_table(records: Sequence[Record]) -> str:
    """For each arm: the largest rate that trains, its best final loss, and the seeds it gains and loses."""
    runs = compared(records)
    rows = []
    for arm in dict.fromkeys(run.arm for run in runs):
        own = [run for run in runs if run.arm == arm]
        largest = outcomes.largest_rate(own)
        pairs = [outcomes.gained_and_lost(runs, arm, FIRST, rate) for rate in outcomes.rates_of(runs)]
        gained, lost, seeds = (sum(column) for column in zip(*pairs, strict=True))
        best = min(outcomes.rates_of(own), key=lambda rate: _mean_loss(outcomes.of(own, arm, rate)))
        change = "" if arm == FIRST else f"{gained} gained, {lost} lost, of {seeds}"
        cells = [arm, f"{own[0].steps_to_peak}", "none" if largest is None else f"{largest:g}", f"{best:g}"]
        rows.append([*cells, _loss_cell(outcomes.of(own, arm, best)), change])
    header = [
        "",
        "steps to the peak",
        "largest rate that trains",
        "best rate",
        "final loss there",
        "beside the baseline, all rates",
    ]
    return markdown(header, rows) if rows else NOT_YET


def _mean_loss(runs: Sequence[Run]) -> float:
    losses = [run.figures["final_loss"] for run in runs]
    return float("inf") if None in losses else mean(losses)


def beta2_table(records: Sequence[Record]) -> str:
    """Pearson's r of the loss ratio and Adam's √variance, the range over the runs of the search, by beta2."""
    rows = []
    for name in (search.FIRST, "beta2 0.99", "beta2 0.95"):
        runs = _of_part(records, SEARCH).get(name, [])
        cells = [_range([run["figures"][each] for run in runs]) for each in ("r_l1", "r_max")]
        rows += [[name, f"{len(runs)}", *cells]] if runs else []
    return markdown(["regime", "runs", "with the l1 norm", "with the maximum"], rows) if rows else NOT_YET


def _range(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{min(known):+.2f} to {max(known):+.2f}" if known else "—"


# ---- the tuner


def tuner_table(records: Sequence[Record]) -> str:
    """Each search: the schedule it found, its cost, and whether a whole run with this schedule trains."""
    best = best_baseline(records)
    rows = [_tuner_row(record, best) for record in _of_part(records, TUNER).get(TUNER, [])]
    header = ["rate", "seed", "found", "trials", "share of the grid's tokens", "final loss", "trains"]
    return markdown(header, rows) if rows else NOT_YET


def _tuner_row(record: dict[str, Any], best: float | None) -> list[str]:
    setting, figures = record["setting"], record["figures"]
    cells = [f"{setting['rate']:g}", f"{setting['seed']}"]
    cost = [f"{figures['trials']}", f"{figures['share_of_grid']:.1%}"]
    if not figures["found"]:
        return [*cells, "no stable schedule", *cost, "", ""]
    loss = figures["final_loss"]
    schedule = f"from {setting['min_seq_length']} over {setting['duration']:.0%}"
    shown = "not finite" if loss is None else f"{loss:.2f}"
    return [*cells, schedule, *cost, shown, "yes" if outcomes.trains(loss, best) else "no"]


def _cells(cell: Callable[[list[Run]], str], comparison: Comparison = MAIN) -> Callable[[Sequence[Record]], str]:
    return lambda records: _arm_table(compared(records, comparison), cell)


TABLES: dict[str, Callable[[Sequence[Record]], str]] = {  # in the order of the page
    "seeds that train": _cells(_share_cell),
    "arms": summary_table,
    "large batches, seeds that train": _cells(_share_cell, LARGE),
    "variance by beta2": beta2_table,
}
