import pytest

from seqwarm_kernels.demo.records import (
    BASELINE,
    WARMUP,
    Comparison,
    Crossing,
    Record,
    first_reaches,
    full_length_speed,
)
from seqwarm_kernels.demo.report import LABELS, progress_figure
from seqwarm_kernels.demo.settings import settings_for
from seqwarm_kernels.utils.figures import style


def records(run, points, seq_length=8):
    """Returns records from (seconds, tokens, validation loss)."""
    return [Record(run, 0, tokens, seconds, seq_length, 0.0, None, loss) for seconds, tokens, loss in points]


FALLING = [(0.0, 0, 5.0), (10.0, 100, 3.0), (20.0, 200, 2.0)]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (6.0, Crossing(0.0, 0)),
        (4.0, Crossing(5.0, 50)),
        (2.25, Crossing(17.5, 175)),
        (2.0, Crossing(20.0, 200)),
        (1.9, None),
    ],
)
def test_crossing_lies_on_the_line_between_evaluations(loss, expected):
    assert first_reaches(records(BASELINE, FALLING), loss) == expected


@pytest.mark.parametrize(
    ("points", "parts"),
    [
        ([(4.0, 100, 2.0), (14.0, 200, 1.5)], ["2.00 times sooner in tokens", "5.00 times sooner in"]),
        ([(40.0, 100, 2.0), (50.0, 200, 1.9)], ["2.00 times sooner in tokens", "2.00 times later in"]),
        ([(15.0, 200, 2.1)], ["did not reach", "2.1000"]),
    ],
)
def test_headline(points, parts):
    first, *rest = points
    warmup = records(WARMUP, [(0.0, 0, 5.0), first], seq_length=4) + records(WARMUP, rest)
    headline = Comparison.of(records(BASELINE, FALLING) + warmup).headline()
    assert all(part in headline for part in parts)


def test_speed_counts_only_the_full_length():
    short = records(WARMUP, [(0.0, 0, 5.0), (9.0, 10, 4.0)], seq_length=4)
    full = records(WARMUP, [(10.0, 100, 3.0), (12.0, 300, 2.0)])
    assert full_length_speed(short + full) == 100
    assert full_length_speed([*short, full[0]]) is None


def test_the_figure():
    """The losses of both runs, where each reaches the final loss of the first, and the lengths of both."""
    pytest.importorskip("matplotlib")
    warmup = records(WARMUP, [(0.0, 0, 5.0), (4.0, 100, 1.5)], seq_length=4)
    settings = settings_for("cpu", quick=True)
    with style():
        losses, lengths = progress_figure(Comparison.of(records(BASELINE, FALLING) + warmup), settings).axes
    lines = {line.get_label(): list(line.get_ydata()) for line in losses.lines}
    assert [lines[name] for name in LABELS.values()] == [[5, 3, 2], [5, 1.5]]
    assert [line.get_ydata()[0] for line in losses.lines if line.get_label() == "_reached"] == [2, 2]
    assert [max(line.get_ydata()) for line in lengths.lines] == [settings.seq_length] * 2
