"""Without native kernels, the first call that they would serve warns, and only that one."""

import warnings

import pytest
import torch

from seqwarm_kernels import alibi_attention, resize_batch
from seqwarm_kernels.attention import fast_path
from seqwarm_kernels.ops import backends

MESSAGE = "alibi_attention runs in plain PyTorch, many times slower than native kernels: they are not built"


@pytest.fixture
def without_kernels(monkeypatch):
    """The package as imported where the native kernels are not built."""
    monkeypatch.setattr(backends, "is_supported_platform", lambda: True)
    monkeypatch.setitem(backends._problems, "native", "they are not built")
    monkeypatch.setattr(backends, "_serving", dict.fromkeys(backends._serving, ()))
    monkeypatch.setattr(backends, "_has_warned", False)
    fast_path._checked_calls.clear()
    yield
    fast_path._checked_calls.clear()


def caught_of(function, *arguments):
    """What is warned of kernels, and where."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            function(*arguments)
    return [(str(each.message), each.filename) for each in caught if "native kernels" in str(each.message)]


def test_one_warning(without_kernels):
    tensors = [torch.zeros(1, 2, 4, 8)] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alibi_attention(*tensors, backend="reference")
        alibi_attention(*[tensor.double() for tensor in tensors])  # which has no kernel anyway
        alibi_attention(*[tensor.to("meta") for tensor in tensors])
    assert caught_of(alibi_attention, *tensors) == [(MESSAGE, __file__)]
    assert caught_of(resize_batch, {"input_ids": torch.zeros(2, 8, dtype=torch.long)}, 4) == []


def test_a_compiled_call_warns(without_kernels):
    attend = torch.compile(alibi_attention, backend="eager", fullgraph=True)
    assert caught_of(attend, *torch.randn(3, 1, 2, 4, 8).unbind()) == [(MESSAGE, __file__)]


def test_no_warning_where_there_are_no_kernels(without_kernels, monkeypatch):
    monkeypatch.setattr(backends, "is_supported_platform", lambda: False)
    assert caught_of(alibi_attention, *[torch.zeros(1, 2, 4, 8)] * 3) == []
