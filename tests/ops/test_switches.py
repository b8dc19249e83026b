"""Switches by environment variables: what is read, and what a choice changes."""

import pytest

from seqwarm_kernels import cli
from seqwarm_kernels.utils.switches import SWITCHES, switch
from tests.support.kernels import pretended


@pytest.mark.parametrize("name", SWITCHES)
def test_choices(monkeypatch, capsys, name):
    monkeypatch.delenv(name, raising=False)
    assert switch(name) == "1"
    monkeypatch.setenv(name, "")
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


@pytest.mark.slow
@pytest.mark.parametrize("choice", "10")
def test_attention_compiles_without_bulk_copies(choice):
    pytest.importorskip("triton", reason="triton is not installed")
    assert any(pretended("bulk_copies", 90, SEQWARM_BULK_COPIES=choice)) == (choice == "1")
