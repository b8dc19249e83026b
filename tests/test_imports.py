"""Every import of the project's own files names a file and a name in it, also in files that mypy does not check."""

import ast
import functools
import itertools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("seqwarm_kernels", "bench", "tests", "examples")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def own_imports(path, root):
    """Each import of the project's own files, as a path without suffix and the imported name."""
    for node in imports_and_names(path)[0]:
        if isinstance(node, ast.Import):
            targets = [(alias.name, None) for alias in node.names]
        else:
            targets = [("." * node.level + (node.module or ""), alias.name) for alias in node.names]
        for module, name in targets:
            level = len(module) - len(module.lstrip("."))
            parts = [part for part in module.lstrip(".").split(".") if part]
            if level:
                yield path.parents[level - 1].joinpath(*parts), name
            elif parts[0] in FOLDERS:
                yield root.joinpath(*parts), name
            elif path.with_name(f"{parts[0]}.py").exists() and not path.with_name("__init__.py").exists():
                yield path.parent.joinpath(*parts), name  # a script and the files beside it


def missing_imports(path, root=ROOT):
    for target, name in own_imports(path, root):
        file = file_of(target)
        if file is None:
            yield f"{target.relative_to(root)} does not exist"
        elif name not in (None, "*") and name not in names_in(file) and not file_of(target / name):
            yield f"{file.relative_to(root)} has no {name}"


def file_of(target):
    candidates = [target.with_suffix(".py"), target / "__init__.py"]
    return next((file for file in candidates if file.exists()), target if target.is_dir() else None)


@functools.cache
def imports_and_names(file):
    """The imports anywhere in a file, and the names that it binds at its top level, also inside of if, try and with."""
    tree = ast.parse(file.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = set()
    todo = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            continue
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            names |= names_in(file_of(file.parent / node.module))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        todo += ast.iter_child_nodes(node)
    return imports, names


def names_in(file):
    return set() if file.is_dir() else imports_and_names(file)[1]


def test_every_import_of_the_project_exists():
    missing = itertools.chain.from_iterable(
        (f"{path.relative_to(ROOT)}: {problem}" for problem in missing_imports(path)) for path in FILES
    )
    assert list(missing) == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("from .other import nothing", "tests/other.py has no nothing"),
        ("from .nowhere import name", "tests/nowhere does not exist"),
        ("import tests.nowhere", "tests/nowhere does not exist"),
        ("def f():\n    from tests.other import nothing", "tests/other.py has no nothing"),
        ("from tests.other import name, Class", None),
        ("from . import other", None),
    ],
)
def test_a_wrong_import_would_be_seen(tmp_path, line, problem):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "other.py").write_text("try:\n    name = 1\nfinally:\n    class Class: pass\n")
    path = folder / "test.py"
    path.write_text(line)
    assert list(missing_imports(path, tmp_path)) == ([] if problem is None else [problem])
