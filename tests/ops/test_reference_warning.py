"""Without native kernels, the first call that they would serve warns, and only that one."""

import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import seqwarm_kernels
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


#: A module that the copied package lacks would else be found in an editable installation.
SCRIPT = """
import sys, torch
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in str(finder)]
from seqwarm_kernels import alibi_attention
alibi_attention(*[torch.zeros(1, 2, 4, 8)] * 3)
"""


@pytest.mark.slow
@pytest.mark.skipif(not backends.is_supported_platform(), reason="there are no kernels for this platform")
def test_a_package_without_kernels(tmp_path):
    package = Path(seqwarm_kernels.__file__).parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert f"{script}:5: UserWarning: {MESSAGE.replace('they', 'the kernels')}" in run.stderr
