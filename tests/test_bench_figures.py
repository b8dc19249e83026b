"""The figures of bench, drawn from the committed records: texts, looks, and the points of the records."""

import math
from dataclasses import asdict

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from bench import ramp, shown
from bench.alibi_attention import figures as attention
from bench.alibi_attention.cases import BOTH, FORWARD
from bench.batching import report as batching
from bench.common.records import RESULTS, CpuRecord, read
from bench.gpu.records import read_folder
from bench.parallel import report as many_devices
from bench.resize_batch import implementations as resizing
from bench.resize_batch import report as resize_report
from experiments import figures as training
from experiments.plan import EXTRAPOLATION, SPEED, STABILITY, TIME
from experiments.results import Result
from experiments.scales import TOY
from seqwarm_kernels.cli.exchanges import ContextSize
from seqwarm_kernels.utils.figures import style

from .support.figures import check_looks, check_readable, drawn, texts_of


@pytest.fixture(autouse=True)
def styled():
    with style():
        yield


def lines_of(name):
    return read(RESULTS / f"{name}.jsonl")[1]


# ---- steps of a ramp


def test_steps_of_a_ramp():
    lines = [
        {
            "variant": variant,
            "step": step,
            "seq_length": 16 * (step // 6 + 1),
            "seconds": 0.1 + (step % 6 == 0) * height,
        }
        for height, variant in enumerate(ramp.VARIANTS)
        for step in range(48)
    ]
    figure = ramp.ramp_figure(lines)
    check_readable(figure)
    check_looks(figure, set(ramp.VARIANTS))
    assert "\n| flatten | 100 | 100 |" in ramp.ramp_table(lines)


# ---- attention


def test_attention_on_a_cpu():
    records = [CpuRecord(**line) for line in lines_of("cpu_alibi_attention")]
    figure = attention.cpu_figure(records)
    check_readable(figure)
    peers = {"FlexAttention", "SDPA flash, no bias", "SDPA with bias mask", "eager with bias"}
    check_looks(figure, {"alibi_attention", "alibi_attention, no skip", *peers})
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(panels) == [f"{work}, {dtype}" for work in (FORWARD, BOTH) for dtype in ("float32", "bfloat16")]
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in figure.axes}) == 1
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


def test_speedups_on_a_gpu():
    records = read_folder(RESULTS)[1].of_stages("long", "lengths")
    figure = attention._speedup_figure({64: [attention._speedups(records, work, 64) for work in (FORWARD, BOTH)]})
    check_readable(figure)
    assert {"8", "16,384"} < set(texts_of(figure))
    for axes in figure.axes:
        ends = {name: points[-1][0] for name, points in drawn(axes).items()}
        assert ends["eager with bias"] == ends["SDPA cuDNN with bias mask"] == ends["SDPA cuDNN, no bias"] == 4096
        assert ends["FlexAttention"] == 16384
        for label in attention._labels(axes):  # no leader line goes on where nothing was measured
            place = axes.transAxes.transform((label.get_position()[0], 0))
            assert 1 < axes.transData.inverted().transform(place)[0] / ends[label.get_text()] < 1.5


# ---- many devices


def test_what_ranks_exchange():
    lines = lines_of(many_devices.RECORDS)
    figure = many_devices.figure(lines)
    check_readable(figure)
    check_looks(figure, {"ring", "all-gather", "Ulysses", "halo"})
    over_lengths, over_ranks = map(drawn, figure.axes)
    size = ContextSize(32, 32, 128, 2**17, 8)
    [widths] = [line["widths"] for line in lines if line.get("score_std") == 1 and line["size"] == asdict(size)]
    for name, volume in {"ring": size.ring(), "Ulysses": size.ulysses(), "halo": size.halo(widths)}.items():
        assert dict(over_lengths[name])[2**17] == dict(over_ranks[name])[8] == sum(volume) / 1e6
    assert max(ranks for ranks, _ in over_ranks["Ulysses"]) == 32, "64 ranks do not divide 32 heads"
    assert max(ranks for ranks, _ in over_ranks["halo"]) == 64


# ---- resize_batch


def test_resize_batch_on_a_cpu():
    records = [CpuRecord(**line) for line in lines_of("cpu_resize_batch")]
    figure = resize_report.cpu_figure(records)
    check_readable(figure)
    shown_names = {resizing.OURS, resizing.OURS_OUT, resizing.FOREACH, resizing.COMPILED}
    check_looks(figure, shown_names)
    assert {text.get_text() for text in figure.legends[0].get_texts()} == shown_names
    shapes = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert shapes[0] == "2 × 8 × 128, 0.02 MB"
    assert shapes[-1] == "16 × 4,096 × 1,024, 537 MB"
    assert len(shapes) == 9
    for axes, method in zip(figure.axes, resizing.METHODS, strict=True):
        assert axes.get_title(loc="left") == method
        assert all(line.get_linestyle() == "None" for line in axes.lines if line.get_gid())  # shapes are not joined
        of_shape = [record for record in records if record.case.startswith(f"{method}, 3 x 2048 x 2048")]
        ms = {record.implementation: record.median_ms for record in of_shape if record.threads == 2}
        speeds = {round(row): speed for speed, row in drawn(axes)[resizing.OURS]}
        assert speeds[6] == pytest.approx(ms[resizing.BY_HAND] / ms[resizing.OURS])
    assert any("times as fast as slice + contiguous" in text for text in texts_of(figure))


