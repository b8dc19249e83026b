"""Switches by environment variables: what is read, and what a choice changes."""

import json
import os
import subprocess
import sys

import pytest
import torch

from seqwarm_kernels import alibi_attention, cli
from seqwarm_kernels.ops import backends
from seqwarm_kernels.utils.switches import SWITCHES, switch


@pytest.mark.parametrize("name", SWITCHES)
def test_choices(monkeypatch, capsys, name):
    monkeypatch.delenv(name, raising=False)
    assert switch(name) == "1"
    for choice in "01":
        monkeypatch.setenv(name, choice)
        assert switch(name) == choice
        assert cli.main(["info"]) == 0
        assert f"\n{name} {choice} (" in capsys.readouterr().out
    monkeypatch.setenv(name, "off")
    with pytest.raises(ValueError, match=rf"{name} must be 1 or 0, got 'off'"):
        switch(name)
    assert cli.main(["info"]) == 2
    assert f"seqwarm info: error: {name} must be" in capsys.readouterr().err


@pytest.mark.parametrize("name", SWITCHES)
def test_an_empty_variable_is_the_default(monkeypatch, name):
    monkeypatch.setenv(name, "")
    assert switch(name) == "1"


def _triton_serves():
    return backends.why_not("alibi_attention", "triton", "cpu", torch.float16) is None


@pytest.mark.skipif(not _triton_serves(), reason="Triton's interpreter is not available")
def test_attention_without_bulk_copies_in_the_interpreter(monkeypatch):
    from seqwarm_kernels.ops.alibi_attention import triton as attention
    from seqwarm_kernels.ops.alibi_attention import triton_configurations

    tensors = [torch.randn(1, 1, 20, 16, dtype=torch.float16) for _ in range(3)]
    found, access = [], []
    for chips in (range(90, 120), range(90, 90)):
        monkeypatch.setattr(triton_configurations, "BULK_COPIES", chips)
        access.append(attention._access(*tensors[:2], None))
        found.append(alibi_attention(*tensors, backend="triton"))
    assert access == [attention.BULK.value, attention.ALIGNED.value]
    assert torch.equal(*found)


_COMPILE = """
import json
from tests.support import pretend_gpu

launched = []
pretend_gpu.pretend(90, launched)
pretend_gpu.forward_and_backward(1, 128)
print(json.dumps([kernel.asm["ptx"].count("cp.async.bulk.tensor") for kernel in launched]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("choice", "10")
def test_attention_compiles_without_bulk_copies(choice):
    pytest.importorskip("triton", reason="triton is not installed")
    environment = os.environ | {"SEQWARM_BULK_COPIES": choice}
    run = subprocess.run([sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert any(json.loads(run.stdout)) == (choice == "1")
