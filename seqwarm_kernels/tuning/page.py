"""The trials of a search as an interactive page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..utils import report_page
from ..utils.figures import ACCENT, CONTRAST, QUIET
from ..utils.files import write_atomically
from .configuration import SearchConfiguration
from .result import NoStableSchedule, TunedSchedule, columns
from .trial import Trial

#: Dashes differ as well.
_COLORS = {"found": ACCENT, "fluctuates": CONTRAST, "stable": QUIET}

_NOT_FINITE = "A perplexity that is not finite is left out."


def write_page(found: TunedSchedule | NoStableSchedule, figure: Path, command_line: str) -> None:
    """Write the page beside the figure, with the suffix .html.

    Raises:
        ImportError: plotly is missing. The message says how to install it.
    """
    configuration = found.configuration
    accepted = found.accepted if isinstance(found, TunedSchedule) else None
    styles = [(trial, _style(trial, accepted)) for trial in found.trials]
    progress = {"title": f"{configuration.unit}s", "tickformat": ",", "rangemode": "tozero"}
    content = report_page.page(
        "Sequence-length warmup: search for a schedule",
        [
            report_page.text(found.outcome()),
            report_page.text(configuration.rule()),
            report_page.chart(
                "Perplexity relative to the best before it",
                [*(_rises(trial, style) for trial, style in styles), _limit(configuration)],
                x=progress,
                y={"title": "times the best", "range": [0.95, 2 * configuration.max_rise - 1], "hoverformat": ".3f"},
                note=f"Above the dotted line a trial is not stable. {_NOT_FINITE}",
            ),
            report_page.chart(
                "Validation perplexity at full length",
                [_perplexities(trial, style) for trial, style in styles],
                x=progress,
                y={"title": "perplexity", "type": "log", "dtick": "D2", "tickformat": ",", "hoverformat": ".4g"},
                note=_NOT_FINITE,
            ),
            report_page.chart(
                "The schedules that were tried",
                [_lengths(configuration, trial, style) for trial, style in styles],
                x=progress,
                y={"title": "sequence length (tokens)", "rangemode": "tozero"},
                note="A trial may end before its schedule does.",
            ),
            report_page.table("Trials", *columns(found.trials, accepted)),
            report_page.how_it_was_made(command_line, _settings(configuration)),
        ],
    )
    write_atomically(figure.with_suffix(".html"), content)


def _settings(configuration: SearchConfiguration) -> list[tuple[str, str]]:
    values = configuration.to_json()
    settings = values.pop("settings")
    named = {**values, **{f"settings: {name}": value for name, value in settings.items()}}
    return [(name, str(value)) for name, value in named.items()]


def _rises(trial: Trial, style: dict[str, Any]) -> dict[str, Any]:
    return report_page.line(x=[each.progress for each in trial.validations], y=trial.rises, **style)


def _limit(configuration: SearchConfiguration) -> dict[str, Any]:
    limit = [configuration.max_rise] * 2
    return report_page.line("limit", [0, configuration.end], limit, color="black", dash="dot", mode="lines")


def _perplexities(trial: Trial, style: dict[str, Any]) -> dict[str, Any]:
    validations = trial.validations
    return report_page.line(
        x=[each.progress for each in validations], y=[each.perplexity for each in validations], **style
    )


def _lengths(configuration: SearchConfiguration, trial: Trial, style: dict[str, Any]) -> dict[str, Any]:
    milestones = configuration.scheduler(trial.min_seq_length, trial.duration).milestones()
    end = round(1.05 * configuration.durations[-1]), configuration.max_seq_length
    progress, lengths = zip(*milestones, end, strict=True)
    return report_page.line(x=progress, y=lengths, steps=True, **style)


def _style(trial: Trial, accepted: Trial | None) -> dict[str, Any]:
    verdict = trial.verdict(accepted)
    return {
        "name": f"{trial.label}: {verdict}",
        "color": _COLORS[verdict],
        "dash": "dash" if trial.fluctuates else "solid",
    }
