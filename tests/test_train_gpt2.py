"""examples/train_gpt2.py: what it trains on, what it records, and that a killed run ends on the same bits."""

import argparse
import asyncio
import dataclasses
import gc
import gzip
import importlib.util
import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import seqwarm_kernels as sw

pytest.importorskip("tokenizers", reason="tokenizers is not installed")

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "train_gpt2.py"
TEXT = Path(asyncio.__file__).parent  # source, and compiled files that must be left out
TIMES = ("seconds", "tokens_per_second", "peak_memory_bytes")


def load_script():
    specification = importlib.util.spec_from_file_location("train_gpt2", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    sys.modules["train_gpt2"] = module
    specification.loader.exec_module(module)
    return module


script = load_script()


def flags(out, cache, **changed):
    settings = {
        "size": "toy",
        "text": TEXT,
        "vocab_size": 400,
        "seq_length": 64,
        "min_seq_length": 16,
        "step_size": 16,
        "batch_size": 4,
        "total_tokens": 6000,
        "validate_every": 0.25,
        "validation_tokens": 2048,
        "lr_warmup_steps": 5,
        "monitor_every": 4,
        "device": "cpu",
        "out": out,
        "cache": cache,
        **changed,
    }
    named = [("--" + name.replace("_", "-"), value) for name, value in settings.items() if value is not None]
    values = itertools.chain.from_iterable(
        [name, *map(str, value if isinstance(value, (list, tuple)) else [value])] for name, value in named
    )
    return list(values)


def told(records):
    """What must be the same in every run."""
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def lines(path):
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON")) for line in path.open()]


def config_of(**changed):
    return script.Config(**{**script.SIZES["toy"], "text": [str(TEXT)], "entries": 400, **changed})


def assert_same_run(one, other):
    for name in ("config.json", "tokenizer.json", "monitor.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    assert told(lines(one / "records.jsonl")) == told(lines(other / "records.jsonl"))
    weights, others = (torch.load(folder / "model.pt", weights_only=True) for folder in (one, other))
    assert weights.keys() == others.keys()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    """A run that nothing disturbed, and its records."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    return out, script.main(flags(out, cache, validation_lengths=[64, 128]))


def test_a_run_learns_and_says_so(finished):
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
    model, tokenizer, config = script.load_run(out)
    tokens = torch.from_numpy(np.load(cache / config.tokens / "validation.npy").astype(np.int64))
    for length in (64, 128):
        inputs, labels = tokens[:2048].view(-1, length), tokens[1:2049].view(-1, length)
        with torch.no_grad():
            loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten()).item()
        assert loss == pytest.approx(records[-1]["validation_loss"][str(length)], rel=1e-5)
    assert tokenizer.decode(tokenizer.encode("await self._loop  # ∞").ids) == "await self._loop  # ∞"


def test_resuming_a_finished_run_trains_no_further(finished, cache, monkeypatch):
    out, records = finished
    monkeypatch.setattr(script.Run, "train_step", lambda run: pytest.fail("trained"))
    monkeypatch.setattr(script, "write_tokens", lambda *_: pytest.fail("tokenised"))
    assert script.main([*flags(out, cache, validation_lengths=[64, 128]), "--resume"]) == records


def test_killed_and_resumed_ends_on_the_same_bits(tmp_path, cache):
    settings = {"total_tokens": 8_000, "validate_every": 0.1, "objective": "masked", "micro_batch_size": 2}
    script.main(flags(tmp_path / "whole", cache, **settings))
    killed = tmp_path / "killed"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with subprocess.Popen(
        [sys.executable, SCRIPT, *flags(killed, cache, **settings)], env=environment, stderr=subprocess.DEVNULL
    ) as process:
        while not (killed / "records.jsonl").exists() or len(lines(killed / "records.jsonl")) < 2:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert not (killed / "model.pt").exists()
    script.main([*flags(killed, cache, **settings), "--resume"])
    assert_same_run(tmp_path / "whole", killed)


class Interrupted(Exception):
    pass


def interrupt(target, name, call):
    """Raise at that call of the function, before it does anything."""
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
    [
        (script.Run, "train_step", 1),
        (script.Run, "train_step", 30),
        (script.Run, "validate", 3),
        (script.os, "replace", 6),
        (script, "save_atomically", 2),
        (script, "write_atomically", 6),
        (script.Run, "export", 1),
    ],
)
def test_interrupted_anywhere_it_ends_on_the_same_bits(tmp_path, finished, cache, target, name, call):
    out = tmp_path / "run"
    patch = interrupt(target, name, call)
    with pytest.raises(Interrupted):
        script.main([*flags(out, cache, validation_lengths=[64, 128]), "--resume"])
    patch.undo()
    script.main([*flags(out, cache, validation_lengths=[64, 128]), "--resume"])
    assert_same_run(finished[0], out)


def test_two_ranks_train_as_one_and_resume(tmp_path, finished, cache):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *torchrun, "-m", "tests.test_train_gpt2", str(tmp_path), str(cache)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    expected, _, _ = script.load_run(finished[0])
    for parallel in ("ddp", "fsdp2"):
        whole = tmp_path / parallel / "whole"
        assert_same_run(whole, tmp_path / parallel / "broken")
        for one, two in zip(finished[1], lines(whole / "records.jsonl"), strict=True):
            assert (one["step"], one["tokens"], one["seq_length"]) == (two["step"], two["tokens"], two["seq_length"])
            assert one["train_loss"] == pytest.approx(two["train_loss"], rel=1e-4)
            assert one["validation_loss"] == pytest.approx(two["validation_loss"], rel=1e-4)
        model, _, _ = script.load_run(whole)
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-2, atol=1e-3)
        assert_first_step_is_of_all_labels(tmp_path / parallel / "masked", cache)


def assert_first_step_is_of_all_labels(folder, cache):
    """Of both ranks, which have not as many."""
    config = script.read_config(folder)
    ranks = [script.Batches(config, cache / config.tokens, rank, 2).draw(0) for rank in range(2)]
    batch = sw.resize_batch({name: torch.cat([rank[name] for rank in ranks]) for name in ranks[0]}, 16)
    first, second = (batch["labels"] != -100).view(2, -1).sum(1)
    assert first != second
    model = script.build_model(config)
    loss = script.loss_sum(model(batch["input_ids"]), batch) / (first + second)
    loss.backward()
    step = lines(folder / "monitor.jsonl")[0]
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-5)
    gradients = [parameter.grad for parameter in model.parameters()]
    assert step["grad_norm"] == pytest.approx(torch.nn.utils.get_total_norm(gradients).item(), rel=1e-4)


def one_of_two_ranks(folder, cache):
    """With two micro batches in a step; killed behind the second checkpoint."""
    torch.distributed.init_process_group("gloo")
    for parallel in ("ddp", "fsdp2"):
        settings = {"validation_lengths": [64, 128], "parallel": parallel, "micro_batch_size": 1}
        script.main(flags(folder / parallel / "whole", cache, **settings))
        arguments = [*flags(folder / parallel / "broken", cache, **settings), "--resume"]
        patch = interrupt(script.Run, "train_step", 35)
        with pytest.raises(Interrupted):
            script.main(arguments)
        patch.undo()
        script.main(arguments)
        masked = {**settings, "objective": "masked", "total_tokens": 64}
        script.main(flags(folder / parallel / "masked", cache, **masked))
    gc.collect()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_train_loss_is_that_of_all_labels(tmp_path, cache):
    (record,) = script.main(flags(tmp_path, cache, objective="masked", total_tokens=2000, validate_every=0))
    config = script.read_config(tmp_path)
    made = script.Batches(config, cache / config.tokens, 0, 1)
    steps = lines(tmp_path / "monitor.jsonl")
    drawn = [made.draw(at)["labels"][:, : int(step["seq_length"])] for at, step in enumerate(steps)]
    labels = [(tensor != -100).sum().item() for tensor in drawn]
    losses = [step["loss"] * count for step, count in zip(steps, labels, strict=True)]
    assert record["train_loss"] == pytest.approx(sum(losses) / sum(labels), rel=1e-6)


def test_memory_is_claimed_for_each_shape_that_trains(tmp_path, cache, monkeypatch):
    now, seen = ["validate"], {"claim_memory": set(), "train_step": set(), "validate": set()}
    block = script.Block.forward

    def noted(name, original):
        def method(run):
            now.append(name)
            try:
                return original(run)
            finally:
                now.pop()

        return method

    for name in ("claim_memory", "train_step"):
        monkeypatch.setattr(script.Run, name, noted(name, getattr(script.Run, name)))
    monkeypatch.setattr(
        script.Block, "forward", lambda layer, hidden: seen[now[-1]].add(hidden.shape[:2]) or block(layer, hidden)
    )
    script.main(flags(tmp_path / "run", cache, micro_batch_size=1))
    assert seen["train_step"] == {(4, 16), (2, 32), (1, 48), (1, 64)}
    assert seen["claim_memory"] == seen["train_step"]


def test_an_attention_of_ones_own(tmp_path, finished, cache):
    seen = set()

    def attend(query, key, value, slopes, *, causal):
        seen.add((causal, query.shape[2]))
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        return torch.softmax(scores + sw.alibi_bias(slopes, *scores.shape[-2:], causal=causal), dim=-1) @ value

    records = script.main(flags(tmp_path / "run", cache, validation_lengths=[64, 128]), attend=attend)
    assert seen == {(True, length) for length in (16, 32, 48, 64, 128)}
    for one, other in zip(finished[1], records, strict=True):
        assert one["validation_loss"] == pytest.approx(other["validation_loss"], rel=1e-3)


def status_of(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
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
        assert error.startswith("train_gpt2.py: ")
        assert message in error
        assert error.count("\n") == 1
    assert lines(tmp_path / "run" / "records.jsonl") == [record]
    assert lines(tmp_path / "run" / "monitor.jsonl") == steps


def test_a_run_with_a_checkpoint_does_not_diverge_twice(tmp_path, cache, monkeypatch):
    steps = itertools.count()
    original = script.Run.train_step

    def diverging(run):
        loss, labels, tokens = original(run)
        return (loss if next(steps) < 20 else loss * torch.nan), labels, tokens

    monkeypatch.setattr(script.Run, "train_step", diverging)
    records = script.main(flags(tmp_path, cache))
    assert [record["diverged"] for record in records] == [False, True]
    monkeypatch.setattr(script.Run, "train_step", lambda run: pytest.fail("trained"))
    assert script.main([*flags(tmp_path, cache), "--resume"]) == records
    assert lines(tmp_path / "records.jsonl") == records


def test_a_checkpoint_leaves_nothing_beside_it(tmp_path):
    (tmp_path / "model.pt.0123.partial").write_bytes(b"of a killed run")
    with pytest.raises((AttributeError, TypeError, RuntimeError)):
        script.save_atomically(lambda: None, tmp_path / "model.pt")
    assert list(tmp_path.iterdir()) == []
    script.save_atomically([1], tmp_path / "model.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_learning_rate_rises_by_steps_and_falls_by_tokens():
    config = config_of(learning_rate=2.0, lr_warmup_steps=4, total_tokens=1000)
    assert [script.learning_rate(step, 0, config) for step in (0, 1, 3, 4, 99)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    assert script.learning_rate(99, 500, config) == pytest.approx(2.0 * 0.55)
    assert script.learning_rate(99, 1000, config) == pytest.approx(0.2)
    assert script.learning_rate(1, 1000, config) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("size", "millions"), [("52m", 51), ("125m", 124), ("350m", 354), ("760m", 757), ("1.5b", 1556)]
)
def test_sizes(size, millions):
    with torch.device("meta"):
        model = script.build_model(script.Config(**{**script.SIZES[size], "entries": 50_257}))
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6) == millions


def test_weights_begin_as_those_of_gpt2():
    model = script.build_model(config_of(seed=3))
    expected = {"embedding.weight": 0.02, "query_key_value.weight": 0.02, "mlp_project.weight": 0.02 / 6**0.5}
    for name, parameter in model.named_parameters():
        for ending, deviation in expected.items():
            if name.endswith(ending):
                assert parameter.std().item() == pytest.approx(deviation, rel=0.02)
        if name.endswith("bias"):
            assert not parameter.any()
    torch.manual_seed(1)
    again = script.build_model(config_of(seed=3))
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    assert not torch.equal(model.embedding.weight, script.build_model(config_of(seed=4)).embedding.weight)


def written(folder, texts):
    for name, content in texts.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def texts_of(*paths, **changed):
    return [text for _, text in script.documents(config_of(text=[str(path) for path in paths], **changed))]


def test_documents(tmp_path, capsys):
    folder = written(
        tmp_path / "texts",
        {
            "a.txt": b"first\n",
            "b.txt.gz": gzip.compress(b"second\n"),
            "c.txt": b"first\n",
            "d.bin": b"\xff\xfe",
            "e.bin": b"\0",
            "f.txt": b" \n",
            "g.gz": b"broken",
            ".hidden": b"hidden\n",
        },
    )
    written(folder / ".git", {"config": b"hidden\n"})
    assert texts_of(folder) == texts_of(folder) == ["first\n", "second\n"]
    told = capsys.readouterr().out
    assert told.count("left out 3 of 9 files") == 1
    assert "d.bin" in told
    for name, message in (("d.bin", "UTF-8.*can't decode"), ("e.bin", "no NUL"), ("g.gz", "Not a gzipped file")):
        with pytest.raises(ValueError, match=message) as refused:
            texts_of(folder / name)
        assert name in str(refused.value)
    with pytest.raises(ValueError, match=r"text must name files.*nowhere"):
        texts_of(tmp_path / "nowhere")
    text = "".join(f"line {number}\n" for number in range(600))
    (folder / "long.txt").write_text(text)
    pieces = texts_of(folder / "long.txt")
    assert "".join(pieces) == text
    assert [piece.count("\n") for piece in pieces] == [256, 256, 88]


def test_a_long_file_in_a_folder_comes_in_pieces(tmp_path):
    """Beside a small one it would be all that is trained on, or all that is held out."""
    short = "".join(f"line {number}\n" for number in range(600))
    long = "".join(f"line {number} of a long text\n" for number in range(12_000))
    folder = written(tmp_path / "texts", {"a.txt": long.encode(), "b.txt": short.encode()})
    texts = texts_of(folder)
    assert "".join(texts) == long + short
    assert [text.count("\n") for text in texts] == [*[256] * 46, 224, 600]


def test_tokens_are_those_of_the_documents(tmp_path):
    folder = written(
        tmp_path / "texts", {f"{number}.txt": f"text {number} of many\n".encode() * 9 for number in range(20)}
    )
    (folder / "special.txt").write_text(script.MASK * 4)
    config = script.prepare_tokens(config_of(text=[str(folder)], vocab_size=300, validation_share=0.2), tmp_path)
    tokenizer = script.load_tokenizer(tmp_path / config.tokens)
    parts = {name: np.load(tmp_path / config.tokens / f"{name}.npy") for name in ("training", "validation")}
    found = {name: tokenizer.decode(part.tolist(), skip_special_tokens=False) for name, part in parts.items()}
    texts = {name: text.split(script.END_OF_TEXT)[:-1] for name, text in found.items()}
    assert sorted(texts["training"] + texts["validation"]) == sorted(texts_of(folder))
    assert 3 <= len(texts["validation"]) <= 5
    assert not any(np.isin(tokenizer.token_to_id(script.MASK), part) for part in parts.values())
    assert parts["training"].dtype == np.uint16
    assert config.entries == tokenizer.get_vocab_size()
    assert {path.name for path in (tmp_path / config.tokens).iterdir()} == {
        "tokenizer.json",
        "training.npy",
        "validation.npy",
    }


def test_a_lost_cache_is_made_again_and_another_text_refused(tmp_path):
    folder = written(tmp_path / "texts", {f"{number}.txt": f"text {number}\n".encode() for number in range(9)})
    config = script.prepare_tokens(config_of(text=[str(folder)], vocab_size=300), tmp_path / "one")
    assert script.prepare_tokens(config, tmp_path / "two") == config
    for name in ("tokenizer.json", "training.npy", "validation.npy"):
        one, two = (tmp_path / cache / config.tokens / name for cache in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
    written(folder, {"9.txt": b"more\n"})
    with pytest.raises(ValueError, match="that the run began with"):
        script.prepare_tokens(config, tmp_path / "three")


def test_the_split_is_by_content(tmp_path):
    sizes = {bytes([number]): 10 for number in range(100)}
    chosen = script.held_out(sizes, 0.1)
    assert len(chosen) == 10
    assert script.held_out(dict(reversed(sizes.items())), 0.1) == chosen
    assert len(script.held_out(sizes, 0.0)) == 1
    assert len(script.held_out(sizes, 1.0)) == 99
    with pytest.raises(ValueError, match="two documents"):
        script.held_out({b"1": 10}, 0.5)
    assert script.held_out({b"1": 900, b"2": 30, b"3": 40, b"4": 30}, 0.05) == {b"2"}
    assert script.held_out({b"1": 900, b"2": 60, b"3": 40}, 0.01) == {b"3"}


def test_two_runs_may_make_the_same_tokens_at_once(tmp_path, monkeypatch):
    folder = written(tmp_path / "texts", {f"{number}.txt": f"text {number}\n".encode() for number in range(9)})
    config, original = config_of(text=[str(folder)], vocab_size=300), script.write_tokens

    def overtaken(*arguments):
        monkeypatch.setattr(script, "write_tokens", original)
        script.prepare_tokens(config, tmp_path / "cache")
        original(*arguments)

    monkeypatch.setattr(script, "write_tokens", overtaken)
    prepared = script.prepare_tokens(config, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [prepared.tokens]
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        script.prepare_tokens(config, tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_a_tokenizer_of_ones_own(tmp_path, cache, finished):
    first = script.prepare_tokens(config_of(text=[str(TEXT)], vocab_size=300), cache)
    own = tmp_path / "own.json"
    tokenizer = script.load_tokenizer(cache / first.tokens)
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding()
    tokenizer.save(str(own))
    config = script.prepare_tokens(config_of(text=[str(TEXT)], tokenizer=str(own)), cache)
    assert config.tokens != first.tokens
    assert config.entries == first.entries == 300
    for name in ("training.npy", "validation.npy"):
        assert (cache / config.tokens / name).read_bytes() == (cache / first.tokens / name).read_bytes()


def test_ids_of_a_tokenizer_may_have_holes(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    folder = written(tmp_path / "texts", {f"{number}.txt": b"import self\n" * number for number in range(9, 18)})

    def prepared(**ids):
        words = {"[UNK]": 0, "self": 3, "import": 70_000, **ids}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        tokenizer.save(str(tmp_path / "own.json"))
        return script.prepare_tokens(config_of(text=[str(folder)], tokenizer=str(tmp_path / "own.json")), tmp_path)

    config = prepared(**{script.END_OF_TEXT: 500, script.MASK: 60_000})
    assert config.entries == 70_001
    tokens = np.load(tmp_path / config.tokens / "training.npy")
    assert set(tokens.tolist()) == {3, 500, 70_000}
    made = script.Batches(
        dataclasses.replace(config, seq_length=4, validation_tokens=1), tmp_path / config.tokens, 0, 1
    )
    assert made.ordinary.tolist() == [0, 3, 70_000]
    with pytest.raises(ValueError, match=r"tokenizer must have ids without holes.*own\.json"):
        prepared()  # the next id by count, which end of text would get, is that of "self"


def test_a_row_of_a_dataset_that_is_no_text(monkeypatch):
    class Rows(list):
        column_names = ("text",)

    for value, shown in ((None, "None"), ("\ud800", r"'\\ud800'")):
        rows = Rows([{"text": "a"}, {"text": value}])
        datasets = argparse.Namespace(load_dataset=lambda *_, rows=rows, **__: rows)
        monkeypatch.setattr(script, "package", lambda _, datasets=datasets: datasets)
        with pytest.raises(ValueError, match=rf"dataset_column.*row 1 of 'text': {shown}"):
            list(script.documents(config_of(text=None, dataset="name")))


def test_rows_of_a_dataset(tmp_path, cache, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hugging_face")
    rows = [{"words": f"row {number}"} for number in range(5)]
    folder = written(tmp_path / "rows", {"train.jsonl": "\n".join(map(json.dumps, rows)).encode()})
    config = config_of(text=None, dataset=str(folder), dataset_column="words")
    assert [text for _, text in script.documents(config)] == [row["words"] for row in rows]
    with pytest.raises(ValueError, match=r"dataset_column.*words.*'text'"):
        list(script.documents(dataclasses.replace(config, dataset_column="text")))


@pytest.fixture
def batches(finished, cache):
    def make(rank=0, world_size=1, **changed):
        config = script.Config(**json.loads((finished[0] / "config.json").read_text()))
        return script.Batches(dataclasses.replace(config, **changed), cache / config.tokens, rank, world_size)

    return make


def test_batches_depend_on_seed_and_step_alone(batches):
    whole = batches().draw(7)
    text = batches().training.astype(np.int64)
    row = whole["input_ids"][0].tolist()
    starts = [start for start in np.flatnonzero(text == row[0]) if text[start : start + 64].tolist() == row]
    assert any(text[start + 1 : start + 65].tolist() == whole["labels"][0].tolist() for start in starts)
    ranks = [batches(rank, 2).draw(7)["input_ids"] for rank in range(2)]
    assert torch.equal(torch.stack(ranks, 1).flatten(0, 1), whole["input_ids"])
    assert not torch.equal(batches().draw(8)["input_ids"], whole["input_ids"])
    assert not torch.equal(batches(seed=1).draw(7)["input_ids"], whole["input_ids"])


def test_masks_are_those_of_bert(batches):
    made = batches(objective="masked", batch_size=2000)
    plain, batch = batches(batch_size=2000).draw(3)["input_ids"], made.draw(3)
    chosen = batch["labels"] != -100
    assert torch.equal(batch["labels"][chosen], plain[chosen])
    assert torch.equal(batch["input_ids"][~chosen], plain[~chosen])
    assert chosen.float().mean().item() == pytest.approx(0.15, abs=0.005)
    replaced = batch["input_ids"][chosen]
    assert (replaced == made.mask_token).float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (replaced == plain[chosen]).float().mean().item() == pytest.approx(0.1, abs=0.02)
    assert replaced.max() > 300
    end = made.end_token
    assert (plain == end).any()
    assert not (batch["labels"] == end).any()
    assert not (replaced == end).any()
    assert not torch.equal(made.draw(4)["labels"], batch["labels"])


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_validation_sees_the_same_tokens_at_every_length(batches, objective):
    made = batches(objective=objective)
    short, long = made.to_validate(64), made.to_validate(128)
    for name in short:
        assert torch.equal(short[name].flatten(), long[name].flatten())
    parts = [batches(rank, 3, objective=objective).to_validate(64)["labels"] for rank in range(3)]
    assert {len(part) for part in parts} == {11}
    together = torch.stack(parts, 1).flatten(0, 1)
    assert torch.equal(together[:32], short["labels"])
    assert (together[32:] == -100).all()


@pytest.mark.parametrize(
    ("changed", "extra", "message"),
    [
        ({}, [], "holds a run.*--resume"),
        ({"learning_rate": 1.0}, ["--resume"], r"learning_rate must stay 0\.004.*got 1\.0"),
        ({"text": SCRIPT}, ["--resume"], "text must stay"),
    ],
)
def test_a_run_is_continued_as_it_began(finished, cache, changed, extra, message):
    arguments = flags(finished[0], cache, validation_lengths=[64, 128], **changed)
    with pytest.raises(ValueError, match=message):
        script.main([*arguments, *extra])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text": None}, "--text or --dataset"),
        ({"dataset": "name"}, "--text or --dataset"),
        ({"parallel": "fsdp2"}, "torchrun"),
        ({"seq_length": 10**7}, "more than 10000000 tokens to train on"),
        ({"validation_lengths": 10**6}, "more than 1000000 tokens to validate on"),
        ({"min_seq_length": 65}, "min_seq_length must be at most seq_length 64, got 65"),
        ({"tokenizer": ROOT / "nowhere.json"}, "tokenizer must be a JSON file.*nowhere"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, cache, changed, message):
    with pytest.raises(ValueError, match=message):
        script.main(flags(tmp_path / "run", cache, **changed))


def test_the_shortest_length_of_a_size_is_never_above_the_longest(tmp_path):
    given = script.parse(["--size", "toy", "--text", "here", "--seq-length", "16", "--out", str(tmp_path)])
    assert script.configure(given).min_seq_length == 16


@pytest.mark.parametrize(
    "flag",
    ["--total-tokens=0", "--warmup-duration=1.5", "--learning-rate=-1", "--seq-length=x", "--vocab-size=257"],
)
def test_flags_are_checked(tmp_path, capsys, flag):
    with pytest.raises(SystemExit):
        script.parse(["--out", str(tmp_path), flag])
    assert flag.split("=")[0] in capsys.readouterr().err


def test_nothing_given_is_nothing_set(tmp_path):
    assert script.parse(["--out", str(tmp_path)]) == argparse.Namespace(out=tmp_path, cache=None, resume=False)


def test_real_text(tmp_path):
    if "SEQWARM_TEST_DATA" not in os.environ:
        pytest.skip("SEQWARM_TEST_DATA names no folder of real text")
    text = Path(os.environ["SEQWARM_TEST_DATA"]) / "wikitext-2" / "valid.txt"
    records = script.main(flags(tmp_path / "run", None, text=text, vocab_size=400, total_tokens=10_000, batch_size=8))
    losses = [record["validation_loss"]["64"] for record in records]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 5.1  # of 400 entries none knows more than 6.0 at first


@pytest.mark.gpu
def test_on_a_gpu(tmp_path, cache):
    settings = {"device": "cuda", "precision": "bf16", "total_tokens": 30_000}
    records = script.main(flags(tmp_path / "run", cache, **settings))
    assert records[-1]["validation_loss"]["64"] < records[0]["validation_loss"]["64"] - 0.3


if __name__ == "__main__":
    one_of_two_ranks(Path(sys.argv[1]), Path(sys.argv[2]))
