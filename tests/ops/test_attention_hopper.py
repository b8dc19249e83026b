"""The Gluon kernels on a Hopper GPU, compared with the reference. test_attention_gluon.py needs no GPU."""

from dataclasses import replace

import pytest
import torch

from seqwarm_kernels import alibi_attention
from seqwarm_kernels.self_check.calls import Attention

pytestmark = pytest.mark.gpu

SLOPES = (0.0, 1e-6, -0.01, 4.0, 300.0, 1e4)
CALLS = {
    "grouped heads": Attention({}, (600, 600), (4, 2)),
    "1 block": Attention({}, (1, 70), (2, 2)),
    "token-major": Attention({}, (1000, 1000), (8, 2), token_major=True),
    "full": Attention({"causal": False}, (1000, 1000), (4, 2)),
    "more keys": Attention({}, (513, 800), (2, 2)),
    "fewer keys": Attention({}, (800, 513), (2, 2)),
    "window": Attention({"window": 50}, (700, 700), (2, 1)),
    "odd segments": Attention({"segment_length": 100}, (1000, 1000), (2, 1)),
    "full, segments": Attention({"segment_length": 300, "causal": False}, (900, 900), (2, 1)),
    "query_start": Attention({"query_start": 30}, (600, 700), (2, 1)),
    "far query_start": Attention({"query_start": 3000}, (600, 700), (2, 1)),
    "large scores": Attention({"scale": 30.0}, (600, 600), (2, 1)),
    "skipping": Attention({}, (2048, 2048), (4, 4)),
    "full, skipping": Attention({"causal": False}, (2048, 2048), (4, 4)),
    "steep slopes": Attention({}, (700, 700), (6, 6), slopes=SLOPES),
    "full, steep slopes": Attention({"causal": False}, (700, 700), (6, 6), slopes=SLOPES),
}
CASES = {
    f"{name}, {head_dim}": replace(call, head_dim=head_dim) for name, call in CALLS.items() for head_dim in (64, 128)
}
#: Calls that Gluon kernels do not serve in both passes: no query sees the last keys, or the key at its own position.
NOT_BOTH = {"query_start": [], "far query_start": ["GluonForward"], "fewer keys": ["GluonForward"]}
CASES |= {f"head_dim {head_dim}": Attention({}, (600, 600), (4, 2), head_dim) for head_dim in (40, 72, 96)}


@pytest.fixture(autouse=True)
def gluon(monkeypatch):
    """The host side of the Gluon kernels, which serve calls of every length here."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the Gluon kernels are for Hopper GPUs")
    from seqwarm_kernels.ops.alibi_attention import gluon, triton, triton_configurations

    for head_dim, tiles in triton_configurations._GLUON.items():
        everywhere = tiles._replace(forward_from=1, skipping_from=1, backward_from=1)
        monkeypatch.setitem(triton_configurations._GLUON, head_dim, everywhere)
    monkeypatch.setattr(triton, "_known", type(triton._known)())
    return gluon


@pytest.mark.parametrize("name", CASES)
def test_results(gluon, monkeypatch, name):
    taken = []
    for kernel in ("GluonForward", "GluonBackward"):
        call = getattr(gluon, kernel).__call__

        def noting(*arguments, kernel=kernel, call=call):
            taken.append(kernel)
            return call(*arguments)

        monkeypatch.setattr(getattr(gluon, kernel), "__call__", noting)
    check(CASES[name], torch.bfloat16)
    assert taken == NOT_BOTH.get(name.rpartition(",")[0], ["GluonForward", "GluonBackward"])


def check(call, dtype):
    assert not [str(found) for found in call.compare("triton", "cuda", dtype) if not found.within()]


@pytest.mark.parametrize("causal", [True, False])
def test_float16(causal):
    check(Attention({"causal": causal}, (600, 600), (4, 2)), torch.float16)


def test_the_same_inputs_give_the_same_bits():
    """Programs draw blocks from a counter, in another order each time."""
    inputs = [torch.randn(2, 8, 1500, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]

    def results():
        out = alibi_attention(*inputs, backend="triton")
        return out, *torch.autograd.grad(out.float().square().sum(), inputs)

    first = results()
    for _ in range(5):
        assert all(map(torch.equal, first, results()))
