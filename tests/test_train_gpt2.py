"""examples/train_gpt2: settings, model and training. A killed and resumed run ends on the same bits."""

import itertools
import json
import os
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import seqwarm_kernels as sw

pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from experiments.running import ROOT, SCRIPT, load_script

from .support import ranks

pytestmark = pytest.mark.xdist_group("train_gpt2")  # one worker loads the script and trains what tests share
TEXT = Path(json.__file__).parent  # source, and compiled files that must be skipped
TIMES = ("seconds", "tokens_per_second", "peak_memory_bytes")

script = load_script()
script.model.SIZES["toy"].update(layers=2, width=32)  # a third of the time


def flags(out, cache, **changed):
    settings = {"size": "toy", "text": TEXT, "vocab_size": 400, "seq_length": 64, "min_seq_length": 16, "step_size": 16,
                "batch_size": 4, "total_tokens": 3000, "validate_every": 0.25, "validation_tokens": 512,
                "lr_warmup_steps": 5, "monitor_every": 4, "device": "cpu", "out": out, "cache": cache,
                **changed}  # fmt: skip
    arguments = []
    for name, value in settings.items():
        if value is not None:
            values = value if isinstance(value, list) else [value]
            arguments += ["--" + name.replace("_", "-"), *map(str, values)]
    return arguments


def train(out, cache, *extra, **changed):
    return script.train.main([*flags(out, cache, **changed), *extra])


BOTH_LENGTHS = {"validation_lengths": [64, 128]}
SHORT = {"total_tokens": 2000, "validate_every": 0}
CONSTANT_AND_SCALED = ["--mode", "flatten", "--scale-learning-rate"]
SHORT_AND_FULL = {**BOTH_LENGTHS, "step_size": 48, "warmup_duration": 0.6}  # 16 and 64 tokens: two ranks have all rows
#: Ways in which two ranks train together. The first two have rows of their own, in two micro-batches.
REPLICAS = ("ddp", "fsdp2")
KINDS = {
    **{kind: {"parallel": kind, "micro_batch_size": 1} for kind in REPLICAS},
    "heads": {"tensor_parallel": 2},
    "context": {"context_parallel": 2, "micro_batch_size": 1},
}
COUNTS = ("step", "tokens", "seq_length")


def without_times(records):
    """The entries that must be the same in every run."""
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def lines(path):
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) for line in path.open()]


def config_of(**changed):
    return script.model.Config(**{**script.model.SIZES["toy"], "text": [str(TEXT)], "entries": 400, **changed})


