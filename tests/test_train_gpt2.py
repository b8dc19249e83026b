"""examples/train_gpt2: settings, model and training. A killed and resumed run ends on the same bits."""

import argparse
import asyncio
import itertools
import json
import os
import pickle
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import seqwarm_kernels as sw

pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from experiments.running import ROOT, SCRIPT, load_script

from .support.ranks import leave_group
from .support.tiers import first_fast

pytestmark = pytest.mark.xdist_group("train_gpt2")  # one worker loads the script and trains what tests share
TEXT = Path(asyncio.__file__).parent  # source, and compiled files that must be skipped
TIMES = ("seconds", "tokens_per_second", "peak_memory_bytes")

script = load_script()


def flags(out, cache, **changed):
    settings = {"size": "toy", "text": TEXT, "vocab_size": 400, "seq_length": 64, "min_seq_length": 16, "step_size": 16,
                "batch_size": 4, "total_tokens": 6000, "validate_every": 0.25, "validation_tokens": 2048,
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
CONSTANT_TOKENS = ["--mode", "flatten"]
CONSTANT_AND_SCALED = [*CONSTANT_TOKENS, "--scale-learning-rate", "--resume"]
SHORT_AND_FULL = {**BOTH_LENGTHS, "step_size": 48, "warmup_duration": 0.6}  # 16 and 64 tokens: two ranks have all rows


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
    assert 6000 <= records[-1]["tokens"] < 6000 + 4 * 64
    assert [record["tokens"] // 1500 for record in records] == [1, 2, 3, 4]
    assert records[-1]["validation_loss"]["64"] < records[0]["validation_loss"]["64"] - 0.05
    assert set(records[0]["validation_loss"]) == {"64", "128"}
    assert not any(record["diverged"] for record in records)
    assert all(record["peak_memory_bytes"] > 1e6 and record["tokens_per_second"] > 0 for record in records)
    assert np.isclose(records[0]["tokens_per_second"], records[0]["tokens"] / records[0]["seconds"])


def test_every_step_is_monitored(finished):
    out, records = finished
    steps = lines(out / "monitor.jsonl")
    assert [step["step"] for step in steps] == list(range(1, records[-1]["step"] + 1))
    assert steps[0]["seq_length"] == 16
    assert all(step["variance_max"] > 0 and step["grad_norm"] > 0 for step in steps)
    weighted = [step["loss"] * step["seq_length"] for step in steps if step["step"] <= records[0]["step"]]
    tokens = [step["seq_length"] for step in steps if step["step"] <= records[0]["step"]]
    assert records[0]["train_loss"] == pytest.approx(sum(weighted) / sum(tokens), rel=1e-5)


def test_a_loaded_run_gives_the_last_validation_loss(finished, cache):
    out, records = finished
    model, tokenizer, config = script.train.load_run(out)
    tokens = torch.from_numpy(np.load(cache / config.tokens / "validation.npy").astype(np.int64))
    for length in (64, 128):
        inputs, labels = tokens[:2048].view(-1, length), tokens[1:2049].view(-1, length)
        with torch.no_grad():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).item()
        assert loss == pytest.approx(records[-1]["validation_loss"][str(length)], rel=1e-5)
    assert tokenizer.decode(tokenizer.encode("await self._loop  # ∞").ids) == "await self._loop  # ∞"


def test_resuming_a_finished_run_trains_no_further(finished, cache, monkeypatch):
    out, records = finished
    monkeypatch.setattr(script.train.Run, "train_step", lambda run: pytest.fail("trained"))
    monkeypatch.setattr(script.text, "write_tokens", lambda *_: pytest.fail("tokenized"))
    assert train(out, cache, "--resume", **BOTH_LENGTHS) == records


class Interrupted(Exception):
    pass


def interrupt(target, name, call):
    """Raise at this call of the function, before it does anything."""
    original, calls = getattr(target, name), itertools.count(1)

    def interrupted(*arguments, **options):
        if next(calls) == call:
            raise Interrupted
        return original(*arguments, **options)

    patch = pytest.MonkeyPatch()
    patch.setattr(target, name, interrupted)
    return patch


@pytest.mark.parametrize(
    ("target", "name", "call"),
    first_fast(
        [
            (script.train, "open_atomically", 5),
            (script.train.Run, "train_step", 1),
            (script.train.Run, "train_step", 30),
            (script.train.Run, "validate", 3),
            (os, "replace", 6),
            (script.train, "open_atomically", 10),
            (script.train.Run, "export", 1),
        ]
    ),
)
def test_interrupted_anywhere_it_ends_on_the_same_bits(tmp_path, finished, cache, target, name, call):
    out = tmp_path / "run"
    patch = interrupt(target, name, call)
    with pytest.raises(Interrupted):
        train(out, cache, "--resume", **BOTH_LENGTHS)
    patch.undo()
    train(out, cache, "--resume", **BOTH_LENGTHS)
    assert_same_run(finished[0], out)


@pytest.mark.slow
def test_two_ranks_train_as_one_and_resume(tmp_path, finished, cache):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, "-m", "tests.test_train_gpt2", str(tmp_path), str(cache)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    expected, _, _ = script.train.load_run(finished[0])
    train(tmp_path / "constant", cache, *CONSTANT_AND_SCALED, **SHORT_AND_FULL)
    expected_lines = lines(tmp_path / "constant" / "monitor.jsonl")
    for folder in ("shared-heads", "shared-heads-resumed"):
        for one, two in zip(finished[1], lines(tmp_path / folder / "records.jsonl"), strict=True):
            assert (one["step"], one["tokens"], one["seq_length"]) == (two["step"], two["tokens"], two["seq_length"])
            assert one["train_loss"] == pytest.approx(two["train_loss"], rel=1e-4)
            assert one["validation_loss"] == pytest.approx(two["validation_loss"], rel=1e-4)
        model, _, _ = script.train.load_run(tmp_path / folder)
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-2, atol=1e-3)
    assert_same_run(tmp_path / "shared-heads", tmp_path / "shared-heads-resumed")
    for parallel in ("ddp", "fsdp2"):
        whole = tmp_path / parallel / "whole"
        assert_same_run(whole, tmp_path / parallel / "interrupted")
        assert_same_losses(finished[1], lines(whole / "records.jsonl"))
        model, _, _ = script.train.load_run(whole)
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-2, atol=1e-3)
        assert_first_step_is_of_all_labels(tmp_path / parallel / "masked", cache)
        assert_same_run(tmp_path / parallel / "constant", tmp_path / parallel / "constant-interrupted")
        for one, two in zip(expected_lines, lines(tmp_path / parallel / "constant" / "monitor.jsonl"), strict=True):
            assert (one["seq_length"], one["learning_rate"]) == (two["seq_length"], two["learning_rate"])
            assert one["loss"] == pytest.approx(two["loss"], rel=1e-3)
    assert_same_losses(finished[1], lines(tmp_path / "context" / "records.jsonl"))


