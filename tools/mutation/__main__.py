"""Try mutants, write their outcomes to tools/mutation/records.jsonl, and the report to tools/mutation/scores.md."""

from __future__ import annotations

import argparse
import multiprocessing
import re
import tempfile
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tqdm import tqdm

from . import report
from .mutants import NOT_BUILT, Mutant, Outcome, append, read, rewrite, shuffled_mutants
from .targets import TARGETS, Target
from .trial import start_worker, try_mutant

ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.mutation", description=__doc__)
    parser.add_argument("--only", metavar="REGEX", default="", help="files whose path matches this in a part")
    parser.add_argument("--limit", type=int, default=40, help="number of mutants of each file (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="number of processes (default: %(default)s)")
    parser.add_argument("--report", action="store_true", help="only write the report")
    arguments = parser.parse_args()
    if not arguments.report:
        targets = [target for target in TARGETS if re.search(arguments.only, target.file)]
        with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(arguments.workers, context, start_worker, (ROOT, Path(scratch))) as executor:
                for target in targets:
                    try_file(executor, target, arguments.limit)
    (ROOT / report.PAGE).write_text(report.page(read()))


def try_file(executor: ProcessPoolExecutor, target: Target, limit: int) -> None:
    """Try the mutants of a file that have no outcome yet. Each outcome is written as soon as it is known."""
    mutants = shuffled_mutants(ROOT, target.file)
    outcomes = read()
    others = {mutant: outcome for mutant, outcome in outcomes.items() if mutant.file != target.file}
    known = {mutant: outcomes[mutant] for mutant in mutants if mutant in outcomes}
    with tqdm(desc=target.file, total=0, unit=" mutants", dynamic_ncols=True) as bar:
        while waiting := pending(mutants, known, limit):
            bar.total += len(waiting)
            futures = {executor.submit(try_mutant, mutant, target.runs): mutant for mutant in waiting}
            for future in as_completed(futures):
                mutant, outcome = futures[future], future.result()
                append(mutant, outcome)
                known[mutant] = outcome
                bar.update()
    rewrite(others | known)


def pending(mutants: list[Mutant], known: Mapping[Mutant, Outcome], limit: int) -> list[Mutant]:
    """The mutants to try next, for outcomes of the first `limit` mutants that can be built."""
    built = [mutant for mutant in mutants if mutant not in known or known[mutant].result != NOT_BUILT]
    return [mutant for mutant in built[:limit] if mutant not in known]


if __name__ == "__main__":
    main()
