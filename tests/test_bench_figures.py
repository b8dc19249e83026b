"""The figures of bench have the points of the committed records, or of a replay."""

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from bench.alibi_attention import figures as attention
from bench.alibi_attention.cases import BOTH, FORWARD
from bench.allocator.replay import CAPACITY, WITH, WITHOUT, Training, ramp_figure, replay
from bench.common.records import RESULTS, CpuRecord, read
from experiments import figures as training
from experiments.plan import TIME
from experiments.results import Result
from experiments.scales import TOY
from seqwarm_kernels.utils.figures import style

from .support.figures import check_looks, check_readable, drawn


@pytest.fixture(autouse=True)
def styled():
    with style():
        yield


def lines_of(name):
    return read(RESULTS / f"{name}.jsonl")[1]


def test_attention_on_a_cpu():
    records = [CpuRecord(**line) for line in lines_of("cpu_alibi_attention")]
    panels = {axes.get_title(loc="left"): axes for axes in attention.cpu_figure(records).axes}
    assert list(panels) == [f"{work}, {dtype}" for work in (FORWARD, BOTH) for dtype in ("float32", "bfloat16")]
    for title, axes in panels.items():
        points = drawn(axes)
        assert ("FlexAttention" in points) == title.startswith("forward,"), "it has no backward on a CPU"
        assert {text.get_text() for text in axes.texts} == set(points)
        work, dtype = title.split(", ")
        [record] = [
            record
            for record in records
            if (record.implementation, record.threads) == ("SDPA with bias mask", 2)
            and record.facts["work"] == work
            and record.case.endswith(f"causal B2 H12 S1024 D64, {dtype}")
        ]
        assert dict(points["SDPA with bias mask"])[1024] == pytest.approx(1000 * record.median_ms / 2048)


def test_time_to_a_loss():
    results = [Result(**line) for line in lines_of("cpu_training")]
    results = [result for result in results if result.experiment == TIME and result.failure is None]
    curves, ratios = training.time_figure(results, TOY).axes
    labels = [text.get_text() for text in curves.texts]
    assert labels == ["full length", "half the batch", *(f"warmup {share}%" for share in (15, 30, 45, 60, 75, 90))]
    [half] = [line for line in ratios.lines if line.get_gid() == training.HALF_BATCH]  # its seconds are not comparable
    found = sorted(result.figures["sooner_in_tokens"] for result in results if result.case["batch_size"] == 4)
    assert sorted(half.get_ydata()) == found
    baseline = next(result for result in results if not result.case["duration"]).figures["curve"]
    assert drawn(curves)[training.BASELINE] == [(tokens / 1000, loss) for tokens, _, loss in baseline]


def test_a_replay_of_the_allocator():
    """A warmed ramp asks the device for nothing."""
    tiny = Training(layers=2, width=256, vocabulary=8192, batch_size=8)
    ramps = {name: replay(tiny, range(8, 257, 8), CAPACITY, warmed=name == WITH) for name in (WITHOUT, WITH)}
    cold, warmed = ramps[WITHOUT], ramps[WITH]
    assert set(warmed.device_calls) == {0}
    assert cold.device_calls == sorted(cold.device_calls)
    assert cold.device_calls[-1] > cold.device_calls[0] > 0
    assert len(set(warmed.reserved)) == 1
    assert cold.reserved[-1] > warmed.reserved[-1] >= warmed.peaks[-1] == cold.peaks[-1]
    figure = ramp_figure(ramps)
    check_readable(figure)
    check_looks(figure, {WITH, WITHOUT})
    assert "a replay of the allocator's policy, not a measurement" in figure.get_suptitle()
