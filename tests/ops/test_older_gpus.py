"""The module's CUDA kernels do not serve GPUs older than what they are compiled for. On a pretended GPU."""

from types import SimpleNamespace

import pytest
import torch

from seqwarm_kernels.ops import backends

REASON = "the module for this torch is compiled for compute capability 7.5 and newer, Tesla V100 has 7.0"


@pytest.fixture
def start_cuda(monkeypatch):
    """Loads a module compiled for 7.5, and starts CUDA with GPUs of the given capabilities."""
    queued = []
    info = {"torch": torch.__version__, "oldest_cuda_capability": 75}
    loaded = SimpleNamespace(build_info=lambda: info)
    monkeypatch.setattr(torch.cuda, "_lazy_call", queued.append)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: True)
    monkeypatch.setattr(backends, "_problems", {})
    monkeypatch.setattr(backends, "_gpu_problems", {})
    monkeypatch.setattr(backends, "_serving", {})
    monkeypatch.setattr(backends, "module", loaded)
    backends._watch_for_older_gpus()
    for operator in backends.operators():
        backends._find_serving(operator)
    assert backends.choose("resize_batch", "cuda", None) == "native"  # CUDA has not started

    def start(*capabilities):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ("Tesla V100", "Tesla T4", "H100")[index])
        (call,) = queued
        call()

    return start


@pytest.mark.parametrize("operator", ["resize_batch", "resize_batch_out"])
def test_an_older_gpu_is_served_by_triton(start_cuda, operator):
    start_cuda((7, 0), (9, 0))
    assert backends.why_not(operator, "native", "cuda") == REASON
    assert backends.why_not(operator, "native", "cpu") is None
    assert backends.choose(operator, "cuda", None) == "triton"
    assert backends.choose(operator, "cpu", None) == "native"
    with pytest.raises(ValueError, match=REASON):
        backends.choose(operator, "cuda", "native")


def test_the_oldest_gpu_and_newer_ones_are_served(start_cuda):
    start_cuda((7, 5), (8, 0), (12, 0))
    assert backends.why_not("resize_batch", "native", "cuda") is None
    assert backends.choose("resize_batch", "cuda", None) == "native"
