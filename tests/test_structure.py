"""Imports run downwards only, and the package needs nothing but torch to run its reference."""

import ast
import functools
import graphlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import seqwarm_kernels

PACKAGE = Path(seqwarm_kernels.__file__).parent

#: From top to bottom. A folder imports from itself and from the folders below it.
LAYERS = (
    *("__main__", "cli", "self_check", "demo", "trainers", "diagnostics", "tuning", "api", "parallel", "models"),
    *("data", "allocator", "schedule", "resizing", "attention", "ops", "utils"),
)
BACKENDS = {"reference", "native", "triton"}


#: The package's modules by the names below it, such as ("ops", "backends"), and the file of each.
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").parts[: -1 if path.stem == "__init__" else None]: path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"
}


@functools.cache
def imported_names(path):
    """What a file imports of the package, as names below it: also inside functions and under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return {tuple(name.split(".")[1:]) for name in found if name.startswith(f"{PACKAGE.name}.")}


def test_imports_run_downwards():
    for module, path in MODULES.items():
        assert module[0] in LAYERS, f"{module[0]} has no layer"
        for target in imported_names(path):
            if target[0] in LAYERS:  # names of the package itself, such as __version__, have no layer
                above = LAYERS.index(target[0]) < LAYERS.index(module[0])
                assert not above, f"{path.relative_to(PACKAGE)} imports {'.'.join(target)} from above"


def test_no_circle_of_files():
    """An import of a name from a folder is one of its `__init__.py`."""
    imported = {
        module: {target if target in MODULES else target[:-1] for target in imported_names(path)} & MODULES.keys()
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(imported).prepare()


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

import seqwarm_kernels as sw
from seqwarm_kernels import cli

assert not {"torch", "numpy"} & sys.modules.keys()

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
assert sw.models.__name__ == "seqwarm_kernels.models"
assert {"BatchBuffers", "trainers"} <= set(dir(sw))
assert sw.alibi_attention.__name__ == "alibi_attention"
assert not hasattr(sw, "nothing")
from seqwarm_kernels import *

assert root(2)(0.25) == 0.5
sw.resize_batch
assert not [name for name in sys.modules if name.startswith(("seqwarm_kernels.data", "seqwarm_kernels.trainers"))]
query = torch.randn(1, 2, 5, 4, requires_grad=True)
sw.alibi_attention(query, query, query).sum().backward()
assert "torch.distributed.tensor" not in sys.modules  # loads for half a second
assert {"composer", "huggingface", "lightning"} <= set(dir(sw.trainers))
assert sw.trainers.composer.set_batch_sequence_length.__name__ == "set_batch_sequence_length"
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

def refusal(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("what is blocked served a call")

assert "do not load" in refusal(lambda: sw.resize_batch(batch, 4, backend="native"))
reason = refusal(lambda: sw.alibi_attention(query, query, query, backend="triton"))
assert "triton is blocked" in reason or "TRITON_INTERPRET" in reason, reason
"""


def test_every_folder_loads_on_first_access():
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert set(seqwarm_kernels._FOLDERS) == folders


def test_the_package_loads_nothing_and_the_reference_only_torch():
    result = subprocess.run([sys.executable, "-c", WITHOUT_ANYTHING], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
