"""`python -m bench training --only stability`: plans, estimates, trains what is missing, and publishes."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import mean

from bench.common.records import RESULTS, environment, read

from .. import publishing
from . import arms, search, tuner
from .figures import draw_all
from .outcomes import ARMS, SEARCH, TUNER
from .running import Record, finished, missing, run_all
from .settings import Setting
from .tables import report
from .training import train

RECORDS = "cpu_stability"
KEY = ("part", "comparison", "name", "setting")  #: tells records apart
SECONDS_PER_TOKEN = 8e-5  #: of runs that the published records do not know


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--only stability")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="one seed of baseline and warmup, five minutes")
    size.add_argument("--full", action="store_true", help="the search for a regime, all arms, and the tuner")
    group.add_argument("--jobs", type=int, default=2, help="processes of one thread (default: 2)")


def main(arguments: argparse.Namespace, figures: Path) -> None:
    """Train what is missing, print the tables, and publish records and `figures` if wanted."""
    if arguments.jobs < 1:
        sys.exit(f"--jobs must be at least 1, got {arguments.jobs}")
    if arguments.text or arguments.minutes or arguments.scale != "toy":
        sys.exit("--only stability has a text and a size of its own: --text, --minutes and --scale do not apply to it")
    out = arguments.out.resolve() / "stability"
    size = "quick" if arguments.quick else "full" if arguments.full else "first"
    for title, (work, folder, settings) in _stages(size, out).items():
        print(f"{title}: {estimate(folder, settings, arguments.jobs)}")
        run_all(work, folder, settings, arguments.jobs, title)
    records, machine = list(all_records(out)), environment()
    path = out / f"{RECORDS}.jsonl"
    publishing.write(path, machine, records)
    print(report(records))
    publishing.draw(draw_all, records, out / "figures")
    if arguments.publish:
        published = RESULTS / path.name
        refusal = publishing.refusal(published, records, KEY)
        if refusal is not None:
            sys.exit(refusal)
        publishing.write(published, machine, records)
        publishing.draw(draw_all, records, figures)


_Stage = tuple[Callable[[Setting], Record], Path, Sequence[Setting]]


def _stages(size: str, out: Path) -> dict[str, _Stage]:
    runs = out / "runs"
    if size == "quick":
        return {"baseline and warmup, one seed": (train, runs, arms.quick_settings())}
    if size == "first":
        return {"baseline and warmup": (train, runs, arms.first_settings())}
    return {
        "search for a regime": (train, runs, search.all_settings()),
        "arms": (train, runs, arms.full_settings()),
        "tuner": (tuner.search, out / "tuner", arms.tuned_settings()),
    }


def estimate(folder: Path, settings: Sequence[Setting], jobs: int) -> str:
    """What is left, and how long it takes by the times of the published runs."""
    left = missing(folder, settings)
    if not left:
        return f"all {len(set(settings))} runs are finished"
    known = published_seconds()
    usual = mean(known.values()) if known else None
    seconds = sum(known.get(each.name, usual or SECONDS_PER_TOKEN * each.tokens) for each in left) / jobs
    minutes = max(1, round(seconds / 60))
    return f"{len(left)} of {len(set(settings))} runs left, about {minutes} minutes with {jobs} processes"


@functools.cache
def published_seconds() -> dict[str, float]:
    """Seconds of each run of the published records, by its name."""
    path = RESULTS / f"{RECORDS}.jsonl"
    lines = read(path)[1] if path.exists() else []
    return {Setting(**line["setting"]).name: line["figures"]["seconds"] for line in lines if line["part"] != TUNER}


def all_records(out: Path) -> Iterator[Record]:
    """The records of all finished runs, also those of earlier calls, each with its part and its name in it."""
    runs = out / "runs"
    for regime in search.REGIMES:
        found = map(_without_curve, finished(runs, search.settings_of(regime)))
        yield from ({"part": SEARCH, "name": regime, **each} for each in found)
    for comparison in arms.COMPARISONS:
        for each in finished(runs, comparison.settings()):
            name = comparison.arm_of(Setting(**each["setting"]))
            record = each if comparison == arms.MAIN else _without_curve(each)
            yield {"part": ARMS, "comparison": comparison.name, "name": name, **record}
    tuned = map(_without_curve, finished(out / "tuner", arms.tuned_settings()))
    yield from ({"part": TUNER, "name": TUNER, **each} for each in tuned)


def _without_curve(record: Record) -> Record:
    """The record without the curve of losses, which only the figure of the main comparison needs."""
    return {**record, "figures": {name: value for name, value in record["figures"].items() if name != "curve"}}
