"""The command `tune`: finds a schedule for the demo's small GPT, or for the user's own training."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..utils.progress import standard_error
from .common import (
    UNITS,
    CommandError,
    Result,
    add_figure,
    add_pacing,
    check_figure,
    demo_default,
    option,
    pacing,
    usage_errors,
)

if TYPE_CHECKING:  # imported by the functions, so that help is quick
    from ..tuning import NoStableSchedule, TunedSchedule

HELP = "find a schedule that trains stably, by short trials"
EXAMPLES = """\
examples:
  seqwarm tune --text my_corpus/ --folder tuning --figure tuning.png
  seqwarm tune --steps 120 --seq-length 128 --layers 2 --width 64
  seqwarm tune --trial my_package.my_module:run_trial --seq-length 1024 \\
      --learning-rate-warmup 1000 --durations 5000 10000 15000 20000
"""

#: Options that only the demo's GPT has, and options that only the user's own training has.
_DEMO_OPTIONS = ("text", "steps", "learning_rate", "batch_size", "layers", "width", "device", "validations")
_OWN_OPTIONS = ("learning_rate_warmup", "unit")

#: Validations in a trial of the demo's GPT, without the first one, which comes before any training.
_VALIDATIONS = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command. An option that is not given is None, or its default."""
    add = parser.add_argument_group("what is trained").add_argument
    text_help = "UTF-8 text files, or folders of them, for the demo's GPT (default: Python's standard library)"
    add("--text", nargs="+", metavar="FILE", help=text_help)
    trial_help = "your own training: run_trial of seqwarm_kernels.diagnostics.tune_schedule (default: the demo's GPT)"
    add("--trial", metavar="MODULE:FUNCTION", help=trial_help)
    length_help = f"full sequence length; required with --trial {demo_default('seq_length')}"
    add("--seq-length", type=int, metavar="TOKENS", help=length_help)
    add("--seed", type=int, default=0, metavar="N", help="seed of every trial")

    add = parser.add_argument_group("the demo's GPT").add_argument
    add(
        "--steps",
        type=int,
        metavar="N",
        help=f"token budget of a whole run, in full-length steps {demo_default('steps')}",
    )
    rate_help = f"peak learning rate, reached after 5%% of the tokens {demo_default('peak_learning_rate')}"
    add("--learning-rate", type=float, metavar="RATE", help=rate_help)
    add("--batch-size", type=int, metavar="ROWS", help=f"rows in a step {demo_default('batch_size')}")
    add("--layers", type=int, metavar="N", help=f"number of layers {demo_default('layers')}")
    add("--width", type=int, metavar="N", help=f"width of the model, a multiple of its heads {demo_default('width')}")
    add("--device", help="cpu, cuda or cuda:INDEX (default: cuda if there is a GPU)")
    add("--validations", type=int, metavar="N", help=f"validations in a trial (default: {_VALIDATIONS})")

    add = parser.add_argument_group("your own training").add_argument
    warmup_help = "warmup of the learning rate; required with --trial (default for the demo's GPT: 5%% of the tokens)"
    add("--learning-rate-warmup", type=int, metavar="UNITS", help=warmup_help)
    add("--unit", choices=UNITS, help="unit of durations and of the learning rate's warmup (default: step)")

    search = parser.add_argument_group("the search")
    add = search.add_argument
    lengths_help = "lengths to start at that are tried (default: 8 16 32 64 128)"
    add("--min-seq-lengths", type=int, nargs="+", metavar="TOKENS", help=lengths_help)
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
    folder_help = "folder of the trials' records; continues a search that was stopped (default: no records)"
    add("--folder", type=Path, metavar="DIR", help=folder_help)
    add_figure(parser, "the perplexities of all trials", page=True)


class _TrainingFailed(Exception):
    """Raised from an error in the user's training, whose traceback is printed."""


def run(arguments: argparse.Namespace) -> Result:
    """Searches. The exit status is 1 if no schedule was stable, and after an error in the training."""
    try:
        with usage_errors(arguments):
            found = _search(arguments)
    except _TrainingFailed as failed:
        traceback.print_exception(failed.__cause__)
        cause = traceback.format_exception_only(failed.__cause__)[-1].strip()
        raise CommandError(f"the training raised {cause}") from failed
    except KeyboardInterrupt:
        hint = "With --folder, a search can continue." if arguments.folder is None else "The same command continues it."
        raise CommandError(f"stopped. {hint}", status=130) from None
    return _result(found, arguments)


def _search(arguments: argparse.Namespace) -> TunedSchedule | NoStableSchedule:
    check_figure(arguments.figure, page=True, made=arguments.folder)
    from ..tuning import NoStableSchedule, tune_schedule

    options = _own_options(arguments) if arguments.trial else _demo_options(arguments)
    if arguments.min_seq_lengths is not None:
        options["min_seq_lengths"] = arguments.min_seq_lengths
    try:
        return tune_schedule(
            _wrap_training_errors(options.pop("run_trial")),
            multiples=arguments.multiples,
            max_rise=arguments.max_rise,
            step_size=arguments.step_size,
            pacing=pacing(arguments.root),
            seed=arguments.seed,
            folder=arguments.folder,
            progress=standard_error().isatty(),
            **options,
        )
    except NoStableSchedule as not_found:
        return not_found


def _result(found: TunedSchedule | NoStableSchedule, arguments: argparse.Namespace) -> Result:
    from ..tuning import NoStableSchedule
    from ..tuning.page import write_page

    if arguments.figure is not None:
        found.figure(arguments.figure)
        write_page(found, arguments.figure, arguments.command_line)
    if not isinstance(found, NoStableSchedule):
        return Result(found.to_json(), found.table())
    if not arguments.json:
        raise CommandError(str(found))
    return Result(found.to_json(), "", status=1)


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


def _own_options(arguments: argparse.Namespace) -> dict[str, Any]:
    _refuse(arguments, _DEMO_OPTIONS, "belongs to the demo's GPT, not to --trial")
    for name in ("seq_length", "learning_rate_warmup"):
        if getattr(arguments, name) is None:
            raise ValueError(f"--trial needs {option(name)}")
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
            raise ValueError(f"{option(name)} {why}")