def assert_same_losses(alone, together):
    for one, two in zip(alone, together, strict=True):
        assert (one["step"], one["tokens"], one["seq_length"]) == (two["step"], two["tokens"], two["seq_length"])
        assert one["train_loss"] == pytest.approx(two["train_loss"], rel=1e-4)
        assert one["validation_loss"] == pytest.approx(two["validation_loss"], rel=1e-4)


def assert_first_step_is_of_all_labels(folder, cache):
    """The labels of both ranks, whose numbers differ."""
    config = script.model.read_config(folder)
    ranks = [script.text.Batches(config, cache / config.tokens, rank, 2).draw(0) for rank in range(2)]
    batch = sw.resize_batch({name: torch.cat([rank[name] for rank in ranks]) for name in ranks[0]}, 16)
    first, second = (batch["labels"] != -100).view(2, -1).sum(1)
    assert first != second
    model = script.model.build_model(config)
    loss = script.model.loss_sum(model(batch["input_ids"]), batch) / (first + second)
    loss.backward()
    step = lines(folder / "monitor.jsonl")[0]
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-5)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert step["grad_norm"] == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-4)


def one_of_two_ranks(folder, cache):
    """One rank of runs with two micro-batches in a step, killed after the second checkpoint."""
    torch.distributed.init_process_group("gloo")
    for parallel in ("ddp", "fsdp2"):
        settings = {**BOTH_LENGTHS, "parallel": parallel, "micro_batch_size": 1}
        train(folder / parallel / "whole", cache, **settings)
        patch = interrupt(script.train.Run, "train_step", 35)
        with pytest.raises(Interrupted):
            train(folder / parallel / "interrupted", cache, "--resume", **settings)
        patch.undo()
        train(folder / parallel / "interrupted", cache, "--resume", **settings)
        constant = {**settings, **SHORT_AND_FULL}
        train(folder / parallel / "constant", cache, *CONSTANT_AND_SCALED, **constant)
        patch = interrupt(script.train.Run, "train_step", 9)
        with pytest.raises(Interrupted):
            train(folder / parallel / "constant-interrupted", cache, *CONSTANT_AND_SCALED, **constant)
        patch.undo()
        train(folder / parallel / "constant-interrupted", cache, *CONSTANT_AND_SCALED, **constant)
        train(folder / parallel / "masked", cache, **{**settings, "objective": "masked", "total_tokens": 64})
    shared = {**BOTH_LENGTHS, "tensor_parallel": 2}
    train(folder / "shared-heads", cache, **shared)
    patch = interrupt(script.train.Run, "train_step", 35)
    with pytest.raises(Interrupted):
        train(folder / "shared-heads-resumed", cache, **shared)
    patch.undo()
    train(folder / "shared-heads-resumed", cache, "--resume", **shared)
    train(folder / "context", cache, **{**BOTH_LENGTHS, "context_parallel": 2, "micro_batch_size": 1})
    leave_group()


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
    ("extra", "micro_batch_size", "shapes"),
    [
        ([], 1, {(4, 16), (2, 32), (1, 48), (1, 64)}),
        (CONSTANT_TOKENS, 3, {(12, 16), (4, 16), (6, 32), (2, 32), (3, 48), (2, 48), (3, 64), (1, 64)}),
    ],
)
def test_memory_is_claimed_for_each_shape_that_trains(tmp_path, cache, monkeypatch, extra, micro_batch_size, shapes):
    now, seen = ["validate"], {"claim_memory": set(), "train_step": set(), "validate": set()}
    block = script.model.Block.forward

    def noted(name, original):
        def method(run):
            now.append(name)
            try:
                return original(run)
            finally:
                now.pop()

        return method

    for name in ("claim_memory", "train_step"):
        monkeypatch.setattr(script.train.Run, name, noted(name, getattr(script.train.Run, name)))
    monkeypatch.setattr(
        script.model.Block, "forward", lambda layer, hidden: seen[now[-1]].add(hidden.shape[:2]) or block(layer, hidden)
    )
    train(tmp_path / "run", cache, *extra, micro_batch_size=micro_batch_size)
    assert seen["train_step"] == shapes
    assert seen["claim_memory"] == seen["train_step"]


