"""The figure of a search."""

import math

import pytest

from seqwarm_kernels.diagnostics import NoStableSchedule, Validation

from .test_tune_schedule import region, tune
from .toys import Formula


def test_the_figure(tmp_path):
    pytest.importorskip("matplotlib")
    found = tune(Formula(region))
    found.figure(tmp_path / "tuning.png")
    assert (tmp_path / "tuning.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(NoStableSchedule) as caught:
        tune(lambda scheduler, end: [Validation(0, math.inf)])
    caught.value.figure(str(tmp_path / "nothing.png"))
    assert (tmp_path / "nothing.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("highest", [40.0, 1e5, 1e308])
def test_a_perplexity_above_the_figure_does_not_squeeze_the_rest(highest, tmp_path, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    subplots = figure.Figure.subplots
    monkeypatch.setattr(figure.Figure, "subplots", lambda self: drawn.append(subplots(self)) or drawn[-1])

    def run_trial(scheduler, end):
        yield Validation(0, 256.0)
        yield Validation(end // 2, 20.0)
        yield Validation(end, highest if scheduler.duration > 400 else 16.0)

    tune(run_trial).figure(tmp_path / "tuning.png")
    bottom, top = drawn[0].get_ylim()
    assert bottom == pytest.approx(0.95 * 16)
    assert top == pytest.approx(min(1.1 * highest, 3 * 1.3 * 20))
    crosses = [line for line in drawn[0].lines if line.get_marker() == "x"]
    assert crosses
    assert all(line.get_ydata()[0] <= top for line in crosses)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("validations", [[(0, math.nan)], [(0, 1e308), (1, math.inf)], [(0, 256.0), (1, 1e308)]])
def test_the_figure_of_a_search_without_a_stable_trial(validations, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(NoStableSchedule) as caught:
        tune(lambda scheduler, end: [Validation(*each) for each in validations])
    caught.value.figure(tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").read_bytes().startswith(b"\x89PNG")
