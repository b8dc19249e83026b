"""Every public name has an entry in the API reference."""

import importlib
import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "api"
MODULES = (
    *("seqwarm_kernels", "seqwarm_kernels.data", "seqwarm_kernels.diagnostics", "seqwarm_kernels.models"),
    *(f"seqwarm_kernels.trainers.{trainer}" for trainer in ("composer", "huggingface", "lightning")),
    *("seqwarm_kernels.parallel", "seqwarm_kernels.tuning"),
)
DIRECTIVE = re.compile(r"^\.\. (currentmodule|automodule|autofunction|autoclass|autoexception):: (\S+)$", re.MULTILINE)


def documented():
    """(module, name) of all entries. `automodule` stands for the names in the module's `__all__`."""
    for page in PAGES.glob("*.md"):
        current = None
        for directive, argument in DIRECTIVE.findall(page.read_text()):
            if directive == "currentmodule":
                current = argument
            elif directive == "automodule":
                yield from ((argument, name) for name in getattr(importlib.import_module(argument), "__all__", ()))
            else:
                yield current, argument


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module):
    names = importlib.import_module(module).__all__
    elsewhere = {name for other, name in documented() if other.count(".") <= 1}
    found = {name for other, name in documented() if other == module}
    missing = set(names) - found - (set() if "trainers" in module else elsewhere)
    assert not missing


def test_the_reference_has_no_name_that_is_not_public():
    for module, name in documented():
        assert name in importlib.import_module(module).__all__, f"{module}.{name}"


def test_every_module_with_public_names_is_checked():
    package = Path(importlib.import_module("seqwarm_kernels").__file__).parent
    public = {
        ".".join(("seqwarm_kernels", *path.parent.relative_to(package).parts))
        for path in package.rglob("__init__.py")
        if "__all__" in path.read_text()
    }
    assert public - set(MODULES) == {"seqwarm_kernels.models.families"}  # which registers what it imports