@pytest.mark.parametrize("mode", ["flatten", "segments"])
def test_constant_tokens(tmp_path, cache, monkeypatch, mode):
    """Each step has the tokens of one at full length, less than a row missing. The loss is that of the cut stream."""
    steps, original = [], script.train.Run.train_step

    def train_step(run):
        loss, labels, tokens = original(run)
        steps.append((run.seq_length, int(labels), tokens))
        return loss, labels, tokens

    monkeypatch.setattr(script.train.Run, "train_step", train_step)
    records = train(tmp_path, cache, mode=mode, micro_batch_size=3, warmup_duration=0.8)
    assert {length for length, _, _ in steps} == {16, 32, 48, 64}
    missing = {48: 16} if mode == "flatten" else {}
    assert all(labels == tokens == 4 * 64 - missing.get(length, 0) for length, labels, tokens in steps)
    assert records[-1]["tokens"] == sum(tokens for _, _, tokens in steps)
    config = script.model.read_config(tmp_path)
    drawn = script.text.Batches(config, cache / config.tokens, 0, 1)
    with torch.no_grad():
        logits = script.model.build_model(config)(drawn.draw(0)["input_ids"].view(16, 16))
    first = lines(tmp_path / "monitor.jsonl")[0]["loss"]
    assert first == pytest.approx(F.cross_entropy(logits.flatten(0, 1), drawn.draw(0)["labels"].flatten()).item())


