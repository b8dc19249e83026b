"""bench device: each part runs, ends, and records everything, also what crashes, fails or is not run."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from bench.common.processes import Program
from bench.gpu import command, pytest_records, steps
from bench.gpu.records import STEPS, append, begin, read_device_records
from bench.gpu.stage import STAGES

ROOT = Path(__file__).parents[1]


def test_the_parts_end_in_half_an_hour():
    assert all(part.minutes < 9 for part in command.PARTS.values())
    calls = [command.PARTS[name].minutes for name in ("hopper", "memory", "training", "attention")]
    assert command.SELECTION_MINUTES + sum(calls) <= 29.5
    assert all((ROOT / path).exists() for path in command.SELECTION)


# ---- the program, without its processes


class PretendPrograms:
    """In place of processes: each writes the records that `outcomes` has for it, and ends with an exit code."""

    def __init__(self, outcomes):
        self.outcomes, self.started = outcomes, []

    def __call__(self, arguments, log, cwd, **environment):
        module, *rest = arguments[2:]
        assert importlib.util.find_spec(module), module
        name = rest[0] if module.startswith("bench.gpu.") else module
        self.started.append(name)
        failure, code = self.outcomes.get(name, (None, 0))
        log.write_text(f"output of {name}")
        if module == "bench.gpu.steps" and not code:
            append(Path(rest[rest.index("--out") + 1]), steps.step_record(name, 1.0, failure))
        return Namespace(code=code, wait_until=lambda moment: f"exit {code}: output")


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "begin", lambda path: path.write_text("{}\n"))
    monkeypatch.setattr(command, "_TOGETHER", 1)

    def call(part, selection=False, **outcomes):
        programs = PretendPrograms({name.replace("_", " "): outcome for name, outcome in outcomes.items()})
        monkeypatch.setattr(command, "Program", programs)
        command.main(Namespace(part=part, selection=selection, out=tmp_path, dry_run=False))
        return programs.started, read_device_records(tmp_path / f"device_{part}.jsonl")[1]

    return call


ESSENTIAL = ["compiler", "trivial kernel", "kernels"]


def test_every_stage_runs_in_its_part(run):
    stages = []
    for part in command.PARTS.keys() - {"tests"}:
        started = run(part)[0]
        assert started[:3] == ESSENTIAL
        stages += [name for name in started[3:] if name in STAGES]
    assert set(stages) == set(STAGES)


def test_the_part_of_tests(run, capsys, tmp_path):
    outcomes = {"forward": ("AssertionError: out is off", 0), "length_129": (None, -11), "pytest": (None, 1)}
    started, records = run("tests", **outcomes)
    assert set(started) == {*steps.STEPS, "pytest"}
    failures = {record.case: record for record in records if record.failure}
    assert set(failures) == {"forward", "length 129", "gpu tests"}
    assert failures["length 129"].failure == "exit -11: output"
    text = capsys.readouterr().out
    assert "FAILED forward: AssertionError: out is off" in text
    assert "==== forward: exit 0: output\noutput of forward\n" in (tmp_path / "device_tests.log").read_text()


def test_nothing_runs_without_the_essentials(run):
    with pytest.raises(SystemExit, match="kernels failed, so nothing else runs: there is none"):
        run("memory", kernels=("there is none", 0))


def test_the_running_measurement_is_recorded(run, tmp_path):
    key = ["resize_batch", "a case", "resize", "native", "a"]
    (tmp_path / "device_memory.running").write_text(json.dumps(key))
    [record] = [record for record in run("memory")[1] if record.stage != STEPS]
    assert (list(record.key()), record.failure) == (key, "ended its process")
    assert not (tmp_path / "device_memory.running").exists()


def test_a_stage_that_crashes_is_continued(run):
    started = run("memory", resize=(None, -11))[0]
    assert started.count("resize") == command._ATTEMPTS
    assert started[-1] == "diagnostics"


def test_processes_of_a_program_end_with_it(tmp_path):
    program = Program(["sh", "-c", "(sleep 0.3; touch late) &"], tmp_path / "log", tmp_path)
    assert program.wait_until(time.monotonic() + 10).startswith("exit 0")
    time.sleep(0.5)
    assert not (tmp_path / "late").exists()


# ---- steps


@pytest.mark.parametrize("name", ["forward", "length 129"])
def test_steps_pass_on_a_cpu(name):
    assert steps.run_step(name, steps.torch.device("cpu")).failure is None


def test_a_failing_step_has_its_traceback(monkeypatch):
    def fail(device):
        raise ValueError("a reason")

    monkeypatch.setitem(steps.STEPS, "forward", fail)
    record = steps.run_step("forward", steps.torch.device("cpu"))
    assert record.failure == "ValueError: a reason"
    assert "in fail" in record.facts["output"]


# ---- records of pytest

_TESTS = """
import time
import pytest

