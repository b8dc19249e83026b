"""On a pretended MPS, which has no float64, results are those of the CPU."""

import pytest
import torch

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, alibi_slopes, apply_alibi
from seqwarm_kernels.attention.attended_share import attended_share
from seqwarm_kernels.diagnostics.moments import raw_statistics
from seqwarm_kernels.models.families.native_alibi import falcon_slopes
from seqwarm_kernels.parallel.balance import rank_work

from .support.pretend_mps import MPS, pretended_mps


@pytest.fixture(autouse=True)
def mps():
    with pretended_mps(), torch.no_grad():
        yield


@pytest.mark.parametrize("heads", [1, 6, 8])
def test_slopes(heads):
    slopes = alibi_slopes(heads, device=MPS)
    assert slopes.device == MPS
    assert torch.equal(slopes.cpu(), alibi_slopes(heads))
    with MPS:
        assert alibi_slopes(heads).device == MPS
        assert falcon_slopes(heads, 64)[-1] > 0


def test_attention():
    tensors = torch.randn(3, 1, 4, 9, 8).unbind()
    out = alibi_attention(*[tensor.to(MPS) for tensor in tensors])
    assert torch.equal(out.cpu(), alibi_attention(*tensors, backend="reference"))
    packed = [tensor[0].transpose(0, 1) for tensor in tensors]
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    out = alibi_attention_varlen(*[tensor.to(MPS) for tensor in (*packed, ends, ends)], 5, 5)
    assert torch.equal(out.cpu(), alibi_attention_varlen(*packed, ends, ends, 5, 5, backend="reference"))


def test_the_share_of_keys():
    tensors = torch.randn(3, 1, 4, 9, 8).to(MPS).unbind()
    share = attended_share(*tensors)
    assert share.tolist() == [[1.0] * 4]
    assert rank_work(share.float().to(MPS), 2).shares == (1.0, 1.0)


def test_moments():
    with MPS:
        model = torch.nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2)
    numbers, _ = raw_statistics(torch.optim.SGD(model.parameters(), lr=0.1))
    assert numbers.tolist()[-1] == 4 * 8


def test_apply_alibi_verifies():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=32)
    with MPS:
        model = transformers.GPT2LMHeadModel(config)
    report = apply_alibi(model, 64)
    assert report.verification.calls == 2
    assert report.verification.largest_error < 1e-5
