"""The command `tune`: a schedule for the demo's small GPT on the user's text, or for a training of the user's own."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schedule.scheduler import UNITS, linear, root

if TYPE_CHECKING:  # the rest is imported where it is used, so that --help and info stay quick
    from ..tuning import NoStableSchedule, TunedSchedule

#: Options that only the demo's GPT has, and those that only a training of the user's own has.
_OF_THE_DEMO = ("text", "steps", "learning_rate", "batch_size", "layers", "width", "device", "validations")
_OF_THE_USER = ("learning_rate_warmup", "unit")

#: Validations in a trial of the demo's GPT after the first, which comes before any training.
_VALIDATIONS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command. None stands for: not given."""
    what = parser.add_argument_group("what is trained")
    what.add_argument(
        "--text",
        nargs="+",
        metavar="FILE",
        help="UTF-8 text files, or folders of them, for the demo's small GPT; default: Python's standard library",
    )
    what.add_argument(
        "--trial",
        metavar="MODULE:FUNCTION",
        help="a training of your own: the argument run_trial of seqwarm_kernels.diagnostics.tune_schedule",
    )
    what.add_argument("--seq-length", type=int, metavar="TOKENS", help="the full sequence length")
    what.add_argument("--seed", type=int, default=0, metavar="N", help="default 0")

    demo = parser.add_argument_group("the demo's GPT")
    demo.add_argument("--steps", type=int, metavar="N", help="the token budget of a whole run, in steps at full length")
    demo.add_argument("--learning-rate", type=float, metavar="RATE", help="its peak, reached after 5%% of the tokens")
    demo.add_argument("--batch-size", type=int, metavar="ROWS")
    demo.add_argument("--layers", type=int, metavar="N")
    demo.add_argument("--width", type=int, metavar="N")
    demo.add_argument("--device", help="cpu, cuda or cuda:INDEX; default: a GPU where there is one")
    demo.add_argument("--validations", type=int, metavar="N", help=f"in a trial; default {_VALIDATIONS}")

    own = parser.add_argument_group("your own training")
    own.add_argument("--learning-rate-warmup", type=int, metavar="UNITS", help="of the learning rate; needed")
    own.add_argument("--unit", choices=UNITS, help="of durations and of the learning rate's warmup; default step")

    search = parser.add_argument_group("the search")
    search.add_argument("--min-seq-lengths", type=int, nargs="+", metavar="TOKENS", help="default 8 16 32 64 128")
    search.add_argument("--durations", type=int, nargs="+", metavar="UNITS", help="default: see docs/tuning.md")
    search.add_argument("--step-size", type=int, default=8, help="lengths grow in multiples of this; default 8")
    search.add_argument("--root", type=float, metavar="DEGREE", help="pacing root(DEGREE); default: linear")
    search.add_argument(
        "--multiples", type=float, default=3.0, help="a trial in multiples of the learning rate's warmup; default 3"
    )
    search.add_argument(
        "--max-rise", type=float, default=1.3, help="of perplexity over the best before, to be stable; default 1.3"
    )
    search.add_argument("--folder", type=Path, metavar="DIR", help="for the trials' records; goes on where one stopped")
    search.add_argument("--figure", type=Path, metavar="PNG", help="draw the trials here")
    search.add_argument("--json", action="store_true", help="print a JSON object")


class _TrainingFailed(Exception):
    """Its cause was raised in what is trained, not by an argument: it keeps its traceback."""


def run(arguments: argparse.Namespace) -> int:
    """Search and print. Returns 0, 1 if no schedule was stable, 2 after an error of the user's, 130 after Ctrl-C."""
    try:
        return _search(arguments)
    except _TrainingFailed as failed:
        traceback.print_exception(failed.__cause__)
        return 2
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"seqwarm_kernels tune: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        way = "With --folder a search can go on." if arguments.folder is None else "The same command goes on from here."
        print(f"\nStopped. {way}", file=sys.stderr)
        return 130


