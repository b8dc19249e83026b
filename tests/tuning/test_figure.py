"""The figure of a search."""

import math

import pytest

from seqwarm_kernels.diagnostics import NoStableSchedule, Validation
from seqwarm_kernels.tuning.figure import search_figure
from seqwarm_kernels.utils.figures import style
from tests.support.tiers import first_fast

from .test_tune_schedule import region, tune
from .toys import Formula

FEW = {"min_seq_lengths": [8, 16], "durations": [200, 300]}  #: candidates


def test_the_figure(tmp_path):
    pytest.importorskip("matplotlib")
    found = tune(Formula(region))
    found.figure(tmp_path / "tuning.png")
    assert (tmp_path / "tuning.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(NoStableSchedule) as caught:
        tune(lambda scheduler, end: [Validation(0, math.inf)], **FEW)
    caught.value.figure(str(tmp_path / "nothing.png"))
    assert (tmp_path / "nothing.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("highest", [40.0, 1e5, 1e308])
def test_a_perplexity_above_the_figure_does_not_squeeze_the_rest(highest):
    support = pytest.importorskip("tests.support.figures")

    def run_trial(scheduler, end):
        yield Validation(0, 256.0)
        yield Validation(end // 2, 20.0)
        yield Validation(end, highest if scheduler.duration > 400 else 16.0)

    found = tune(run_trial)
    with style():
        figure = search_figure(found.configuration, found.trials, found.accepted)
        support.check_readable(figure)
    perplexities, rises = figure.axes
    bottom, top = perplexities.get_ylim()
    assert bottom == pytest.approx(0.95 * 16)
    assert top == pytest.approx(min(1.1 * highest, 3 * 1.3 * 20))
    for axes in figure.axes:
        crosses = [line for line in axes.lines if line.get_marker() == "x"]
        assert len(crosses) == sum(trial.fluctuates for trial in found.trials) > 0
        assert all(line.get_ydata()[0] <= axes.get_ylim()[1] for line in crosses)
    assert [text.get_text() for text in rises.texts] == ["limit: 1.3 times the best before"]
    labels = [text.get_text() for text in perplexities.texts]
    assert f"from {found.min_seq_length} over {found.duration}: found" in labels
    assert sum(label.endswith("fluctuates") for label in labels) == len(crosses)
    markers = [line.get_marker() for line in perplexities.lines if not line.get_label().startswith("_")]
    assert len(set(markers)) == len(found.trials)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "validations", first_fast([[(0, 1e308), (1, math.inf)], [(0, math.nan)], [(0, 256.0), (1, 1e308)]])
)
def test_the_figure_of_a_search_without_a_stable_trial(validations, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(NoStableSchedule) as caught:
        tune(lambda scheduler, end: [Validation(*each) for each in validations], **FEW)
    caught.value.figure(tmp_path / "nothing.png")
    assert (tmp_path / "nothing.png").read_bytes().startswith(b"\x89PNG")
