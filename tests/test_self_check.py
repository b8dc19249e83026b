"""seqwarm check: it passes here, and a wrong kernel turns it red."""

import json
from itertools import product

import pytest
import torch

from seqwarm_kernels import cli
from seqwarm_kernels.cli import check
from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.library import overload
from seqwarm_kernels.self_check import calls, run, speed
from seqwarm_kernels.utils.switches import SWITCHES

SMALL = {
    "alibi_attention": {
        "a call": calls.Attention({"window": 4}, lengths=(9, 9), heads=(2, 1), head_dim=8),
        "padded, token-major": calls.Attention(lengths=(9, 9), heads=(2, 1), head_dim=8, token_major=True, masked=True),
    },
    "alibi_attention_varlen": {"a call": calls.PackedAttention(lengths=(5, 4), head_dim=8)},
    "resize_batch": {"a call": calls.CALLS["resize_batch"]["reshape, padded"]},
    "resize_batch_out": {"a call": calls.CALLS["resize_batch_out"]["reshape, padded"]},
    "resize_packed": {"a call": calls.CALLS["resize_packed"]["reshape, padded"]},
    "moment_statistics": {"a call": calls.Moments()},
}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(run, "CALLS", SMALL)
    monkeypatch.setattr(run, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(speed, "SIZES", [(1, 16)])
    monkeypatch.setattr(speed, "_SECONDS", 1e-4)


@pytest.fixture(autouse=True)
def _uninterpreted(monkeypatch):
    monkeypatch.setattr(check, "BACKENDS", ("native", "reference"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def served():
    return [name for name in ("native", "reference") if backends.problem(name) is None]


def test_the_report(small, monkeypatch, capsys):
    assert sorted(calls.CALLS) == backends.operators()
    monkeypatch.setattr(run, "_DTYPES", (torch.float32, torch.bfloat16))
    assert cli.main(["check", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["environment"]["switches"]) == set(SWITCHES)
    assert report["environment"]["cpu"]
    rows = {(row["operator"], row["backend"], row["dtype"]) for row in report["results"]}
    assert rows == set(product(SMALL, served(), ("float32", "bfloat16")))
    assert all(row["mismatches"] == [] and row["worst_share"] <= 1 for row in report["results"])
    assert [len(case["milliseconds"]) for case in report["times"]] == [4, 3, 3]
    assert all(time > 0 for case in report["times"] for time in case["milliseconds"].values())


def wrong(operator):
    """The reference, with one element of the first result changed by a thousandth."""
    right = overload(operator, "reference")

    def computed(*arguments):
        found = right(*arguments)
        changed = arguments[-1] if found is None else found
        last = (changed[0] if isinstance(changed, (tuple, list)) else changed).view(-1)[-1:]
        last.copy_(last + (last * 1e-3 if last.is_floating_point() else 1))
        return found

    return computed


@pytest.mark.skipif(backends.problem("native") is not None, reason="the native kernels do not serve here")
@pytest.mark.parametrize("operators", [SMALL, ("alibi_attention_backward", "alibi_attention_varlen_backward")])
def test_a_wrong_kernel_is_a_mismatch(small, capsys, operators):
    with torch.library._scoped_library("seqwarm", "IMPL") as library:
        for operator in operators:
            library.impl(f"{operator}.native", wrong(operator), "CPU", allow_override=True)
        assert cli.main(["check"]) == 1
    text, changed = capsys.readouterr().out, {operator.removesuffix("_backward") for operator in operators}
    found = {tuple(line.split()[:3]) for line in text.splitlines() if "MISMATCH" in line}
    assert found == {(operator, "cpu", "native") for operator in changed}
    assert all(f"\n  {operator} cpu native float32, a call: " in text for operator in changed)


@pytest.mark.skipif(backends.problem("native") is not None, reason="the native kernels do not serve here")
def test_an_error_is_a_mismatch(small, capsys):
    def fail(*arguments):
        raise RuntimeError("no kernel image")

    with torch.library._scoped_library("seqwarm", "IMPL") as library:
        library.impl("resize_batch.native", fail, "CPU", allow_override=True)
        assert cli.main(["check"]) == 1
    text = capsys.readouterr().out
    assert "  resize_batch cpu native float32, a call: RuntimeError: no kernel image" in text
    assert "1 mismatches" in text


def test_backends_that_should_serve_and_do_not(small, monkeypatch, capsys):
    monkeypatch.setattr(backends, "is_supported_platform", lambda: True)
    monkeypatch.setitem(backends._problems, "native", "the kernels are not built")
    assert cli.main(["check", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["missing"] == {"native": "the kernels are not built"}
    assert {row["backend"] for row in report["results"]} == {"reference"}
    assert report["times"] == []
    assert cli.main(["check", "--backends", "native"]) == 1
    assert "\nnative is missing: the kernels are not built" in capsys.readouterr().out
    monkeypatch.setattr(backends, "is_supported_platform", lambda: False)
    assert cli.main(["check"]) == 0


def test_triton_should_serve_on_gpus(monkeypatch):
    monkeypatch.setattr(backends, "is_supported_platform", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(backends._problems, "triton", "triton is not installed")
    assert run.missing_backends(["reference", "triton"]) == {"triton": "triton is not installed"}


@pytest.mark.slow
def test_every_call_is_within_its_budget():
    assert [row for row in run.check_backends(served()) if row.mismatches] == []
