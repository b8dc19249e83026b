"""The figure of a search."""

import math

import pytest

from seqwarm_kernels.tuning import NoStableSchedule, Validation
from seqwarm_kernels.tuning.figure import search_figure
from seqwarm_kernels.utils.figures import style

from .test_tune_schedule import tune

support = pytest.importorskip("tests.support.figures", reason="matplotlib is not installed")
pytestmark = pytest.mark.filterwarnings("error")


def test_a_perplexity_above_the_figure_does_not_squeeze_the_rest():
    def run_trial(scheduler, end):
        yield Validation(0, 256.0)
        yield Validation(end // 2, 20.0)
        yield Validation(end, 1e308 if scheduler.duration > 400 else 16.0)

    found = tune(run_trial)
    with style():
        figure = search_figure(found.configuration, found.trials, found.accepted)
        support.check_readable(figure)
    perplexities, _ = figure.axes
    bottom, top = perplexities.get_ylim()
    assert 0 < bottom < 16 < 20 < top < 50
    for axes in figure.axes:
        crosses = [line for line in axes.lines if line.get_marker() == "x"]
        assert len(crosses) == sum(trial.fluctuates for trial in found.trials) > 0
        assert all(line.get_ydata()[0] <= axes.get_ylim()[1] for line in crosses)
    *labels, limit = [text.get_text() for text in figure.legends[0].get_texts()]
    assert limit == "limit: 1.3 times the best before"
    assert f"from {found.min_seq_length} over {found.duration}: found" in labels
    assert sum(label.endswith("fluctuates") for label in labels) == len(crosses)
    markers = [line.get_marker() for line in perplexities.lines if not line.get_label().startswith("_")]
    assert len(set(markers)) == len(found.trials)


def test_the_figure_of_a_search_without_a_stable_trial(tmp_path):
    with pytest.raises(NoStableSchedule) as caught:
        tune(lambda *_: [Validation(0, 1e308), Validation(1, math.inf)], min_seq_lengths=[8, 16], durations=[200, 300])
    caught.value.search.figure(str(tmp_path / "nothing.svg"))
    assert (tmp_path / "nothing.svg").read_text().startswith("<?xml")
