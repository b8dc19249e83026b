"""Switches by environment variables: what is read, and what a choice changes."""

import importlib.util

import pytest

from seqwarm_kernels import cli
from seqwarm_kernels.utils.switches import SWITCHES, switch


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


@pytest.mark.parametrize("choice", "10")
def test_bulk_copies(monkeypatch, choice):
    """The switch is read when a module is imported: here once more."""
    monkeypatch.setenv("SEQWARM_BULK_COPIES", choice)
    spec = importlib.util.find_spec("seqwarm_kernels.ops.alibi_attention.triton_configurations")
    configurations = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(configurations)
    assert configurations.Chip(90).copies_in_bulk is (choice == "1")
