"""The table of docs/guides/models.md, made by converting every family. `python -m tests.models.table` rewrites it."""

import re
from pathlib import Path

from seqwarm_kernels import apply_alibi

from .zoo import CACHED, FAMILIES, make

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "models.md"
BEGIN, END = "<!-- table of families: begin -->\n", "<!-- table of families: end -->\n"
HEADER = ["model type", "converted class", "removed", "attention", "slopes", "cache", "packed"]


def table():
    rows = [HEADER, ["---"] * len(HEADER), *map(row, FAMILIES)]
    files = "requirements-transformers-oldest.txt", "constraints.txt", "requirements-transformers-newest.txt"
    versions = [re.findall(r"^transformers==([\d.]+)", (ROOT / file).read_text(), re.MULTILINE)[-1] for file in files]
    tested = "Tested with transformers {}, {} and {}.".format(*versions)
    lines = [tested, "", *("| " + " | ".join(row) + " |" for row in rows)]
    return "\n".join(lines) + "\n"


def row(name):
    family, model = FAMILIES[name], make(name)
    report = apply_alibi(model, 64)
    removed = sorted({source.path.rpartition(".")[2] for source in report.removed})
    return [
        f"`{model.config.model_type}`" + (" as a decoder" if name.endswith("decoder") else ""),
        ", ".join(sorted({f"`{layer.module_class}`" for layer in report.replaced})),
        ", ".join(f"`{path}`" for path in removed) or "nothing",
        "causal" if family.causal else "bidirectional",
        "its own" if family.pretrained_with_alibi else "`alibi_slopes`",
        ("dynamic" if name == "mpt" else "dynamic, static") if name in CACHED else "—",
        "yes" if family.takes_packed else "no",
    ]


def page_with_table():
    before, rest = PAGE.read_text().split(BEGIN)
    return before + BEGIN + table() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page_with_table())