def test_the_learning_rate_follows_the_square_root_of_the_rows(tmp_path, cache):
    scaled, plain, resumed = (tmp_path / name for name in ("scaled", "plain", "resumed"))
    extra, changed = CONSTANT_AND_SCALED, {"warmup_duration": 0.8}
    train(plain, cache, *CONSTANT_TOKENS, **changed)
    train(scaled, cache, *extra, **changed)
    for one, other in zip(*(lines(folder / "monitor.jsonl") for folder in (scaled, plain)), strict=True):
        assert one["seq_length"] == other["seq_length"]
        rows = 4 * 64 // one["seq_length"]
        assert one["learning_rate"] == pytest.approx(other["learning_rate"] * (rows / 4) ** 0.5)
    patch = interrupt(script.train.Run, "train_step", 9)  # after the first checkpoint, while rows are short
    with pytest.raises(Interrupted):
        train(resumed, cache, *extra, **changed)
    patch.undo()
    train(resumed, cache, *extra, **changed)
    assert_same_run(scaled, resumed)


def test_own_attention(tmp_path, finished, cache):
    seen = set()

    def attention(query, key, value, slopes, *, causal):
        seen.add((causal, query.shape[2]))
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        return torch.softmax(scores + sw.alibi_bias(slopes, *scores.shape[-2:], causal=causal), dim=-1) @ value

    records = script.train.main(flags(tmp_path / "run", cache, **BOTH_LENGTHS), attention=attention)
    assert seen == {(True, length) for length in (16, 32, 48, 64, 128)}
    for one, other in zip(finished[1], records, strict=True):
        assert one["validation_loss"] == pytest.approx(other["validation_loss"], rel=1e-3)


def status_of(monkeypatch, *arguments):
    """Exit status of the script, which imports the loaded siblings."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    for name in ("model", "text"):
        monkeypatch.setitem(sys.modules, name, getattr(script, name))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return ended.value.code


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, cache, monkeypatch, capsys):
    settings = {"learning_rate": 1e30, "max_grad_norm": 0, "lr_warmup_steps": 1, "warmup_duration": 0}
    arguments = flags(tmp_path / "run", cache, **settings)
    assert status_of(monkeypatch, *arguments) == 3
    (record,) = lines(tmp_path / "run" / "records.jsonl")
    assert record["diverged"]
    assert record["train_loss"] is None
    assert record["tokens"] < 2000
    assert not (tmp_path / "run" / "model.pt").exists()
    steps = lines(tmp_path / "run" / "monitor.jsonl")
    capsys.readouterr()
    assert status_of(monkeypatch, *arguments, "--resume") == 3
    assert "has ended" in capsys.readouterr().out
    for extra, message in (([], "holds a run"), (["--resume", "--learning-rate", "1"], "learning_rate must stay")):
        assert status_of(monkeypatch, *arguments, *extra) == 2
        error = capsys.readouterr().err
        assert error.startswith("train.py: ")
        assert message in error
        assert error.count("\n") == 1
    assert lines(tmp_path / "run" / "records.jsonl") == [record]
    assert lines(tmp_path / "run" / "monitor.jsonl") == steps


def test_a_run_with_a_checkpoint_does_not_diverge_twice(tmp_path, cache, monkeypatch):
    steps = itertools.count()
    original = script.train.Run.train_step

    def diverging(run):
        loss, labels, tokens = original(run)
        return (loss if next(steps) < 20 else loss * torch.nan), labels, tokens

    monkeypatch.setattr(script.train.Run, "train_step", diverging)
    records = train(tmp_path, cache)
    assert [record["diverged"] for record in records] == [False, True]
    monkeypatch.setattr(script.train.Run, "train_step", lambda run: pytest.fail("trained"))
    assert train(tmp_path, cache, "--resume") == records
    assert lines(tmp_path / "records.jsonl") == records


class Called:
    """Code in a pickle: it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.mkdir, (self.path,)


