"""The command line: help, exit statuses, --json, completion, info."""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from seqwarm_kernels import __version__, cli
from seqwarm_kernels.cli import common
from seqwarm_kernels.ops import backends

COMMANDS = ("info", "check", "plan", "padding", "tune", "demo")


def run(*arguments):
    """The exit status of the command line."""
    try:
        return cli.main([str(argument) for argument in arguments])
    except SystemExit as error:
        return error.code


def subparsers():
    [action] = [each for each in cli.make_parser()._actions if isinstance(each, argparse._SubParsersAction)]
    return action.choices


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_parse_defaults_and_exit_statuses(command, capsys):
    assert run(command, "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: seqwarm {command}")
    assert common.EXIT_STATUS in text
    examples = cli.COMMANDS[command].EXAMPLES
    assert max(map(len, examples.splitlines())) <= 80
    lines = [line for line in examples.replace("\\\n", "").splitlines() if line.startswith("  seqwarm")]
    assert lines
    assert all(cli.make_parser().parse_args(line.split()[1:]).command == command for line in lines)
    for action in subparsers()[command]._actions:
        if action.nargs != 0:  # not a flag
            shown = " ".join(subparsers()[command]._get_formatter()._expand_help(action).split())
            assert "default" in shown or "required" in shown, action.dest


def test_the_main_help(capsys):
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert tuple(subparsers()) == COMMANDS
    assert all(f"\n    {command} " in text for command in COMMANDS)
    assert "--print-completion bash" in text
    assert common.EXIT_STATUS in text


def test_help_and_completion_do_not_import_torch():
    code = """
import sys

sys.modules.update(dict.fromkeys(("torch", "numpy", "matplotlib")))
from seqwarm_kernels import cli

for arguments in (["--help"], ["tune", "--help"], ["demo", "--bad"], ["--print-completion", "bash"]):
    try:
        assert cli.main(arguments) == 0
    except SystemExit as ended:
        assert ended.code == (2 if "--bad" in arguments else 0)
"""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "usage: seqwarm tune" in finished.stdout


def test_the_console_script_and_the_module():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    module, function = project["scripts"]["seqwarm"].split(":")
    assert getattr(importlib.import_module(module), function) is cli.main
    command = [sys.executable, "-m", "seqwarm_kernels", "--version"]
    printed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert printed == f"seqwarm_kernels {__version__}\n"


def test_completion(capsys):
    pytest.importorskip("shtab")
    assert run("--print-completion", "bash") == 0
    script = capsys.readouterr().out
    for word in (*COMMANDS, "min-seq-length", "score-std"):
        assert word in script


def test_completion_needs_shtab(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert run("--print-completion", "bash") == 2
    assert run("--help") == 0
    assert 'pip install "seqwarm_kernels[completion]"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "required"),
        (["plan", "--duration", 0.3], "--duration"),  # a share of the training, as in Composer
        (["plan", "--duration", 10, "--min-seq-length", 2000], "max_seq_length"),
        (["plan", "--duration", 10, "--total", 0], "--total"),
        (["plan", "--duration", 10, "--figure", "plan.jpeg"], "--figure"),
        (["plan", "--duration", 10, "--ranks", 3], "ranks"),
        (["plan", "--duration", 10, "--ranks", 2, "--heads", 5], "--heads"),
        (["plan", "--duration", 10, "--ranks", 2, "--key-heads", 5], "key_heads"),
        (["tune", "--layers", 0], "--layers"),
    ],
)
def test_wrong_usage_is_status_2_with_a_message(capsys, arguments, name):
    assert run(*arguments, *["--json"] if arguments else []) == 2
    printed = capsys.readouterr()
    assert name in printed.err.splitlines()[-1]
    assert printed.out == ""


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ImportError("no package"), 1, "seqwarm info: error: no package\n"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
        (PermissionError(13, "Permission denied", "folder"), 2, "Permission denied: 'folder'"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_exit_statuses(capsys, monkeypatch, error, status, message):
    def fail():
        raise error

    monkeypatch.setattr(cli.info, "collect_info", fail)
    assert run("info") == status
    assert message in capsys.readouterr().err


def test_an_error_of_the_package_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(cli.info, "collect_info", lambda: {}["key"])
    with pytest.raises(KeyError):
        run("info")


def test_json_is_alone_on_stdout(capsys, monkeypatch):
    collect = cli.info.collect_info
    monkeypatch.setattr(cli.info, "collect_info", lambda: print("not JSON") or collect())
    assert run("info", "--json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == collect()
    assert printed.err == "not JSON\n"


def test_info_lists_versions_and_backends(capsys):
    assert run("info") == 0
    text = capsys.readouterr().out
    assert torch.__version__ in text
    for operator in backends.operators():
        assert f"\n{operator}\n" in text
    device_types = ["cpu"] if torch.version.cuda is None and not torch.cuda.device_count() else backends.DEVICE_TYPES
    assert text.count("reference  available") == len(backends.operators()) * len(device_types)
    if backends.problem("native") is None:
        assert f"\nthreads          {torch.get_num_threads()}\n" in text


def test_info_says_why_a_backend_is_not_available(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setitem(backends._problems, "native", "it is not built")
    assert run("info") == 0
    text = capsys.readouterr().out
    assert "none: it is not built" in text
    assert "native     no: it is not built" in text
    assert run("info", "--json") == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["torch"], info["triton"], info["kernels"]) == (torch.__version__, None, None)
    assert info["kernels_problem"] == "it is not built"
    assert "triton" in info["triton_problem"]
    assert len(info["gpus"]) == torch.cuda.device_count()
    for operator, device_types in info["backends"].items():
        for device_type, problems in device_types.items():
            for backend, problem in problems.items():
                assert problem == backends.why_not(operator, backend, device_type)


@pytest.mark.parametrize(
    ("variables", "files", "problem"),
    [
        ({}, [], "gcc or clang is not found"),
        ({"CC": "icc"}, ["gcc", "Python.h"], "icc is not found"),
        ({}, ["gcc"], "Python.h"),
        ({}, ["clang", "Python.h"], None),
    ],
)
def test_info_on_a_gpu_says_what_triton_needs_to_launch(capsys, monkeypatch, tmp_path, variables, files, problem):
    pytest.importorskip("triton")
    for name in files:
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.delenv("CC", raising=False)
    for name, value in {"PATH": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli.info.sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H200")
    for gpus in (0, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert run("info") == 0
        [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("triton ")]
        assert problem in line if problem and gpus else "needs" not in line


@pytest.mark.parametrize(
    ("system", "printed", "name"),
    [
        ("Linux", "Architecture:   aarch64\nModel name:     Neoverse-V2\n  Model:       0\n", "Neoverse-V2"),
        ("Linux", "", platform.processor()),
        ("Darwin", "Apple M2\n", "Apple M2"),
    ],
)
def test_info_names_the_cpu(monkeypatch, system, printed, name):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(cli.info.shutil, "which", lambda command: command if system == "Linux" else None)
    finished = subprocess.CompletedProcess([], 0, stdout=printed)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: finished)
    assert cli.info.cpu_name() == f"{name}, {os.cpu_count()} cores"
