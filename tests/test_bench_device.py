"""bench device: each part runs its stages and steps, and records what fails."""

import importlib.util
from argparse import Namespace
from pathlib import Path

import pytest

from bench.gpu import command, steps
from bench.gpu.records import append, read_device_records
from bench.gpu.stage import STAGES

ROOT = Path(__file__).parents[1]


def test_the_parts_end_in_half_an_hour():
    assert all(part.minutes < 9 for part in command.PARTS.values())
    calls = [command.PARTS[name].minutes for name in ("hopper", "memory", "training", "attention")]
    assert command.SELECTION_MINUTES + sum(calls) <= 29.5
    assert all((ROOT / path).exists() for path in command.SELECTION)


class PretendPrograms:
    """In place of processes: each writes the records that `outcomes` has for it, and ends with an exit code."""

    def __init__(self, outcomes):
        self.outcomes, self.started = outcomes, []

    def __call__(self, arguments, log, cwd, until, **environment):
        module, *rest = arguments[2:]
        assert importlib.util.find_spec(module), module
        name = rest[0] if module.startswith("bench.gpu.") else module
        self.started.append(name)
        failure, code = self.outcomes.get(name, (None, 0))
        log.write_text(f"output of {name}")
        if module == "bench.gpu.steps" and not code:
            append(Path(rest[rest.index("--out") + 1]), steps.step_record(name, 1.0, failure))
        return code, f"exit {code}: output"


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "begin", lambda path: path.write_text("{}\n"))
    monkeypatch.setattr(command, "_TOGETHER", 1)

    def call(part, selection=False, **outcomes):
        programs = PretendPrograms({name.replace("_", " "): outcome for name, outcome in outcomes.items()})
        monkeypatch.setattr(command, "run_program", programs)
        command.main(Namespace(part=part, selection=selection, out=tmp_path, dry_run=False))
        return programs.started, read_device_records(tmp_path / f"device_{part}.jsonl")[1]

    return call


def test_every_stage_runs_in_its_part(run):
    stages = []
    for part in command.PARTS.keys() - {"tests"}:
        started = run(part)[0]
        assert started[:3] == ["compiler", "trivial kernel", "kernels"]
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


@pytest.mark.parametrize("name", ["forward", "length 129"])
def test_steps_pass_on_a_cpu(name):
    assert steps.run_step(name, steps.torch.device("cpu")).failure is None
