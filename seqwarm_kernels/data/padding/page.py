"""The comparison as an interactive page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...utils import report_page
from ...utils.figures import look_of
from ...utils.files import write_atomically
from .comparison import COLUMNS, NOTES, BatchingResult, PaddingReport
from .figure import WAYS

#: A distribution is drawn by its quantiles, because a corpus may have millions of items.
_SHARES = np.linspace(0, 1, 201)


def write_page(report: PaddingReport, figure: Path, command_line: str) -> None:
    """Write the page beside the figure, with the suffix .html.

    Raises:
        ImportError: plotly is missing. The message says how to install it.
    """
    settings = ((name, str(value)) for name, value in vars(report.settings).items())
    content = report_page.page(
        "Padding of several ways of batching",
        [
            *map(report_page.text, report.about()),
            report_page.table("Result", COLUMNS, [result.cells() for result in report.results]),
            report_page.items(NOTES),
            _chart("Padding of a batch", "padding", "batches", _of_batches(report.results, _paddings), (".0%", ".1%")),
            _chart(
                "Size of a batch, with padding", "tokens", "batches", _of_batches(report.results, _tokens), (",", ",")
            ),
            _chart("Size of an item", "tokens", "items", [_distribution("items", report.lengths, "#444")], (",", ",")),
            report_page.how_it_was_made(command_line, settings),
        ],
    )
    write_atomically(figure.with_suffix(".html"), content)


def _chart(title: str, unit: str, counted: str, traces: list[dict[str, Any]], formats: tuple[str, str]) -> str:
    tick_format, hover_format = formats
    return report_page.chart(
        title,
        traces,
        x={"title": f"share of the {counted}", "tickformat": ".0%", "hoverformat": ".1%"},
        y={"title": unit, "tickformat": tick_format, "hoverformat": hover_format, "rangemode": "tozero"},
        note=f"At 50% is the median: half of the {counted} have at most this value.",
    )


def _of_batches(results: list[BatchingResult], values: Callable[[BatchingResult], np.ndarray]) -> list[dict[str, Any]]:
    pairs = zip(results, WAYS, strict=True)
    return [_distribution(result.name, values(result), look_of(way).color) for result, way in pairs]


def _paddings(result: BatchingResult) -> np.ndarray:
    return (result.padded_tokens - result.tokens) / np.maximum(result.padded_tokens, 1)


def _tokens(result: BatchingResult) -> np.ndarray:
    return result.padded_tokens


def _distribution(name: str, values: np.ndarray, color: str) -> dict[str, Any]:
    quantiles = np.quantile(values, _SHARES, method="inverted_cdf")
    return report_page.line(name, _SHARES.tolist(), quantiles.tolist(), color=color, mode="lines")
