"""The command `tune`: finds a schedule for the demo's small GPT, or for the user's own training."""

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

if TYPE_CHECKING:  # the functions import the rest, so that --help and info are quick
    from ..tuning import NoStableSchedule, TunedSchedule

#: Options that only the demo's GPT has, and options that only the user's own training has.
_DEMO_OPTIONS = ("text", "steps", "learning_rate", "batch_size", "layers", "width", "device", "validations")
_OWN_OPTIONS = ("learning_rate_warmup", "unit")

#: Validations in a trial of the demo's GPT, without the first one, which comes before any training.
_VALIDATIONS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command. An option that is not given is None, or its default."""
    add = parser.add_argument_group("what is trained").add_argument
    text_help = "UTF-8 text files, or folders of them, for the demo's small GPT; default: Python's standard library"
    add("--text", nargs="+", metavar="FILE", help=text_help)
    trial_help = "your own training: the argument run_trial of seqwarm_kernels.diagnostics.tune_schedule"
    add("--trial", metavar="MODULE:FUNCTION", help=trial_help)
    add("--seq-length", type=int, metavar="TOKENS", help="full sequence length")
    add("--seed", type=int, default=0, metavar="N", help="default 0")

    add = parser.add_argument_group("the demo's GPT").add_argument
    add("--steps", type=int, metavar="N", help="token budget of a whole run, in steps at the full length")
    add("--learning-rate", type=float, metavar="RATE", help="peak learning rate, reached after 5%% of the tokens")
    add("--batch-size", type=int, metavar="ROWS")
    add("--layers", type=int, metavar="N")
    add("--width", type=int, metavar="N")
    add("--device", help="cpu, cuda or cuda:INDEX; default: cuda if there is a GPU")
    add("--validations", type=int, metavar="N", help=f"validations in a trial; default {_VALIDATIONS}")

    add = parser.add_argument_group("your own training").add_argument
    add("--learning-rate-warmup", type=int, metavar="UNITS", help="warmup of the learning rate; required")
    add("--unit", choices=UNITS, help="unit of durations and of the learning rate's warmup; default step")

    add = parser.add_argument_group("the search").add_argument
    add("--min-seq-lengths", type=int, nargs="+", metavar="TOKENS", help="default 8 16 32 64 128")
    add("--durations", type=int, nargs="+", metavar="UNITS", help="default: see docs/guides/tuning.md")
    add("--step-size", type=int, default=8, help="lengths grow in multiples of this number; default 8")
    add("--root", type=float, metavar="DEGREE", help="pacing root(DEGREE); default: linear")
    multiples_help = "length of a trial, in multiples of the learning rate's warmup; default 3"
    add("--multiples", type=float, default=3.0, help=multiples_help)
    max_rise_help = "largest ratio of a perplexity to the best one before it in a stable trial; default 1.3"
    add("--max-rise", type=float, default=1.3, help=max_rise_help)
    add("--folder", type=Path, metavar="DIR", help="folder of the trials' records; continues a search that was stopped")
    add("--figure", type=Path, metavar="PNG", help="file for a figure of the trials")
    add("--json", action="store_true", help="print a JSON object")


class _TrainingFailed(Exception):
    """Raised from an error in the user's training, whose traceback is printed."""


def run(arguments: argparse.Namespace) -> int:
    """Searches and prints. Returns 0, 1 if no schedule was stable, 2 after a user error, or 130 after Ctrl-C."""
    try:
        return _search(arguments)
    except _TrainingFailed as failed:
        traceback.print_exception(failed.__cause__)
        return 2
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"seqwarm_kernels tune: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        hint = "With --folder, a search can continue." if arguments.folder is None else "The same command continues it."
        print(f"\nStopped. {hint}", file=sys.stderr)
        return 130


def _search(arguments: argparse.Namespace) -> int:
    from ..tuning import NoStableSchedule, tune_schedule

    if arguments.figure is not None:
        _check_figure(arguments.figure, arguments.folder)
    options = _own_options(arguments) if arguments.trial else _demo_options(arguments)
    if arguments.min_seq_lengths is not None:
        options["min_seq_lengths"] = arguments.min_seq_lengths
    try:
        found = tune_schedule(
            _wrap_training_errors(options.pop("run_trial")),
            multiples=arguments.multiples,
            max_rise=arguments.max_rise,
            step_size=arguments.step_size,
            pacing=linear if arguments.root is None else root(arguments.root),
            seed=arguments.seed,
            folder=arguments.folder,
            **options,
        )
    except NoStableSchedule as not_found:
        _show(not_found, arguments)
        return 1
    _show(found, arguments)
    return 0


def _check_figure(path: Path, folder: Path | None) -> None:
    """Checks --figure before the search, which may take hours and makes the folder of the records."""
    from ..utils.checks import check_matplotlib

    check_matplotlib()
    if path.is_dir():
        raise ValueError(f"--figure must be a file, got the folder {path}")
    if folder is not None and path.parent.resolve() == folder.resolve():
        return
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        raise ValueError(f"--figure must be in an existing folder with write permission, got {path}")


def _wrap_training_errors(run_trial: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `run_trial` so that its errors differ from the errors of tune_schedule about arguments."""

    def iterate(validations: Iterable[Any]) -> Iterator[Any]:
        with _training_errors():
            yield from validations

    def wrapped(*arguments: Any) -> Any:
        with _training_errors():
            validations = run_trial(*arguments)
        return iterate(validations) if isinstance(validations, Iterable) else validations

    return wrapped


@contextmanager
def _training_errors() -> Iterator[None]:
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


def _own_options(arguments: argparse.Namespace) -> dict[str, Any]:
    _refuse(arguments, _DEMO_OPTIONS, "belongs to the demo's GPT, not to --trial")
    for name in ("seq_length", "learning_rate_warmup"):
        if getattr(arguments, name) is None:
            raise ValueError(f"--trial needs {_flag(name)}")
    return {
        "run_trial": _load_function(arguments.trial),
        "max_seq_length": arguments.seq_length,
        "learning_rate_warmup": arguments.learning_rate_warmup,
        "unit": arguments.unit or "step",
        "durations": arguments.durations,
        "settings": {"trial": arguments.trial},
    }


def _load_function(name: str) -> Any:
    """Returns the function MODULE:FUNCTION. Modules are also found in the working directory, as with `python -m`."""
    module, _, function = name.partition(":")
    if not module or not function or module.startswith("."):
        raise ValueError(f"--trial must be MODULE:FUNCTION, got {name}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = getattr(_import(module), function, None)
    if not callable(found):
        raise ValueError(f"--trial must name a function, got {name}: {module} does not have this function")
    return found


def _import(module: str) -> Any:
    """Imports a module. A missing module is a user error; other errors of the import keep their traceback."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise
        raise _TrainingFailed from error


def _demo_options(arguments: argparse.Namespace) -> dict[str, Any]:
    from ..demo.text import read_corpus
    from ..demo.tuning_trial import (
        DemoTrial,
        check_trial_within_run,
        default_durations,
        demo_settings,
        learning_rate_warmup,
        settings_to_compare,
    )

    _refuse(
        arguments,
        _OWN_OPTIONS,
        "belongs to --trial; the demo's GPT counts tokens, and its learning rate warms up for 5% of them",
    )
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
            raise ValueError(f"{_flag(name)} {why}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
