"""The command `tune`: finds a schedule for the demo's small GPT, or for the user's own training."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.progress import standard_error
from .common import (
    TRAINING,
    CommandError,
    Result,
    add_figure,
    add_pacing,
    add_training,
    pacing,
    training_settings,
    usage_errors,
)

if TYPE_CHECKING:  # imported by the functions, so that help is quick
    from ..demo.training import DemoTrial
    from ..tuning.result import Search

HELP = "find a schedule that trains stably, by short trials"
EXAMPLES = """\
Without --trial it trains the GPT of the demo, whose unit is the token.

examples:
  seqwarm tune --text my_corpus/ --folder tuning --figure tuning.png
  seqwarm tune --trial my_package.my_module:run_trial --seq-length 1024 \\
      --learning-rate-warmup 1000 --durations 5000 10000 15000 20000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command. An option that is not given is None, or its default."""
    add = parser.add_argument_group("your own training").add_argument
    trial_help = "run_trial of seqwarm_kernels.tuning.tune_schedule (default: the demo's GPT)"
    add("--trial", metavar="MODULE:FUNCTION", help=trial_help)
    warmup_help = "warmup of its learning rate; required with --trial, like --seq-length"
    add("--learning-rate-warmup", type=int, metavar="UNITS", help=warmup_help)
    add("--unit", default="step", help="unit of durations and of the warmup: step, token or sample")

    add_training(parser.add_argument_group("the demo's GPT"))

    search = parser.add_argument_group("the search")
    add = search.add_argument
    lengths_help = "lengths to start at that are tried"
    add("--min-seq-lengths", type=int, nargs="+", default=[8, 16, 32, 64, 128], metavar="TOKENS", help=lengths_help)
    durations_help = (
        "ramps that are tried (default: 15%% to 90%% of the run of the demo's GPT; with --trial, 1 to 16 times the "
        "length of a trial)"
    )
    add("--durations", type=int, nargs="+", metavar="UNITS", help=durations_help)
    add_pacing(search)
    multiples_help = "length of a trial, in multiples of the learning rate's warmup"
    add("--multiples", type=float, default=3.0, metavar="N", help=multiples_help)
    max_rise_help = "largest ratio of a perplexity to the best one before it in a stable trial"
    add("--max-rise", type=float, default=1.3, metavar="RATIO", help=max_rise_help)
    add("--seed", type=int, default=0, metavar="N", help="seed of every trial")
    folder_help = "folder of the trials' records; continues a search that was stopped (default: no records)"
    add("--folder", type=Path, metavar="DIR", help=folder_help)
    add_figure(parser, "the trials, beside a page with the suffix .md,")


def run(arguments: argparse.Namespace) -> Result:
    """Searches. The exit status is 1 if no schedule was stable, and after an error in the training."""
    from ..tuning import NoStableSchedule
    from ..tuning.configuration import SearchConfiguration
    from ..tuning.tune_schedule import open_records, run_search

    with usage_errors():
        trial = None if arguments.trial else _demo_trial(arguments)
        configuration = SearchConfiguration(
            **_options(arguments, trial),
            min_seq_lengths=tuple(arguments.min_seq_lengths),
            multiples=arguments.multiples,
            max_rise=arguments.max_rise,
            step_size=arguments.step_size,
            pacing=pacing(arguments.root),
            seed=arguments.seed,
        )
        records = open_records(arguments.folder, configuration)
    try:
        run_trial = trial or _load_function(arguments.trial)
        found: Search = run_search(configuration, run_trial, records, progress=standard_error().isatty())
    except NoStableSchedule as nothing:
        found = nothing.search
    except KeyboardInterrupt:
        hint = "with --folder, a search can continue" if records is None else "the same command continues it"
        raise CommandError(f"stopped: {hint}", status=130) from None
    except Exception as error:  # of the user's training
        raise CommandError(f"the training failed\n{traceback.format_exc()}") from error
    if arguments.figure is not None:
        _write_report(found, arguments.figure, arguments.command_line)
    return Result(found.to_json(), found.table(), status=int(found.accepted is None))


def _demo_trial(arguments: argparse.Namespace) -> DemoTrial:
    from ..demo.text import read_corpus
    from ..demo.training import DemoTrial

    settings = training_settings(arguments)
    return DemoTrial(settings, read_corpus(arguments.text, settings.seq_length))


def _options(arguments: argparse.Namespace, trial: DemoTrial | None) -> dict[str, Any]:
    """Options of `tune_schedule` that depend on what is trained."""
    if trial is not None:
        if arguments.learning_rate_warmup is not None:
            raise ValueError("--learning-rate-warmup needs --trial: that of the demo's GPT is 5% of its tokens")
        options = trial.search_options(arguments.multiples)
        return {**options, "durations": tuple(arguments.durations or options["durations"])}
    if arguments.seq_length is None or arguments.learning_rate_warmup is None:
        raise ValueError("--trial needs --seq-length and --learning-rate-warmup")
    for name in ("text", "device", *(name for name, *_ in TRAINING if name != "seq_length")):
        if getattr(arguments, name) is not None:  # the user's function would not get it
            raise ValueError(f"{name} is of the demo's GPT, and has no effect on --trial")
    return {
        "max_seq_length": arguments.seq_length,
        "learning_rate_warmup": arguments.learning_rate_warmup,
        "unit": arguments.unit,
        "durations": tuple(arguments.durations or ()),
        "settings": {"trial": arguments.trial},
    }


def _load_function(name: str) -> Any:
    """Returns the function MODULE:FUNCTION. Modules are also found in the working directory, as with `python -m`."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def _write_report(found: Search, figure: Path, command_line: str) -> None:
    from ..utils.report_page import how_it_was_made, table, write_page

    found.figure(figure)
    head, *rows = found.rows()
    parts = [
        found.outcome(),
        found.configuration.rule(),
        f"![Validation perplexity of every trial, and its rises](<{figure.name}>)",
        table(head, rows),
        f"## How it was made\n\n{how_it_was_made(command_line, found.configuration.flat())}",
    ]
    write_page(figure.with_suffix(".md"), "Sequence-length warmup: search for a schedule", parts)
