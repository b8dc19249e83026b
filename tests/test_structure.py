"""Imports run downwards only, and the package needs nothing but torch to run its reference."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import seqwarm_kernels

PACKAGE = Path(seqwarm_kernels.__file__).parent

#: From the top down: a module imports from its own layer and from those below it.
LAYERS = [
    ("cli", "__main__"),
    ("demo", "plan"),
    ("trainers",),
    ("models", "data", "diagnostics", "allocator"),
    ("allocator_report", "agreement", "training_pass", "snapshot", "compilation", "memory"),
    ("example_batch",),
    ("schedule", "attachment", "reach"),
    ("attention", "batch"),
    ("buffers",),
    ("recipe",),
    ("containers", "wrappers"),
    ("ops",),
    ("slopes",),
    ("checks", "figures", "files"),
]
BACKENDS = {"reference", "native", "triton"}
HEIGHT = {name: -depth for depth, names in enumerate(LAYERS) for name in names}


def modules():
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts != ("__init__.py",)]


def imported_names(path):
    """The modules of this package that a file imports, as tuples of names below the package."""
    inside = path.relative_to(PACKAGE).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = inside[: len(inside) - node.level]
            target = (*base, *(node.module or "").split(".")) if node.module else base
            yield from [(*target, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("seqwarm_kernels"):
            yield from [(*node.module.split(".")[1:], alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from [tuple(a.name.split(".")[1:]) for a in node.names if a.name.startswith("seqwarm_kernels.")]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_downwards(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    assert own in HEIGHT, f"{own} has no layer"
    for target in imported_names(path):
        if target[0] in HEIGHT:  # names of the package itself, such as __version__, have none
            assert HEIGHT[target[0]] <= HEIGHT[own], f"{path.name} imports {'.'.join(target)} from above"


@pytest.mark.parametrize("operator", ["alibi_attention", "moment_statistics", "resize_batch"])
def test_implementations_of_an_operator_never_import_each_other(operator):
    """A backend's files are `<backend>.py` and `<backend>_*.py`."""
    folder = PACKAGE / "ops" / operator
    for path in folder.glob("*.py"):
        own = path.stem.split("_")[0]
        if own in BACKENDS:
            imported = {target[2] for target in imported_names(path) if target[:2] == ("ops", operator)}
            assert {name.split("_")[0] for name in imported} & BACKENDS <= {own}


def test_an_upward_import_would_be_seen():
    source = PACKAGE / "ops" / "alibi_attention" / "schema.py"
    assert ("ops", "library", "define") in set(imported_names(source))


WITHOUT_ANYTHING = """
import sys

BLOCKED = {
    *("triton", "matplotlib", "transformers", "hypothesis", "composer", "lightning", "torchdata", "tensordict"),
    *("zstandard", "datasets", "tokenizers", "tensorboard"),
}

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED or name == "seqwarm_kernels._C":
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block())
import torch
import seqwarm_kernels as sw

query = torch.randn(1, 2, 5, 4, requires_grad=True)
sw.alibi_attention(query, query, query).sum().backward()
batch = {"input_ids": torch.arange(20).view(2, 10)}
assert sw.resize_batch(batch, 4)["input_ids"].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
from seqwarm_kernels import data
sampler = data.LengthBatchSampler([3, 1, 2, 2], data.BatchPlanner(4, packed=True), seed=0)
assert sorted(map(sorted, sampler)) == [[0, 1], [2, 3]]
assert sorted(data.SequenceSource("abc".split())) == ["abc"]
sw.warmup_allocator(torch.nn.Sequential(torch.nn.Embedding(5, 4)), 8)
from seqwarm_kernels import diagnostics
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
    assert "is not built" in str(error), error
else:
    raise AssertionError("the blocked extension served a call")
try:
    sw.alibi_attention(query, query, query, backend="triton")
except ValueError as error:
    assert "triton is blocked" in str(error) or "TRITON_INTERPRET" in str(error), error
else:
    raise AssertionError("the blocked triton served a call")
"""


def test_the_reference_needs_only_torch():
    result = subprocess.run([sys.executable, "-c", WITHOUT_ANYTHING], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