def test_passes(): pass
def test_fails():
    assert 1 == 2
@pytest.mark.skip(reason="no reason")
def test_skipped(): pass
def test_hangs(): time.sleep(100)
def test_after(): pass
"""


@pytest.mark.slow
def test_what_time_did_not_allow_is_recorded(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # else pytest below is a worker too
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    (tmp_path / "test_some.py").write_text(_TESTS)
    records = tmp_path / "device_tests.jsonl"
    begin(records)
    arguments = ["-p", "bench.gpu.pytest_records", "-o", "faulthandler_timeout=2", "--numprocesses", "1"]
    arguments += ["--rootdir", str(tmp_path), str(tmp_path)]
    environment = {"SEQWARM_RECORDS": str(records), "PYTHONPATH": str(ROOT)}
    program = Program([sys.executable, "-m", "pytest", *arguments], tmp_path / "log", tmp_path, **environment)
    end = time.monotonic() + 60
    while time.monotonic() < end and "in test_hangs" not in (tmp_path / "log").read_text():
        time.sleep(0.1)
    program.wait_until(time.monotonic() + 1)
    pytest_records.add_unfinished(records)
    found = {record.case.partition("::")[2]: record for record in read_device_records(records)[1]}
    assert found["test_passes"].failure is None
    assert found["test_fails"].failure == "call: assert 1 == 2"
    assert "def test_fails" in found["test_fails"].facts["traceback"]
    assert found["test_skipped"].failure == "skipped: Skipped: no reason"
    assert found["test_hangs"].failure.startswith("running when the time was over")
    assert found["test_after"].failure == "not run: the time was over"
    assert [path.name for path in tmp_path.glob("device_tests.*")] == ["device_tests.jsonl"]


# ---- the whole program on a CPU


def dry_run(part, folder):
    arguments = ["device", "--part", part, "--dry-run", "--out", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    program = [sys.executable, "-m", "bench", *arguments]
    run = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert {path.name for path in folder.iterdir()} == {f"device_{part}.jsonl", f"device_{part}.log"}
    return read_device_records(folder / f"device_{part}.jsonl")[1], run.stdout


@pytest.mark.exhaustive  # FlexAttention compiles for a minute
@pytest.mark.parametrize("part", command.PARTS)
def test_a_dry_run(tmp_path, part):
    records, text = dry_run(part, tmp_path)
    if part == "tests":
        assert {record.case for record in records if record.stage == STEPS} == {
            *(name for name in steps.STEPS if name not in steps.NEED_A_GPU),
            "gpu tests",
        }
        assert [record for record in records if record.failure is not None] == []
        assert "tests: 1 passed" in text
    else:
        measured = {record.stage for record in records if record.failure is None} - {"copy", STEPS}
        names = {"small": {"host", "packed", "decoding"}, "resize": {"resize_batch"}}
        assert measured == set().union(*(names.get(stage, {stage}) for stage in command.PARTS[part].stages))