def assert_same_run(one, other):
    for name in ("config.json", "tokenizer.json", "monitor.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    assert without_times(lines(one / "records.jsonl")) == without_times(lines(other / "records.jsonl"))
    weights, others = (torch.load(folder / "model.pt", weights_only=True) for folder in (one, other))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    """An uninterrupted run and its records."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    return out, train(out, cache, **BOTH_LENGTHS)


def test_a_run_learns_and_records_it(finished):
    out, records = finished
    assert lines(out / "records.jsonl") == records
    assert [record["seq_length"] for record in records] == sorted(record["seq_length"] for record in records)
    assert records[-1]["seq_length"] == 64
    assert [record["tokens"] // 750 for record in records] == [1, 2, 3, 4]
    assert records[-1]["validation_loss"]["64"] < records[0]["validation_loss"]["64"] - 0.05
    assert set(records[0]["validation_loss"]) == {"64", "128"}
    assert not any(record["diverged"] for record in records)
    assert all(record["peak_memory_bytes"] > 1e6 and record["tokens_per_second"] > 0 for record in records)
    assert np.isclose(records[0]["tokens_per_second"], records[0]["tokens"] / records[0]["seconds"])
    steps = lines(out / "monitor.jsonl")
    assert [step["step"] for step in steps] == list(range(1, records[-1]["step"] + 1))
    assert steps[0]["seq_length"] == 16
    assert all(step["variance_max"] > 0 and step["grad_norm"] > 0 for step in steps)


def test_a_loaded_run_gives_the_last_validation_loss(finished, cache):
    out, records = finished
    model, tokenizer, config = script.train.load_run(out)
    tokens = torch.from_numpy(np.load(cache / config.tokens / "validation.npy").astype(np.int64))
    for length in (64, 128):
        inputs, labels = tokens[:512].view(-1, length), tokens[1:513].view(-1, length)
        with torch.no_grad():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).item()
        assert loss == pytest.approx(records[-1]["validation_loss"][str(length)], rel=1e-5)
    assert tokenizer.decode(tokenizer.encode("await self._loop  # ∞").ids) == "await self._loop  # ∞"


def test_resuming_a_finished_run_trains_no_further(finished, cache, monkeypatch):
    monkeypatch.setattr(script.train.Run, "train_step", lambda run: pytest.fail("trained"))
    assert train(finished[0], cache, "--resume", **BOTH_LENGTHS) == finished[1]


class Interrupted(Exception):
    """What the tests raise in place of a kill."""


def train_interrupted(target, name, call, *arguments, **changed):
    """Train until this call of the function, which raises before it does anything, and resume."""
    original, calls = getattr(target, name), itertools.count(1)

    def interrupted(*positional, **named):
        if next(calls) == call:
            raise Interrupted
        return original(*positional, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, interrupted)
        with pytest.raises(Interrupted):
            train(*arguments, "--resume", **changed)
    return train(*arguments, "--resume", **changed)


@pytest.mark.parametrize(
    ("target", "name", "call"),
    [(script.train.Run, "train_step", 15), (os, "replace", 6), (script.train.Run, "export", 1)],
)
def test_interrupted_anywhere_it_ends_on_the_same_bits(tmp_path, finished, cache, target, name, call):
    train_interrupted(target, name, call, tmp_path, cache, **BOTH_LENGTHS)
    assert_same_run(finished[0], tmp_path)
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
def test_two_ranks_train_as_one_and_resume(tmp_path, finished, cache):
    ranks.run_ranks(one_of_two, tmp_path, cache)
    train(tmp_path / "constant", cache, *CONSTANT_AND_SCALED, **SHORT_AND_FULL)
    for kind in KINDS:
        whole = tmp_path / kind
        for one, two in zip(finished[1], lines(whole / "records.jsonl"), strict=True):
            assert [one[name] for name in COUNTS] == [two[name] for name in COUNTS]
            assert one["train_loss"] == pytest.approx(two["train_loss"], rel=1e-4)
            assert one["validation_loss"] == pytest.approx(two["validation_loss"], rel=1e-4)
        if kind in REPLICAS:
            assert_same_run(whole, tmp_path / f"{kind}-interrupted")
            assert_first_step_is_of_all_labels(tmp_path / f"{kind}-masked", cache)
        if kind != "context":
            trained, alone = (script.train.load_run(folder)[0].state_dict() for folder in (whole, finished[0]))
            torch.testing.assert_close(trained, alone, rtol=1e-2, atol=1e-3)
    of_ranks, alone = (lines(tmp_path / name / "monitor.jsonl") for name in ("ddp-constant", "constant"))
    for one, two in zip(alone, of_ranks, strict=True):
        assert (one["seq_length"], one["learning_rate"]) == (two["seq_length"], two["learning_rate"])
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-3)


def assert_first_step_is_of_all_labels(folder, cache):
    """The labels of both ranks, whose numbers differ."""
    config = script.model.read_config(folder)
    parts = [script.text.Batches(config, cache / config.tokens, rank, 2).draw(0) for rank in range(2)]
    batch = sw.resize_batch({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, 16)
    first, second = (batch["labels"] != -100).view(2, -1).sum(1)
    assert first != second
    model = script.model.build_model(config)
    loss = script.model.loss_sum(model(batch["input_ids"]), batch) / (first + second)
    loss.backward()
    step = lines(folder / "monitor.jsonl")[0]
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-5)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert step["grad_norm"] == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-4)


def one_of_two(rank, port, folder, cache):
    """Whole runs, runs killed after the second checkpoint, and short ones."""
    ranks.set_environment(rank, port)
    ranks.join_group(rank, port)
    for kind, options in KINDS.items():
        settings = {**BOTH_LENGTHS, **options}
        train(folder / kind, cache, **settings)
        if kind == "ddp":
            train(folder / "ddp-constant", cache, *CONSTANT_AND_SCALED, **{**settings, **SHORT_AND_FULL})
        if kind in REPLICAS:
            train_interrupted(script.train.Run, "train_step", 15, folder / f"{kind}-interrupted", cache, **settings)
            train(folder / f"{kind}-masked", cache, **{**settings, "objective": "masked", "total_tokens": 64})
    ranks.leave_group()


def test_train_loss_is_the_mean_over_all_labels(tmp_path, cache):
    (record,) = train(tmp_path, cache, objective="masked", total_tokens=2000, validate_every=0)
    config = script.model.read_config(tmp_path)
    made = script.text.Batches(config, cache / config.tokens, 0, 1)
    steps = lines(tmp_path / "monitor.jsonl")
    drawn = [made.draw(at)["labels"][:, : int(step["seq_length"])] for at, step in enumerate(steps)]
    labels = [(tensor != -100).sum().item() for tensor in drawn]
    losses = [step["loss"] * count for step, count in zip(steps, labels, strict=True)]
    assert record["train_loss"] == pytest.approx(sum(losses) / sum(labels), rel=1e-6)


@pytest.mark.parametrize(
    ("mode", "extra", "missing"),
    [("flatten", ["--scale-learning-rate"], {48: 16}), ("segments", [], {})],
)
def test_constant_tokens(tmp_path, cache, monkeypatch, mode, extra, missing):
    """Each step has the tokens of one at full length, less than a row missing. The loss is that of the cut stream.

    Memory is claimed for the shapes that train. The learning rate can follow the square root of the rows.
    """
    steps, original, block = [], script.train.Run.train_step, script.model.Block.forward
    shapes = [set()]  # before the first step, of a step, after it, of the next step, ...

    def train_step(run):
        before = run.step, run.tokens
        shapes.append(set())
        loss, labels, tokens = original(run)
        shapes.append(set())
        steps.append((*before, run.seq_length, int(labels), tokens))
        return loss, labels, tokens

    def forward(self, hidden, **limits):
        shapes[-1].add(hidden.shape[:2])
        return block(self, hidden, **limits)

    monkeypatch.setattr(script.train.Run, "train_step", train_step)
    monkeypatch.setattr(script.model.Block, "forward", forward)
    train(tmp_path, cache, *extra, mode=mode, micro_batch_size=3, warmup_duration=0.8, **SHORT)
    assert shapes[0] == set().union(*shapes[1::2])
    config = script.model.read_config(tmp_path)
    assert {length for _, _, length, _, _ in steps} == {16, 32, 48, 64}
    for (step, before, length, labels, tokens), found in zip(steps, lines(tmp_path / "monitor.jsonl"), strict=True):
        assert labels == tokens == 4 * 64 - missing.get(length, 0)
        factor = (4 * 64 // length / 4) ** 0.5 if extra else 1
        assert found["learning_rate"] == pytest.approx(factor * script.train.learning_rate(step, before, config))
    drawn = script.text.Batches(config, cache / config.tokens, 0, 1)
    with torch.no_grad():
        logits = script.model.build_model(config)(drawn.draw(0)["input_ids"].view(16, 16))
    first = lines(tmp_path / "monitor.jsonl")[0]["loss"]
    assert first == pytest.approx(F.cross_entropy(logits.flatten(0, 1), drawn.draw(0)["labels"].flatten()).item())


def test_own_attention(tmp_path, cache):
    seen = set()

    def attention(query, key, value, slopes, *, causal):
        seen.add((causal, query.shape[2]))
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        return torch.softmax(scores + sw.alibi_bias(slopes, *scores.shape[-2:], causal=causal), dim=-1) @ value

    settings = {**BOTH_LENGTHS, **SHORT, "total_tokens": 64}
    (record,) = script.train.main(flags(tmp_path / "own", cache, **settings), attention=attention)
    assert seen == {(True, length) for length in (16, 32, 48, 64, 128)}
    (other,) = train(tmp_path / "ours", cache, **settings)
    assert record["validation_loss"] == pytest.approx(other["validation_loss"], rel=1e-3)


def status_of(monkeypatch, *arguments):
    """Exit status of the script, which imports the loaded siblings."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    for name in ("model", "text"):
        monkeypatch.setitem(sys.modules, name, getattr(script, name))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return ended.value.code


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, cache, monkeypatch, capsys):
    """It keeps its last checkpoint, and is not continued."""
    batches, original, steps = script.text.Batches.draw, script.model.loss_sum, [0]
    monkeypatch.setattr(script.text.Batches, "draw", lambda made, step: steps.append(step) or batches(made, step))
    monkeypatch.setattr(
        script.model, "loss_sum", lambda *given: original(*given) * (torch.nan if max(steps) >= 8 else 1)
    )
    arguments = flags(tmp_path, cache, total_tokens=1600)
    assert status_of(monkeypatch, *arguments) == script.train.DIVERGED
    *before, last = lines(tmp_path / "records.jsonl")
    assert (last["diverged"], last["train_loss"]) == (True, None)
    assert [record["diverged"] for record in before] == [False] * len(before)
    assert torch.load(tmp_path / "checkpoint.pt")["counts"][0] == before[-1]["step"]
    assert not (tmp_path / "model.pt").exists()
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert status_of(monkeypatch, *arguments, "--resume") == script.train.DIVERGED
    capsys.readouterr()
    assert status_of(monkeypatch, *arguments) == script.train.REFUSED
    assert capsys.readouterr().err.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