@pytest.mark.parametrize(("entry", "is_sharded"), [("weights", False), ("weights", True), ("step", True)])
def test_a_checkpoint_cannot_name_another_folder(tmp_path, finished, cache, monkeypatch, entry, is_sharded):
    """Torch unpickles the metadata of a folder with shards of weights."""
    monkeypatch.setattr(script.train.Run, "is_sharded", lambda run: is_sharded)
    out, elsewhere, called = (tmp_path / name for name in ("run", "elsewhere", "called"))
    patch = interrupt(script.train.Run, "train_step", 30)
    with pytest.raises(Interrupted):
        train(out, cache, **BOTH_LENGTHS)
    patch.undo()
    elsewhere.mkdir()
    (elsewhere / ".metadata").write_bytes(pickle.dumps(Called(called)))
    state = torch.load(out / "checkpoint.pt", weights_only=True)
    if entry == "weights":
        state["weights"] = str(elsewhere)
    else:
        state["counts"][0] = "/../../elsewhere"
    torch.save(state, out / "checkpoint.pt")
    if is_sharded and entry == "weights":  # which is not read
        train(out, cache, "--resume", **BOTH_LENGTHS)
        assert_same_run(finished[0], out)
    else:
        with pytest.raises(script.model.UserError, match=r"checkpoint\.pt is damaged"):
            train(out, cache, "--resume", **BOTH_LENGTHS)
    assert not called.exists()
    pickle.loads((elsewhere / ".metadata").read_bytes())
    assert called.exists()


def test_a_checkpoint_leaves_no_partial_file(tmp_path):
    model = tmp_path / "model.pt"
    (tmp_path / "model.pt.partial").write_bytes(b"of a killed run")
    with pytest.raises((AttributeError, TypeError, RuntimeError)), script.text.open_atomically(model) as file:
        torch.save(lambda: None, file)
    assert list(tmp_path.iterdir()) == []
    for content in ([1], [2]):
        with script.text.open_atomically(model) as file:
            torch.save(content, file)
        assert list(tmp_path.iterdir()) == [model]
        assert torch.load(model) == content


def test_learning_rate_rises_by_steps_and_falls_by_tokens():
    config = config_of(learning_rate=2.0, lr_warmup_steps=4, total_tokens=1000)
    assert [script.train.learning_rate(step, 0, config) for step in (0, 1, 3, 4, 99)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    assert script.train.learning_rate(99, 500, config) == pytest.approx(2.0 * 0.55)
    assert script.train.learning_rate(99, 1000, config) == pytest.approx(0.2)
    assert script.train.learning_rate(1, 1000, config) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("size", "millions"), [("52m", 51), ("125m", 124), ("350m", 354), ("760m", 757), ("1.5b", 1556)]
)
def test_sizes(size, millions):
    with torch.device("meta"):
        model = script.model.build_model(script.model.Config(**{**script.model.SIZES[size], "entries": 50_257}))
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions


