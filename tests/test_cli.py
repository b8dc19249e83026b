import json
import subprocess
import sys

import pytest
import torch

from seqwarm_kernels import cli
from seqwarm_kernels.ops import backends


def test_info_lists_versions_and_backends(capsys):
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text
    for operator in backends.operators():
        assert f"\n{operator}\n" in text
    assert text.count("reference  available") == len(backends.operators()) * len(backends.DEVICE_TYPES)


def test_info_as_json_says_why_a_backend_is_not_available(capsys):
    assert cli.main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["torch"] == torch.__version__
    assert (info["extension"] is None) == (info["extension_problem"] is not None)
    assert (info["triton"] is None) == (info["triton_problem"] is not None)
    assert len(info["gpus"]) == torch.cuda.device_count()
    for operator, device_types in info["backends"].items():
        for device_type, problems in device_types.items():
            for backend, problem in problems.items():
                assert problem == backends.why_not(operator, backend, device_type)


def test_info_without_the_extension(capsys, monkeypatch):
    monkeypatch.setitem(backends._problems, "native", "it is not built")
    assert cli.main(["info"]) == 0
    text = capsys.readouterr().out
    assert "none: it is not built" in text
    assert "native     no: it is not built" in text


def test_info_without_triton(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert cli.main(["info", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["triton"] is None
    assert "triton" in info["triton_problem"]


def test_info_as_a_module():
    finished = subprocess.run(
        [sys.executable, "-m", "seqwarm_kernels", "info"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    assert "resize_batch" in finished.stdout


def test_demo_is_a_subcommand(capsys):
    with pytest.raises(SystemExit) as exit_status:
        cli.main(["demo", "--help"])
    assert exit_status.value.code == 0
    assert "usage: python -m seqwarm_kernels demo" in capsys.readouterr().out


def test_a_subcommand_is_needed(capsys):
    with pytest.raises(SystemExit) as exit_status:
        cli.main([])
    assert exit_status.value.code == 2
    assert "{info,plan,padding,tune,demo}" in capsys.readouterr().err