def test_the_parameters_of_a_size():
    with torch.device("meta"):
        model = script.model.build_model(script.model.Config(**{**script.model.SIZES["125m"], "entries": 50_257}))
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == 124


def test_learning_rate_rises_by_steps_and_falls_by_tokens():
    config = config_of(learning_rate=2.0, lr_warmup_steps=4, total_tokens=1000)
    assert [script.train.learning_rate(step, 0, config) for step in (0, 1, 3, 4, 99)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    assert script.train.learning_rate(99, 500, config) == pytest.approx(2.0 * 0.55)
    assert script.train.learning_rate(99, 1000, config) == pytest.approx(0.2)
    assert script.train.learning_rate(1, 1000, config) == pytest.approx(0.1)


def test_weights_begin_as_those_of_gpt2_and_depend_on_the_seed():
    first, other = (script.model.build_model(config_of(seed=seed)).state_dict() for seed in (3, 4))
    deviations = {"embedding.weight": 0.02, "heads_projection.weight": 0.02, "mlp_project.weight": 0.02 / 2}
    found = {name.removeprefix("blocks.0."): tensor for name, tensor in first.items()}
    assert {name: found[name].std().item() for name in deviations} == pytest.approx(deviations, rel=0.02)
    assert not first["embedding.weight"].equal(other["embedding.weight"])


def test_a_run_is_continued_as_it_began(finished, cache):
    with pytest.raises(script.model.UserError, match="--resume"):
        train(finished[0], cache, **BOTH_LENGTHS)
    with pytest.raises(script.model.UserError, match="learning_rate"):
        train(finished[0], cache, "--resume", **BOTH_LENGTHS, learning_rate=1.0)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"text": None}, "--text or --dataset"),
        ({"parallel": "fsdp2"}, "torchrun"),
        ({"tensor_parallel": 2}, "tensor_parallel"),
        ({"context_parallel": 2}, "context_parallel"),
        ({"seq_length": 10**7}, "10000000"),
        ({"min_seq_length": 65}, "min_seq_length"),
        ({"tokenizer": ROOT / "nowhere.json"}, "tokenizer"),
    ],
)
def test_invalid_settings_are_refused(tmp_path, cache, changed, name):
    with pytest.raises(script.model.UserError, match=name):
        train(tmp_path, cache, **changed)


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, cache):
    precision = torch.get_float32_matmul_precision()
    try:
        records = train(tmp_path / "run", cache, device="cuda", precision="bf16", total_tokens=30_000)
    finally:
        torch.set_float32_matmul_precision(precision)  # the script allows TF32
    assert records[-1]["validation_loss"]["64"] < records[0]["validation_loss"]["64"] - 0.3
