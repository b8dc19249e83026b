import math
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from seqwarm_kernels import alibi_attention, alibi_bias, alibi_slopes
from seqwarm_kernels.attention import slopes as slopes_module
from seqwarm_kernels.attention.slopes import default_slopes


def slopes_of_the_paper(num_heads):
    """The code in the appendix of Press et al."""

    def power_of_two(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(num_heads).is_integer():
        return power_of_two(num_heads)
    closest = 2 ** math.floor(math.log2(num_heads))
    return power_of_two(closest) + slopes_of_the_paper(2 * closest)[0::2][: num_heads - closest]


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 8, 12, 16, 71, 128])
def test_slopes_are_those_of_the_paper(num_heads):
    slopes = alibi_slopes(num_heads)
    assert slopes.dtype == torch.float32
    torch.testing.assert_close(slopes, torch.tensor(slopes_of_the_paper(num_heads)), rtol=1e-6, atol=0)
    if num_heads == 8:
        assert slopes.tolist() == [2.0**-i for i in range(1, 9)]


def test_slopes_are_made_on_their_device():
    assert alibi_slopes(3, device="meta").device == torch.device("meta")


@pytest.mark.parametrize(("error", "num_heads"), [(ValueError, 0), (TypeError, 2.0)])
def test_num_heads_is_an_int_of_at_least_1(error, num_heads):
    with pytest.raises(error, match="num_heads"):
        alibi_slopes(num_heads)


@pytest.mark.parametrize(
    ("query_length", "key_length", "query_start"), [(3, 5, None), (4, 4, 0), (2, 6, -3), (2, 3, 9)]
)
def test_bias(query_length, key_length, query_start):
    slopes = alibi_slopes(3)
    start = key_length - query_length if query_start is None else query_start
    both = alibi_bias(slopes, query_length, key_length, causal=False, query_start=query_start)
    causal = alibi_bias(slopes, query_length, key_length, query_start=query_start)
    assert both.shape == causal.shape == (3, query_length, key_length)
    for h in range(3):
        for i in range(query_length):
            for j in range(key_length):
                penalty = -slopes[h].item() * abs(start + i - j)
                assert both[h, i, j].item() == pytest.approx(penalty)
                assert causal[h, i, j].item() == (pytest.approx(penalty) if j <= start + i else float("-inf"))


def test_bias_takes_slopes_for_each_row():
    slopes = torch.rand(2, 3, dtype=torch.float64)
    bias = alibi_bias(slopes, 4, 5)
    assert bias.shape == (2, 3, 4, 5)
    torch.testing.assert_close(bias[1], alibi_bias(slopes[1], 4, 5), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("error", "name", "change"),
    [
        (TypeError, "slopes", {"slopes": torch.tensor([1])}),
        (TypeError, "slopes", {"slopes": torch.rand(2).to_sparse()}),
        (ValueError, "slopes", {"slopes": torch.tensor(0.5)}),
        (TypeError, "causal", {"causal": 1}),
        (ValueError, "query_length", {"query_length": -1}),
        (TypeError, "key_length", {"key_length": 2.5}),
        (TypeError, "query_start", {"query_start": 0.5}),
    ],
)
def test_bad_arguments_of_bias(error, name, change):
    with pytest.raises(error, match=f"^{name} "):
        alibi_bias(**{"slopes": alibi_slopes(2), "query_length": 1, "key_length": 2} | change)


def test_default_slopes_of_a_gpu_are_shared_by_streams_and_graphs(monkeypatch):
    """They are computed once and waited for, but not kept if a graph is captured, which owns its memory."""
    device, capturing, waits = torch.device("cuda:0"), [True], []
    stream = SimpleNamespace(synchronize=lambda: waits.append(1))
    monkeypatch.setattr(slopes_module, "alibi_slopes", lambda num_heads, device: torch.ones(num_heads))
    monkeypatch.setattr(slopes_module, "is_capturing", lambda device: capturing[0])
    monkeypatch.setattr(slopes_module, "_computed", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    of_graph = default_slopes(4, device)
    assert default_slopes(4, device) is not of_graph
    capturing[0] = False
    kept = default_slopes(4, device)
    assert waits == [1]
    capturing[0] = True
    assert default_slopes(4, device) is kept
    assert waits == [1]


def test_default_slopes_of_another_context_are_not_kept():
    """Fake tensors, and tensors made in inference mode, do not reach later calls."""
    device = torch.device("cpu")
    slopes_module._computed.clear()
    with FakeTensorMode():
        assert isinstance(default_slopes(6, device), FakeTensor)
    with torch.inference_mode():
        assert not default_slopes(6, device).is_inference()
    query = torch.randn(1, 6, 5, 4, requires_grad=True)
    alibi_attention(query, query, query).sum().backward()
    assert query.grad is not None
