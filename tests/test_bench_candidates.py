"""Candidates of kernels for a GPU: each applies, compiles as its header says, and agrees with the reference."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton

from bench.common.records import ROOT
from bench.gpu.candidates import compare, worker
from bench.gpu.candidates.cases import GROUPS
from bench.gpu.candidates.patches import Needs, patched, read_candidates
from bench.gpu.candidates.worker import Worker
from bench.gpu.records import DeviceRecord, DeviceRecords
from bench.gpu.summary import summary

CANDIDATES = read_candidates()
each_candidate = pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: candidate.name)
PINNED = triton.__version__.startswith("3.7.")
KERNEL = "seqwarm_kernels/ops/alibi_attention/triton_short_kernel.py"
WRONG = f"""diff --git a/{KERNEL} b/{KERNEL}
--- a/{KERNEL}
+++ b/{KERNEL}
@@ -1,1 +1,1 @@
-    delta = tl.where(seen, delta + grad_nan, 0.0)
+    delta = tl.where(seen, delta - grad_nan - 0.1, 0.0)
""".replace("    delta", "        delta")


# ---- patches


@each_candidate
def test_a_candidate_applies_to_the_kernels(candidate):
    changed = patched(candidate.diff, ROOT)
    assert changed
    assert all(path.is_relative_to(ROOT / "seqwarm_kernels" / "ops") for path in changed)
    assert all(path.read_text() != text for path, text in changed.items())
    assert candidate.work in ("forward", "backward")
    assert set(candidate.cases) <= GROUPS.keys()
    assert candidate.low < candidate.high
    assert candidate.compiled


def test_lines_are_replaced(tmp_path):
    (tmp_path / "a.py").write_text("one\n\ntwo\nthree\n")
    diff = "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1,4 +1,4 @@\n one\n \n-two\n+2\n three\n"
    assert patched(diff, tmp_path) == {tmp_path / "a.py": "one\n\n2\nthree\n"}


@pytest.mark.parametrize("text", ["one\n", "two\nbetween\ntwo\n"], ids=["not there", "twice"])
def test_lines_that_do_not_match_are_an_error(tmp_path, text):
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(ValueError, match=r"a\.py"):
        patched("diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1,1 +1,1 @@\n-two\n+2\n", tmp_path)


# ---- compiled and run


def needs_of(tree, kernel, head_dim, variant):
    command = [sys.executable, "-m", "bench", "attention_compiled", "--json", "--chips", "90", "--kernels", kernel]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command += ["--head-dims", str(head_dim), "--variants", variant]
    run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    [report] = [report for report in found if report["dtype"] == "bf16"]
    return Needs(report["registers"], report["spilled_bytes"], report["instructions"])


@pytest.mark.slow
@each_candidate
def test_a_candidate_compiles_as_its_header_says(candidate, tmp_path):
    tree = candidate.write_tree(tmp_path / "tree")
    for kernel, head_dim, variant, now, changed in candidate.compiled:
        found = [needs_of(each, kernel, head_dim, variant) for each in (ROOT, tree)]
        if PINNED:
            assert found == [now, changed], (kernel, head_dim, variant)


@pytest.mark.slow
@each_candidate
def test_a_candidate_agrees_with_the_reference(candidate, tmp_path):
    assert compare.check(candidate.cases, candidate.write_tree(tmp_path / "tree"), seconds=600) is None


@pytest.mark.slow
def test_a_wrong_kernel_is_found(tmp_path):
    tree = CANDIDATES[0].write_tree(tmp_path / "tree")
    for path, text in patched(WRONG, ROOT).items():
        (tree / path.relative_to(ROOT)).write_text(text)
    assert "the budget is" in compare.check(["short 64"], tree, seconds=600)


# ---- processes that take turns


def write_worker(tree, text):
    folder = tree / "bench" / "gpu" / "candidates"
    folder.mkdir(parents=True)
    for package in (folder, *folder.parents[:2]):
        (package / "__init__.py").touch()
    (folder / "worker.py").write_text(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [("import sys; sys.exit('no device')", "ended: no device"), ("import time; time.sleep(100)", "no answer in 1 s")],
    ids=["ends", "hangs"],
)
def test_a_process_without_an_answer_is_an_error(tmp_path, monkeypatch, text, message):
    monkeypatch.setattr(worker, "_LONGEST", 1.0)
    write_worker(tmp_path, text)
    with Worker(tmp_path, tmp_path / "log", {}) as process, pytest.raises(RuntimeError, match=message):
        process.time("forward", ("dense 64",), 0)


def test_a_candidate_goes_in_if_it_wins_at_every_size():
    speeds = {"wins": (1.03, 1.2), "loses at one size": (1.2, 1.02)}
    records = [
        DeviceRecord(compare.STAGE, f"size {size}", "forward", name, "a", 1.0, 1.0, 1.0, figures={"speed": speed})
        for name, found in speeds.items()
        for size, speed in enumerate(found)
    ]
    records.append(DeviceRecord(compare.STAGE, "results", "forward", "wrong", failure="grad_query is off"))
    lines = "\n".join(summary(DeviceRecords(records)))
    assert "goes in wins, speed beside main: size 0 1.030; size 1 1.200" in lines
    assert "no      loses at one size" in lines
    assert "no      wrong, speed beside main: grad_query is off" in lines


@each_candidate
def test_a_candidate_is_on_the_page(candidate):
    assert f"`{candidate.name}`" in (ROOT / "docs" / "kernels" / "attention_gpu.md").read_text()
