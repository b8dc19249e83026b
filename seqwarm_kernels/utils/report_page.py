"""A page of charts and tables in one HTML file, which works without a network: plotly's script is part of the file.

Charts are Plotly's JSON, in the page as text: https://plotly.com/javascript/reference
"""

from __future__ import annotations

import html
import json
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .. import __version__
from .checks import needs
from .json_values import without_nan

_LAYOUT: dict[str, Any] = {
    "height": 380,
    "margin": {"l": 64, "r": 12, "t": 12, "b": 48},
    "hovermode": "x unified",
    "hoverlabel": {"namelength": -1},
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#222"},
    "plot_bgcolor": "white",
}
_AXIS: dict[str, Any] = {"gridcolor": "#e5e5e5", "zeroline": False, "automargin": True, "ticklabelstandoff": 5}

#: The content policy forbids every request to a network.
_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 0 auto; padding: 1rem; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.15rem; margin: 2rem 0 .5rem; }}
.note {{ color: #555; font-size: .9rem; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .9rem; }}
th, td {{ border-bottom: 1px solid #ddd; padding: .3rem .7rem .3rem 0; text-align: left; vertical-align: top; }}
.wrap td + td {{ overflow-wrap: anywhere; }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
<script>{plotly}</script>
<script>
for (const chart of document.querySelectorAll(".chart")) {{
  const {{data, layout}} = JSON.parse(chart.nextElementSibling.textContent);
  layout.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";  // a finger scrolls the page
  Plotly.newPlot(chart, data, layout, {{responsive: true, displayModeBar: false}});
}}
</script>
</body>
</html>
"""


def check_plotly() -> None:
    """plotly must be installed. The error says how to install it."""
    with needs("interactive pages need plotly", "seqwarm_kernels[demo]"):
        import plotly  # noqa: F401


def page(title: str, parts: Iterable[str]) -> bytes:
    """The page of the given parts.

    Raises:
        ImportError: plotly is missing. The message says how to install it.
    """
    check_plotly()
    from plotly.offline import get_plotlyjs

    return _PAGE.format(title=html.escape(title), body="\n".join(parts), plotly=get_plotlyjs()).encode()


def text(content: str) -> str:
    return f"<p>{html.escape(content)}</p>" if content else ""


def items(contents: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{html.escape(each)}</li>" for each in contents) + "</ul>"


def chart(title: str, traces: Sequence[dict[str, Any]], *, x: dict[str, Any], y: dict[str, Any], note: str = "") -> str:
    """A chart with a heading. `x` and `y` are Plotly's settings of the axes, with a title."""
    layout = {**_LAYOUT, "xaxis": _axis(x), "yaxis": _axis(y), "showlegend": True}
    content = json.dumps({"data": without_nan(traces), "layout": layout}, allow_nan=False).replace("<", "\\u003c")
    return (
        f'<h2>{html.escape(title)}</h2>\n<div class="chart"></div>\n'
        f'<script type="application/json">{content}</script>\n<p class="note">{html.escape(note)}</p>'
    )


def line(
    name: str,
    x: Sequence[float],
    y: Sequence[float],
    *,
    color: str,
    dash: str = "solid",
    steps: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """A trace. With `steps`, y keeps its value until the next x."""
    style = {"color": color, "dash": dash, "shape": "hv" if steps else "linear"}
    mode = "lines" if steps else "lines+markers"
    return {"type": "scatter", "name": name, "x": list(x), "y": list(y), "mode": mode, "line": style, **more}


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    cells = "".join(_row("td", row) for row in rows)
    heading = f"<h2>{html.escape(title)}</h2>\n"
    return f'{heading}<div class="scroll"><table>\n{_row("th", head) if head else ""}{cells}</table></div>'


def how_it_was_made(command_line: str, settings: Iterable[Sequence[str]]) -> str:
    """A table with everything that is needed to make the page again. `settings` include the seed."""
    rows = [("command", command_line), *settings, ("versions", versions())]
    return f'<div class="wrap">{table("How this page was made", (), rows)}</div>'


def versions() -> str:
    return f"seqwarm_kernels {__version__}, torch {torch.__version__}, Python {platform.python_version()}"


def _axis(settings: dict[str, Any]) -> dict[str, Any]:
    return {**_AXIS, **settings, "title": {"text": settings["title"], "font": {"size": 13}, "standoff": 8}}


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"
