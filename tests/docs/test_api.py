"""Every public name has an entry in the API reference."""

import importlib
import re
from pathlib import Path

import pytest

import seqwarm_kernels

PAGES = Path(__file__).parents[2] / "docs" / "api"
PACKAGE = Path(seqwarm_kernels.__file__).parent
MODULES = sorted(
    ".".join(("seqwarm_kernels", *path.parent.relative_to(PACKAGE).parts))
    for path in PACKAGE.rglob("__init__.py")
    if "__all__" in path.read_text() and path.parent.name != "families"  # which registers what it imports
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
