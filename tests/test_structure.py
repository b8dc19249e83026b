"""Imports run downwards only and name what exists, and the package needs nothing but torch to run its reference."""

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import seqwarm_kernels

PACKAGE = Path(seqwarm_kernels.__file__).parent
ROOT = PACKAGE.parent
FOLDERS = ("seqwarm_kernels", "bench", "tests", "examples")

#: From top to bottom. A folder imports from itself and from the folders below it.
LAYERS = (
    *("__main__", "cli", "self_check", "demo", "trainers", "diagnostics", "tuning", "api", "parallel", "models"),
    *("data", "allocator", "schedule", "resizing", "attention", "ops", "utils"),
)
BACKENDS = {"reference", "native", "triton"}


@functools.cache
def parsed(file):
    """The imports anywhere in a file, and the names that it binds at its top level, also inside of if, try and with."""
    tree = ast.parse(file.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names, todo = set(), list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            continue
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            names |= parsed(file_of(file.parent / node.module))[1]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        todo += ast.iter_child_nodes(node)
    return imports, names


def own_imports(path, root=ROOT):
    """Each import of the project's own files, as a path without suffix and the imported name.

    Imports inside functions and under TYPE_CHECKING count.
    """
    for node in parsed(path)[0]:
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


def file_of(target):
    candidates = [target.with_suffix(".py"), target / "__init__.py"]
    return next((file for file in candidates if file.exists()), target if target.is_dir() else None)


def missing_imports(path, root=ROOT):
    for target, name in own_imports(path, root):
        file = file_of(target)
        if file is None:
            yield f"{target.relative_to(root)} does not exist"
        elif name not in (None, "*") and not file_of(target / name) and (file.is_dir() or name not in parsed(file)[1]):
            yield f"{file.relative_to(root)} has no {name}"


def imported_files(path, root=ROOT):
    """The files that a file imports. An import from a folder counts as its `__init__.py`."""
    for target, name in own_imports(path, root):
        found = name and file_of(target / name)
        yield found if found and found.is_file() else file_of(target)


def imported_names(path):
    """The modules and names of the package that a file imports, as tuples of names below the package."""
    for target, name in own_imports(path):
        if target.is_relative_to(PACKAGE):
            yield (*target.relative_to(PACKAGE).parts, *([name] if name else []))


def modules():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def test_every_import_of_the_project_exists():
    """Also in files that mypy does not check."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert [f"{path.relative_to(ROOT)}: {problem}" for path in files for problem in missing_imports(path)] == []


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("from .other import nothing", "tests/other.py has no nothing"),
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


def test_the_root_holds_few_files():
    files = {path.name for path in PACKAGE.iterdir() if path.is_file() and path.suffix != ".so"}
    assert files == {"__init__.py", "__main__.py", "api.py", "py.typed"}


def test_imports_run_downwards():
    for path in modules():
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        assert own in LAYERS, f"{own} has no layer"
        for target in imported_names(path):
            if target[0] in LAYERS:  # names of the package itself, such as __version__, have no layer
                above = LAYERS.index(target[0]) < LAYERS.index(own)
                assert not above, f"{path.relative_to(PACKAGE)} imports {'.'.join(target)} from above"


def test_an_upward_import_would_be_seen():
    assert ("ops", "library", "define") in {*imported_names(PACKAGE / "ops" / "alibi_attention" / "schema.py")}


def test_no_circle_of_files():
    files = set(modules())
    graphlib.TopologicalSorter({path: files & set(imported_files(path)) for path in files}).prepare()


def test_a_circle_would_be_seen(tmp_path):
    folder = tmp_path / "seqwarm_kernels"
    folder.mkdir()
    for own, other in ("ab", "bc", "cb"):
        (folder / f"{own}.py").write_text(f"if TYPE_CHECKING:\n    from seqwarm_kernels.{other} import name\n")
    graph = {path: set(imported_files(path, tmp_path)) for path in folder.glob("?.py")}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("operator", ["alibi_attention", "moment_statistics", "resize_batch", "resize_packed"])
def test_implementations_of_an_operator_never_import_each_other(operator):
    """A backend's files are `<backend>.py` and `<backend>_*.py`."""
    for path in (PACKAGE / "ops" / operator).glob("*.py"):
        own = path.stem.split("_")[0]
        if own in BACKENDS:
            imported = {target[2] for target in imported_names(path) if target[:2] == ("ops", operator)}
            assert {name.split("_")[0] for name in imported} & BACKENDS <= {own}


WITHOUT_ANYTHING = """
import ctypes
import sys

BLOCKED = {
    *("triton", "matplotlib", "transformers", "hypothesis", "composer", "lightning", "torchdata", "tensordict"),
    *("backports", "datasets", "tokenizers", "tensorboard"),
}

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED or name.startswith("seqwarm_kernels._C_"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block())
import torch

load = ctypes.CDLL

def load_others(path, *arguments, **options):
    if path and path.endswith("_kernels.so"):
        raise OSError(f"{path} is blocked")
    return load(path, *arguments, **options)

ctypes.CDLL = load_others
import seqwarm_kernels as sw

sw.resize_batch
assert not [name for name in sys.modules if name.startswith(("seqwarm_kernels.data", "seqwarm_kernels.trainers"))]
query = torch.randn(1, 2, 5, 4, requires_grad=True)
sw.alibi_attention(query, query, query).sum().backward()
batch = {"input_ids": torch.arange(20).view(2, 10)}
assert sw.resize_batch(batch, 4)["input_ids"].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
data = sw.data
sampler = data.LengthBatchSampler([3, 1, 2, 2], data.BatchPlanner(4, packed=True), seed=0)
assert sorted(map(sorted, sampler)) == [[0, 1], [2, 3]]
assert sorted(data.SequenceSource("abc".split())) == ["abc"]
sw.warmup_allocator(torch.nn.Sequential(torch.nn.Embedding(5, 4)), 8)
diagnostics = sw.diagnostics
class Adam:  # torch's own would look for the blocked packages
    weight = torch.nn.Parameter(torch.ones(4))
    param_groups, state = [{"params": [weight]}], {weight: {"exp_avg": 3 * weight.data, "exp_avg_sq": weight.data}}
with diagnostics.TrainingMonitor(Adam()) as monitor:
    monitor.observe(1.0)
assert monitor.steps == 1
assert diagnostics.moment_statistics(Adam()).momentum_l1 == 12
try:
    sw.resize_batch(batch, 4, backend="native")
except ValueError as error:
    assert "do not load" in str(error), error
else:
    raise AssertionError("the blocked kernels served a call")
try:
    sw.alibi_attention(query, query, query, backend="triton")
except ValueError as error:
    assert "triton is blocked" in str(error) or "TRITON_INTERPRET" in str(error), error
else:
    raise AssertionError("the blocked triton served a call")
"""


def test_the_package_itself_loads_nothing():
    code = (
        "import sys, seqwarm_kernels\n"
        "from seqwarm_kernels import cli\n"
        "assert not {'torch', 'numpy'} & sys.modules.keys()\n"
        "assert seqwarm_kernels.models.__name__ == 'seqwarm_kernels.models'\n"
        "assert seqwarm_kernels.alibi_attention.__name__ == 'alibi_attention'\n"
        "import torch; seqwarm_kernels.alibi_attention(*torch.ones(3, 1, 2, 4, 8))\n"
        "assert 'torch.distributed.tensor' not in sys.modules\n"  # loads for half a second
        "assert 'BatchBuffers' in dir(seqwarm_kernels) and 'trainers' in dir(seqwarm_kernels)\n"
        "assert not hasattr(seqwarm_kernels, 'nothing')\n"
        "from seqwarm_kernels import *\n"
        "assert root(2)(0.25) == 0.5\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_folder_loads_on_first_access():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert set(seqwarm_kernels._FOLDERS) == folders


def test_the_reference_needs_only_torch():
    result = subprocess.run([sys.executable, "-c", WITHOUT_ANYTHING], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