def _search(arguments: argparse.Namespace) -> int:
    from ..tuning import NoStableSchedule, tune_schedule

    if arguments.figure is not None:
        _check_figure(arguments.figure, arguments.folder)
    options = _options_of_the_user(arguments) if arguments.trial else _options_of_the_demo(arguments)
    if arguments.min_seq_lengths is not None:
        options["min_seq_lengths"] = arguments.min_seq_lengths
    try:
        found = tune_schedule(
            _told_apart(options.pop("run_trial")),
            multiples=arguments.multiples,
            max_rise=arguments.max_rise,
            step_size=arguments.step_size,
            pacing=linear if arguments.root is None else root(arguments.root),
            seed=arguments.seed,
            folder=arguments.folder,
            **options,
        )
    except NoStableSchedule as nothing:
        _show(nothing, arguments)
        return 1
    _show(found, arguments)
    return 0


def _check_figure(path: Path, folder: Path | None) -> None:
    """Before the search, which may take hours. The records' folder is made by then."""
    from ..utils.checks import check_matplotlib

    check_matplotlib()
    if path.is_dir():
        raise ValueError(f"--figure must be a file, got the folder {path}")
    if folder is not None and path.parent.resolve() == folder.resolve():
        return
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ValueError(f"--figure must lie in a folder that is there and may be written to, got {path}")


def _told_apart(run_trial: Callable[..., Any]) -> Callable[..., Any]:
    """Does the same, but what it raises is told apart from what tune_schedule says of the arguments."""

    def watched(validations: Iterable[Any]) -> Iterator[Any]:
        with _training():
            yield from validations

    def run_it(*arguments: Any) -> Any:
        with _training():
            validations = run_trial(*arguments)
        return watched(validations) if isinstance(validations, Iterable) else validations

    return run_it


@contextmanager
def _training() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _TrainingFailed from error


def _show(found: TunedSchedule | NoStableSchedule, arguments: argparse.Namespace) -> None:
    from ..tuning import NoStableSchedule

    if arguments.json:
        print(json.dumps(found.to_json(), indent=2))
    elif isinstance(found, NoStableSchedule):
        print(f"seqwarm_kernels tune: {found}", file=sys.stderr)
    else:
        print(found.table())
    if arguments.figure is not None:
        found.figure(arguments.figure)


def _options_of_the_user(arguments: argparse.Namespace) -> dict[str, Any]:
    _refuse(arguments, _OF_THE_DEMO, "belongs to the demo's GPT, not to --trial")
    for name in ("seq_length", "learning_rate_warmup"):
        if getattr(arguments, name) is None:
            raise ValueError(f"--trial needs {_option(name)}")
    return {
        "run_trial": _load(arguments.trial),
        "max_seq_length": arguments.seq_length,
        "learning_rate_warmup": arguments.learning_rate_warmup,
        "unit": arguments.unit or "step",
        "durations": arguments.durations,
        "settings": {"trial": arguments.trial},
    }


def _load(name: str) -> Any:
    """The function MODULE:FUNCTION, looked for in the folder of now as well, as `python -m` does."""
    module, _, function = name.partition(":")
    if not module or not function or module.startswith("."):
        raise ValueError(f"--trial must be MODULE:FUNCTION, got {name}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = getattr(_import(module), function, None)
    if not callable(found):
        raise ValueError(f"--trial must name a function, got {name}: {module} has none of that name")
    return found


def _import(module: str) -> Any:
    """A module that is not there is an error of the option; what one raises itself keeps its traceback."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise
        raise _TrainingFailed from error


def _options_of_the_demo(arguments: argparse.Namespace) -> dict[str, Any]:
    from ..demo.text import read_corpus
    from ..demo.tuning_trial import (
        DemoTrial,
        check_trial_within_run,
        default_durations,
        demo_settings,
        learning_rate_warmup,
        settings_to_compare,
    )

    _refuse(arguments, _OF_THE_USER, "belongs to --trial; the demo's GPT counts tokens, and warms up for 5% of them")
    names = ("device", "steps", "seq_length", "seed", "text", "learning_rate", "batch_size", "layers", "width")
    settings = demo_settings(**{name: getattr(arguments, name) for name in names})
    check_trial_within_run(settings, arguments.multiples)
    corpus = read_corpus(settings.text, settings.seq_length)
    validations = _VALIDATIONS if arguments.validations is None else arguments.validations
    trial = DemoTrial(settings, corpus, validations)
    return {
        "run_trial": trial,
        "max_seq_length": settings.seq_length,
        "learning_rate_warmup": learning_rate_warmup(settings),
        "unit": "token",
        "durations": arguments.durations or default_durations(settings),
        "settings": settings_to_compare(trial),
    }


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            raise ValueError(f"{_option(name)} {why}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
