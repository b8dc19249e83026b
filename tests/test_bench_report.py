"""bench: records files, stages of a GPU run and pages are reported; CPU benchmarks need no triton."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from bench import __main__ as bench
from bench import page, ramp
from bench.alibi_attention import gpu as attention
from bench.alibi_attention import hopper
from bench.alibi_attention.cases import BOTH
from bench.alibi_attention.report import device_goals as attention_goals
from bench.allocator import gpu as allocator
from bench.common.records import RESULTS
from bench.gpu.records import TESTS, DeviceRecord, DeviceRecords
from bench.gpu.report import device_report
from bench.gpu.stage import STAGES
from bench.gpu.steps import step_record
from bench.report import FIGURES
from experiments import gpu as training
from experiments.stability.command import RECORDS as STABILITY
from seqwarm_kernels.utils.figures import style

from .support.figures import check_looks, check_readable

ROOT = Path(__file__).parent.parent
RAMP = dict.fromkeys(("device_allocations", "compilations", "stalls"), 0)
RAMP |= dict.fromkeys(("reserved_megabytes", "warmup_seconds", "seconds"), 1)


@pytest.fixture
def run_bench(monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench", *map(str, arguments)])
        bench.main()
        return capsys.readouterr().out

    return run


# ---- records files


@pytest.fixture
def draws(monkeypatch):
    """Functions that draw the figures, in place of images."""
    found = []
    monkeypatch.setattr("bench.common.figures.png", lambda draw, dark=False: found.append(draw) or b"")
    return found


def test_every_committed_records_file_has_a_section_and_figures(run_bench, draws, tmp_path):
    sections = re.split("\n## (?=On a GPU|cpu)", run_bench("report", "--figures", tmp_path))
    reported = {section.removeprefix("## ").partition("\n")[0]: section for section in sections}
    files = sorted(RESULTS.glob("*.jsonl"))
    assert files
    for path in files:
        environment, *lines = path.read_text().splitlines()
        section = reported["On a GPU" if path.stem.startswith("device") else path.stem]
        assert json.loads(environment)["torch"] in section
        if path.stem.startswith("device"):  # peers share a row
            records = map(json.loads, lines)
            assert all(record["case"] in section for record in records if record["stage"] != TESTS)
        elif path.stem.endswith("_training"):
            assert f"{len(lines)} results." in section
            assert "## (d) Speed" in section
        elif path.stem == STABILITY:  # a cell has several runs
            assert f"{len(lines)} runs." in section
        elif path.stem == ramp.RECORDS:  # a row has all steps of a variant
            assert all(f"| {variant} |" in section for variant in ramp.VARIANTS)
        else:
            assert section.count("\n|") >= len(lines)
    made = {path.stem for path in tmp_path.iterdir()}
    assert len(made) == len(draws), "a file for light pages, and one for dark ones"
    of_others = {"reach", "attended_share", "plan", "allocator_replay"}
    assert {path.stem.removesuffix("_dark") for path in FIGURES.glob("*.png")} == of_others | {
        name.removesuffix("_dark") for name in made
    }


@pytest.mark.slow
def test_figures_are_readable(run_bench, draws, tmp_path):
    run_bench("report", "--figures", tmp_path)
    with style():
        for draw in draws[::2]:  # each is drawn for dark pages, too
            figure = draw()
            check_readable(figure)
            check_looks(figure, {line.get_gid() for axes in figure.axes for line in axes.lines if line.get_gid()})


@pytest.mark.parametrize(("path", "tables"), page.PAGES.items(), ids=lambda each: getattr(each, "stem", ""))
def test_the_tables_of_a_page_are_those_of_the_records(path, tables):
    text = path.read_text()
    assert re.findall(r"<!-- (.*): begin -->", text) == list(tables)
    assert page.filled(text, tables) == text, "run python -m bench page"
    changed = re.sub(r"(begin -->\n\n\|.*\n\|.*\n\| )", r"\1another ", text)
    assert page.filled(changed, tables) == text != changed


# ---- records of a GPU run


class PretendRecorder:
    """Records invented times, and measures nothing."""

    def __init__(self):
        self.records = []

    def out_of_time(self):
        return False

    def seconds_left(self):
        return 1.0

    def has(self, *key):
        return False

    def add(self, record):
        self.records.append(record)

    def measure(self, stage, case, work, implementation, make, *, inputs="a", facts=None):
        names = ("gflop", "moved_megabytes", "attended_share", "error_out", "extra_megabytes", "launches", "wait_ms")
        figures = dict.fromkeys(names, 0.5)
        times = (4.0, 3.0, 5.0) if work == BOTH else (2.0, 1.0, 3.0)
        self.add(DeviceRecord(stage, case, work, implementation, inputs, *times, figures, facts or {}))


@pytest.fixture
def device_records(monkeypatch):
    """Records of every stage: attention in full size, since its inputs are not drawn, and the rest in tiny sizes."""
    ended = SimpleNamespace(returncode=0, stdout=json.dumps(RAMP))
    monkeypatch.setattr(allocator.subprocess, "run", lambda *_, **__: ended)
    monkeypatch.setattr("bench.alibi_attention.peers.backends.choose", lambda *_: "triton")
    monkeypatch.setattr("bench.alibi_attention.peers._has_flash_3", lambda: True)
    monkeypatch.setattr("bench.alibi_attention.peers._has_flash_4", lambda: True)
    recorder = PretendRecorder()
    full_size = (attention.paths, attention.long, attention.lengths, attention.segments)
    full_size += (attention.decoding, hopper.hopper)
    measured = dict.fromkeys(part for parts in STAGES.values() for part in parts)
    del measured[training.to_one_loss]  # it starts processes
    for part in measured:
        before = len(recorder.records)
        part(recorder, torch.device("cpu"), part not in full_size)
        assert len(recorder.records) > before, part
    recorder.add(DeviceRecord("long", "a case", "forward", "FlexAttention", failure="RuntimeError: a reason"))
    sooner = {"sooner_in_tokens": 1.5, "sooner_in_seconds": 1.2}
    for arm in (training.WARMUP, training.EAGER_WARMUP, training.SMALL_BATCH):
        recorder.add(DeviceRecord(training.STAGE, "GPT-2", training.WORK, arm, figures=sooner))
    recorder.add(step_record("compiler", 1.0, None))
    return recorder.records


def test_every_stage_of_a_gpu_run_is_reported_with_its_goals(device_records):
    records = DeviceRecords(device_records)
    text = device_report(records)
    assert {record.case for record in device_records if record.case not in text} == set()
    for stage in {record.stage for record in device_records}:
        assert f"| {stage} | work |" in text
    for goal in (*attention_goals(records), *allocator.device_goals(records)):
        assert goal.value is not None, goal
        assert f"| {goal.what} | {goal.value_text()} |" in text
    assert "- failed 1x, first long a case forward, FlexAttention: RuntimeError: a reason" in text
    assert "- steps: 1 passed" in text


# ---- commands


@pytest.mark.parametrize("name", bench.COMMANDS)
def test_every_command_has_help(run_bench, name, capsys):
    if name == "attention_compiled":
        pytest.importorskip("triton", reason="triton is not installed")
    with pytest.raises(SystemExit) as end:
        run_bench(name, "--help")
    assert end.value.code == 0
    assert f"python -m bench {name}" in capsys.readouterr().out
