"""JSON Lines files after stops, kills and restarts; TensorBoard events read back."""

import json
import math
import os
import pickle
import sys

import pytest

from seqwarm_kernels.diagnostics import JsonLines, StepRecord, TensorBoard


def record(step, loss=1.0, **extra):
    return StepRecord(step, loss, 1.0, False, 2.0, 3.0, 4.0, 5.0, None, extra)


def write(path, steps, **options):
    output = JsonLines(path, **options)
    for step in steps:
        output(record(step))
    return output


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_each_line_is_written_immediately(tmp_path):
    """As JSON, which has null for NaN and infinity."""
    output = JsonLines(tmp_path / "monitor.jsonl")
    output(record(1, math.nan, learning_rate=0.5, rate=-math.inf))
    (line,) = (tmp_path / "monitor.jsonl").read_text().splitlines()  # before the file is closed
    statistics = {"variance_l1": 2.0, "variance_max": 3.0, "momentum_l1": 4.0, "momentum_max": 5.0, "grad_norm": None}
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 1,
        "loss": None,
        "loss_ratio": 1.0,
        "is_spike": False,
        **statistics,
        "learning_rate": 0.5,
        "rate": None,
    }
    output.close()
    output.close()
    output(record(2))
    output.close()
    assert steps_in(tmp_path / "monitor.jsonl") == [1, 2]


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        ([6, 7], [1, 2, 3, 4, 5, 6, 7]),
        ([4, 5], [1, 2, 3, 4, 5]),
        ([3], [1, 2, 3]),
        ([1], [1]),
        ([9], [1, 2, 3, 4, 5, 9]),
    ],
)
def test_a_resumed_run_replaces_later_lines(tmp_path, later, expected):
    path = tmp_path / "monitor.jsonl"
    write(path, range(1, 6)).close()
    before = path.read_text().splitlines()
    write(path, later).close()
    assert steps_in(path) == expected
    kept = len([step for step in range(1, 6) if step < later[0]])
    assert path.read_text().splitlines()[:kept] == before[:kept]


def test_no_record_is_lost(tmp_path):
    """Records that leave the file are kept beside it, in the order in which they left."""
    path = tmp_path / "monitor.jsonl"
    write(path, range(1, 81)).close()
    lines = path.read_text().splitlines()
    write(path, [79]).close()
    beside = tmp_path / "monitor.jsonl.replaced"
    assert beside.read_text().splitlines() == lines[78:]
    write(path, [1]).close()
    assert steps_in(path) == [1]
    assert steps_in(beside) == [79, 80, *range(1, 80)]
    write(path, [2, 3, 4, 3, 4, 5, 2]).close()  # of one output
    assert steps_in(path) == [1, 2]
    assert steps_in(beside)[81:] == [3, 4, 2, 3, 4, 5]


@pytest.mark.parametrize(("lost", "kept"), [(30, [1, 2]), (1, [1, 2, 3])])
def test_a_last_line_is_removed_if_it_is_incomplete(tmp_path, lost, kept):
    path = tmp_path / "monitor.jsonl"
    write(path, [1, 2, 3]).close()
    path.write_bytes(path.read_bytes()[:-lost])
    write(path, [4]).close()
    assert steps_in(path) == [*kept, 4]
    assert [file.name for file in tmp_path.iterdir()] == ["monitor.jsonl"]  # nothing is kept beside it


def test_a_file_that_was_moved_away(tmp_path):
    path = tmp_path / "monitor.jsonl"
    output = write(path, [1, 2])
    path.rename(tmp_path / "old.jsonl")
    output(record(3))
    assert (steps_in(tmp_path / "old.jsonl"), steps_in(path)) == ([1, 2], [3])


def scalars(folder):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_folder(tmp_path):
    pytest.importorskip("tensorboard")
    output = TensorBoard(tmp_path)
    for step in (1, 2, 3):
        output(record(step, loss=step / 2, rate=0.25))
    output.flush()
    found = scalars(tmp_path)
    assert found["optimizer/loss"] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert found["optimizer/rate"] == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert found["optimizer/variance_max"] == [(1, 3.0), (2, 3.0), (3, 3.0)]
    assert found["optimizer/is_spike"][0] == (1, 0.0)
    assert "optimizer/grad_norm" not in found
    assert "optimizer/step" not in found
    output.close()
    output.close()
    resumed = TensorBoard(tmp_path)
    for step, loss in [(3, 9.0), (4, 9.0), (3, 8.0), (4, 7.0)]:
        resumed(record(step, loss=loss))
    resumed.close()
    assert scalars(tmp_path)["optimizer/loss"] == [(1, 0.5), (2, 1.0), (3, 8.0), (4, 7.0)]


def test_tensorboard_does_not_close_the_callers_writer(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        output = TensorBoard(writer, prefix="")
        output(record(1))
        output.close()
        writer.add_scalar("own", 1.0, 1)
    assert {"loss", "own"} <= scalars(tmp_path).keys()


def test_tensorboard_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r'pip install "seqwarm_kernels\[tensorboard\]"'):
        TensorBoard(tmp_path)


@pytest.mark.parametrize("content", [b'{"lr": 1}', b"\0" * 1000, b"a list\n", b'{"s' + b"x"])
def test_a_file_with_other_content_is_not_changed(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="path must be a file of StepRecords"):
        JsonLines(path)
    assert path.read_bytes() == content


def test_a_file_is_opened_again_after_a_failed_close_and_in_a_copy(tmp_path):
    class Full:
        def close(self):
            raise OSError("no space")

    path = tmp_path / "runs" / "first" / "monitor.jsonl"  # the folder is made
    output = write(path, [1])
    copied = pickle.loads(pickle.dumps(output))
    output.close()
    output._file = Full()
    with pytest.raises(OSError, match="no space"):
        output.close()
    for each, step in ((output, 2), (copied, 3)):
        each(record(step))
        each.close()
    assert steps_in(path) == [1, 2, 3]


def test_a_folder_is_refused_and_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader, writer = os.pipe()  # a path as that of standard output in a pipeline
    try:
        for path in (None, tmp_path, os.devnull, tmp_path / "pipe", f"/dev/fd/{reader}"):
            with pytest.raises((TypeError, ValueError), match="path"):
                JsonLines(path)
    finally:
        os.close(reader)
        os.close(writer)