def test_weights_begin_as_those_of_gpt2():
    model = script.model.build_model(config_of(seed=3))
    expected = {"embedding.weight": 0.02, "heads_projection.weight": 0.02, "mlp_project.weight": 0.02 / 6**0.5}
    for name, parameter in model.named_parameters():
        for ending, deviation in expected.items():
            if name.endswith(ending):
                assert parameter.std().item() == pytest.approx(deviation, rel=0.02)
        if name.endswith("bias"):
            assert not parameter.any()
    torch.manual_seed(1)
    again = script.model.build_model(config_of(seed=3))
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    assert not torch.equal(model.embedding.weight, script.model.build_model(config_of(seed=4)).embedding.weight)


@pytest.mark.parametrize(
    ("changed", "extra", "message"),
    [
        ({}, [], "holds a run.*--resume"),
        ({"learning_rate": 1.0}, ["--resume"], r"learning_rate must stay 0\.004.*got 1\.0"),
        ({"text": SCRIPT}, ["--resume"], "text must stay"),
    ],
)
def test_a_run_is_continued_as_it_began(finished, cache, changed, extra, message):
    with pytest.raises(ValueError, match=message):
        train(finished[0], cache, *extra, **BOTH_LENGTHS, **changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text": None}, "--text or --dataset"),
        ({"dataset": "name"}, "--text or --dataset"),
        ({"parallel": "fsdp2"}, "torchrun"),
        ({"tensor_parallel": 3}, "tensor_parallel must divide the 4 heads, got 3"),
        ({"tensor_parallel": 2}, "tensor_parallel must divide the 1 ranks, got 2"),
        ({"context_parallel": 2}, "context_parallel must divide the 1 ranks of torchrun, got 2"),
        ({"seq_length": 10**7}, "more than 10000000 tokens to train on"),
        ({"validation_lengths": 10**6}, "more than 1000000 tokens to validate on"),
        ({"min_seq_length": 65}, "min_seq_length must be at most seq_length 64, got 65"),
        ({"tokenizer": ROOT / "nowhere.json"}, "tokenizer must be a JSON file.*nowhere"),
    ],
)
def test_invalid_settings_are_refused(tmp_path, cache, changed, message):
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "run", cache, **changed)


def test_the_learning_rate_is_not_scaled_by_rows_that_stay_the_same(tmp_path, cache):
    with pytest.raises(script.model.UserError, match="scale_learning_rate needs --mode flatten"):
        train(tmp_path / "run", cache, "--scale-learning-rate")


def test_the_shortest_length_of_a_size_is_never_above_the_longest(tmp_path):
    given = script.model.parse(["--size", "toy", "--text", "here", "--seq-length", "16", "--out", str(tmp_path)])
    assert script.model.configure(given).min_seq_length == 16


@pytest.mark.parametrize(
    "flag",
    ["--total-tokens=0", "--warmup-duration=1.5", "--learning-rate=-1", "--seq-length=x", "--vocab-size=257"],
)
def test_flags_are_checked(tmp_path, capsys, flag):
    with pytest.raises(SystemExit):
        script.model.parse(["--out", str(tmp_path), flag])
    assert flag.split("=")[0] in capsys.readouterr().err


def test_flags_that_are_not_given_are_not_set(tmp_path):
    assert script.model.parse(["--out", str(tmp_path)]) == argparse.Namespace(out=tmp_path, cache=None, resume=False)


def test_prose(tmp_path):
    """On the project's documentation."""
    records = train(tmp_path / "run", None, text=ROOT / "docs", total_tokens=10_000, batch_size=8)
    losses = [record["validation_loss"]["64"] for record in records]
    assert losses[-1] < min(losses[0], 5.2)  # ln(400) is 6.0


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, cache):
    precision = torch.get_float32_matmul_precision()
    try:
        records = train(tmp_path / "run", cache, device="cuda", precision="bf16", total_tokens=30_000)
    finally:
        torch.set_float32_matmul_precision(precision)  # the script allows TF32
    assert records[-1]["validation_loss"]["64"] < records[0]["validation_loss"]["64"] - 0.3


if __name__ == "__main__":
    one_of_two_ranks(Path(sys.argv[1]), Path(sys.argv[2]))
