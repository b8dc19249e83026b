"""The keys that each head visits, beside attended_share on the same tensors."""

import pytest
import torch

from seqwarm_kernels import alibi_slopes, attended_share
from seqwarm_kernels.attention.reach import Reach, ReachSettings, measure_reach
from seqwarm_kernels.ops import backends

needs_kernels = pytest.mark.skipif(
    backends.choose("alibi_attention", "cuda" if torch.cuda.is_available() else "cpu", None) == "reference",
    reason="no kernel that skips keys",
)


@needs_kernels
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False}, {"window": 700}, {"score_std": 3.0}, {"skip_tolerance": 2**-6}, {"skip_tolerance": 0.0}],
    ids=str,
)
def test_the_shares_are_attended_shares(options):
    settings = ReachSettings(heads=3, length=2000, head_dim=16, seed=1, **options)
    reach = measure_reach(settings)
    query, key = torch.randn(2, 1, 3, 2000, 16, generator=torch.Generator().manual_seed(1))
    given = {name: value for name, value in options.items() if name != "score_std"}
    expected = attended_share(query * settings.score_std, key, key, **given)[0]
    assert reach.shares() == pytest.approx(expected.tolist())
    assert reach.share() == pytest.approx(expected.mean().item())
    assert reach.slopes.tolist() == alibi_slopes(3).tolist()
    if options == {"skip_tolerance": 0.0}:
        assert reach.shares() == [1, 1, 1]
    else:
        assert min(reach.shares()) < 1


@pytest.mark.parametrize(("causal", "distance"), [(True, 31), (False, 49)])
def test_the_largest_distance(causal, distance):
    """Queries 0 to 31 visit all 50 keys, queries 32 to 49 the last 20."""
    visited = torch.tensor([[[0, 50], [30, 50]]])
    reach = Reach(ReachSettings(1, 50, causal=causal), "native", torch.ones(1), visited, visible=visited[0])
    assert reach.distances() == [distance]


def test_values_and_table():
    visited = torch.tensor([[[0, 32], [20, 50]], [[0, 32], [0, 50]]])
    reach = Reach(ReachSettings(2, 50), "native", torch.tensor([0.5, 0.25]), visited, torch.tensor([[0, 32], [0, 50]]))
    values = reach.to_json()
    assert values["backend"] == "native"
    assert values["length"] == 50
    assert values["attended_share"] == pytest.approx(72 / 82)
    heads = [list(head.values()) for head in values["per_head"]]
    assert heads == [[0, 0.5, pytest.approx(62 / 82), 31], [1, 0.25, 1, 49]]
    assert [line.split() for line in reach.table().splitlines()] == [
        ["head", "slope", "share", "of", "keys", "visited", "largest", "distance"],
        ["0", "0.50000", "75.6%", "31"],
        ["1", "0.25000", "100.0%", "49"],
        ["all", "87.8%"],
    ]


def test_without_kernels(monkeypatch):
    monkeypatch.setattr(backends, "choose", lambda *_: "reference")
    monkeypatch.setattr(backends, "why_not", lambda _, backend, *__: f"{backend} is not there")
    with pytest.raises(RuntimeError, match="kernel"):
        measure_reach(ReachSettings(2, 100))