# ---- training


def results(experiment):
    found = [Result(**line) for line in lines_of("cpu_training")]
    return [result for result in found if result.experiment == experiment and result.failure is None]


def test_time_to_a_loss():
    figure = training.time_figure(results(TIME), TOY)
    check_readable(figure)
    check_looks(figure, {training.BASELINE, training.WARMUP, training.HALF_BATCH})
    curves, ratios = figure.axes
    labels = [text.get_text() for text in curves.texts]
    assert labels == ["full length", "half the batch", *(f"warmup {share}%" for share in (15, 30, 45, 60, 75, 90))]
    [half] = [line for line in ratios.lines if line.get_gid() == training.HALF_BATCH]  # its seconds are not comparable
    found = sorted(r.figures["sooner_in_tokens"] for r in results(TIME) if r.case["batch_size"] == 4)
    assert sorted(half.get_ydata()) == found
    assert "as soon as the baseline" in [text.get_text() for text in ratios.texts]
    baseline = next(line for line in curves.lines if line.get_gid() == training.BASELINE)
    curve = next(r for r in results(TIME) if not r.case["duration"]).figures["curve"]
    assert list(baseline.get_xdata()) == [tokens / 1000 for tokens, _, _ in curve]
    assert list(baseline.get_ydata()) == [loss for _, _, loss in curve]


@pytest.mark.parametrize(
    ("draw", "experiment", "looks"),
    [
        (training.stability_figure, STABILITY, {training.BASELINE, training.WARMUP}),
        (training.extrapolation_figure, EXTRAPOLATION, {training.BASELINE, training.WARMUP}),
        (training.speed_figure, SPEED, {"this package", "eager, slicing"}),
    ],
)
def test_other_experiments(draw, experiment, looks):
    figure = draw(results(experiment), TOY)
    check_readable(figure)
    check_looks(figure, looks)


# ---- a demo, a search, padding


def test_the_demo():
    [line] = lines_of(shown.DEMO)
    figure = shown.demo_figure(line)
    check_readable(figure)
    check_looks(figure, {"full length throughout", "sequence-length warmup"})
    losses, lengths = figure.axes
    for run, name in (("baseline", "full length throughout"), ("warmup", "sequence-length warmup")):
        found = [each for each in line["evaluations"] if each["run"] == run]
        assert drawn(losses)[name] == [(each["tokens"] / 1e6, each["validation_loss"]) for each in found]
    assert drawn(lengths)["sequence-length warmup"][0] == (0, 32)
    assert max(length for _, length in drawn(lengths)["sequence-length warmup"]) == 256
    assert any("seed 0" in text for text in texts_of(figure))
    assert {"1.03 M", "1.43 M", "final loss at the full length"} < set(texts_of(figure))


def test_a_search():
    [line] = lines_of(shown.TUNING)
    figure = shown.tuning_figure(line)
    check_readable(figure)
    perplexities, _ = figure.axes
    *labels, limit = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(labels)[-1] == "from 8 over 92,160: fluctuates"
    assert sum(label.endswith("found") for label in labels) == 1
    trials = [each for each in perplexities.lines if not each.get_label().startswith("_")]
    assert [len(each.get_ydata()) for each in trials] == [len(each["validations"]) for each in line["trials"]]
    assert limit == "limit: 1.3 times the best before"
    crosses = [each for axes in figure.axes for each in axes.lines if each.get_marker() == "x"]
    assert len(crosses) == 2 * sum(trial["outcome"] == "fluctuates" for trial in line["trials"])


def test_padding():
    [line] = lines_of(batching.FIGURE_RECORDS)
    figure = batching.padding_figure(line)
    check_readable(figure)
    lengths, *panels = figure.axes
    assert lengths.get_title(loc="left") == "242,580 items, 41,182,215 tokens"
    titles = [axes.get_title(loc="left") for axes in panels]
    assert titles[:2] == ["random batches of 32", "7,581 batches, 84.2% padding"]
    assert len(panels) == 2 * len(line["ways"])  # no histogram hides another
    assert len({axes.get_ylim() for axes in panels}) == 1
    for axes, way in zip(panels[::2], line["ways"], strict=True):
        [stairs] = axes.patches
        assert list(stairs.get_data().values) == [
            count / way["batches"] for count in way["padding_of_a_batch"]["counts"]
        ]
        assert math.isclose(sum(stairs.get_data().values), 1)
