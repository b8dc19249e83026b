"""examples/train_gpt2: text to tokens to batches."""

import dataclasses
import gzip
import json

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers", reason="tokenizers is not installed")

import tokenizers

from .test_train_gpt2 import config_of, script

pytestmark = pytest.mark.xdist_group("train_gpt2")  # one worker loads the script and trains what tests share
FILES = ("tokenizer.json", "training.npy", "validation.npy")


def written(folder, texts):
    for name, content in texts.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def texts_of(*paths, **changed):
    return [text for _, text in script.text.documents(config_of(text=[str(path) for path in paths], **changed))]


def numbered(folder, count=9):
    """A folder of as many texts, each another."""
    return written(folder, {f"{number}.txt": f"text {number} of many\n".encode() * 9 for number in range(count)})


def test_documents(tmp_path, capsys):
    broken = {"d.bin": b"\xff\xfe", "e.bin": b"\0", "g.gz": b"broken", "h.gz": b""}
    texts = {"a.txt": b"first\n", "b.txt.gz": gzip.compress(b"second\n"), "c.txt": b"first\n", "f.txt": b" \n"}
    folder = written(tmp_path / "texts", {**texts, **broken, ".hidden": b"hidden\n"})
    written(folder / ".git", {"config": b"hidden\n"})
    (folder / "link").symlink_to("link")
    assert texts_of(folder) == texts_of(folder) == ["first\n", "second\n"]
    assert capsys.readouterr().out.count("skipped 5 of 9 files") == 1
    for name in ("d.bin", "e.bin", "g.gz", "nowhere"):
        with pytest.raises(script.model.UserError, match=name):
            texts_of(folder / name)


def test_long_files_are_split_into_pieces(tmp_path):
    """Otherwise a file would be all of the training text, or all of the validation text."""
    short = "".join(f"line {number}\n" for number in range(600))
    long = "".join(f"line {number} of a long text\n" for number in range(12_000))
    folder = written(tmp_path / "texts", {"a.txt": long.encode(), "b.txt": short.encode()})
    for path, text, counts in (
        (folder, long + short, [*[256] * 46, 224, 600]),
        (folder / "b.txt", short, [256, 256, 88]),  # a named file of any length
    ):
        pieces = texts_of(path)
        assert "".join(pieces) == text
        assert [piece.count("\n") for piece in pieces] == counts


def test_tokens_decode_to_the_documents(tmp_path):
    folder = numbered(tmp_path / "texts", 20)
    (folder / "special.txt").write_text(script.text.MASK * 4)
    config = script.text.prepare_tokens(config_of(text=[str(folder)], vocab_size=300, validation_share=0.2), tmp_path)
    tokenizer = script.text.load_tokenizer(tmp_path / config.tokens / "tokenizer.json")
    parts = {name: np.load(tmp_path / config.tokens / f"{name}.npy") for name in ("training", "validation")}
    found = {name: tokenizer.decode(part.tolist(), skip_special_tokens=False) for name, part in parts.items()}
    texts = {name: text.split(script.text.END_OF_TEXT)[:-1] for name, text in found.items()}
    assert sorted(texts["training"] + texts["validation"]) == sorted(texts_of(folder))
    assert 3 <= len(texts["validation"]) <= 5
    assert not any(np.isin(tokenizer.token_to_id(script.text.MASK), part) for part in parts.values())
    assert parts["training"].dtype == np.uint16
    assert config.entries == tokenizer.get_vocab_size()
    assert {path.name for path in (tmp_path / config.tokens).iterdir()} == set(FILES)


def test_a_lost_cache_is_written_again_and_another_text_refused(tmp_path):
    folder = numbered(tmp_path / "texts")
    config = script.text.prepare_tokens(config_of(text=[str(folder)], vocab_size=300), tmp_path / "one")
    assert script.text.prepare_tokens(config, tmp_path / "two") == config
    for name in FILES:
        one, two = (tmp_path / cache / config.tokens / name for cache in ("one", "two"))
        assert one.read_bytes() == two.read_bytes()
    written(folder, {"9.txt": b"more\n"})
    with pytest.raises(script.model.UserError, match="text"):
        script.text.prepare_tokens(config, tmp_path / "three")


def test_the_split_is_by_content():
    sizes = {bytes([number]): 10 for number in range(100)}
    chosen = script.text.held_out(sizes, 0.1)
    assert len(chosen) == 10
    assert script.text.held_out(dict(reversed(sizes.items())), 0.1) == chosen
    assert script.text.held_out({b"1": 900, b"2": 30, b"3": 40, b"4": 30}, 0.05) == {b"2"}
    with pytest.raises(script.model.UserError, match="text"):
        script.text.held_out({b"1": 10}, 0.5)


def test_ids_of_a_tokenizer_may_have_holes(tmp_path):
    def prepared(**ids):
        words = {"[UNK]": 0, "self": 3, "import": 70_000, **ids}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.enable_truncation(2)  # these have no effect
        tokenizer.enable_padding(length=50)
        tokenizer.save(str(tmp_path / "own.json"))
        folder = str(numbered(tmp_path / "texts"))
        return script.text.prepare_tokens(config_of(text=[folder], tokenizer=str(tmp_path / "own.json")), tmp_path)

    config = prepared(**{script.text.END_OF_TEXT: 500, script.text.MASK: 60_000})
    assert config.entries == 70_001
    assert (np.load(tmp_path / config.tokens / "training.npy") == 0).sum() == 8 * 9 * 4
    config = dataclasses.replace(config, seq_length=1, validation_tokens=1)
    assert script.text.Batches(config, tmp_path / config.tokens, 0, 1).ordinary.tolist() == [0, 3, 70_000]
    with pytest.raises(script.model.UserError, match="tokenizer"):
        prepared()  # 3 entries, so END_OF_TEXT would get the id 3 of "self"


def test_rows_of_a_dataset(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hugging_face")
    rows = [{"words": f"row {number}"} for number in range(5)]
    folder = written(tmp_path / "rows", {"train.jsonl": "\n".join(map(json.dumps, rows)).encode()})
    config = config_of(text=None, dataset=str(folder), dataset_column="words")
    assert [text for _, text in script.text.documents(config)] == [row["words"] for row in rows]
    with pytest.raises(script.model.UserError, match="dataset_column"):
        list(script.text.documents(dataclasses.replace(config, dataset_column="text")))


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """Batches of the same tokens: batches(rank, world_size, **changed settings)."""
    cache = tmp_path_factory.mktemp("cache")
    settings = {"seq_length": 64, "batch_size": 4, "validation_lengths": [64, 128], "validation_tokens": 512}
    config = script.text.prepare_tokens(config_of(vocab_size=400, **settings), cache)

    def make(rank=0, world_size=1, **changed):
        return script.text.Batches(dataclasses.replace(config, **changed), cache / config.tokens, rank, world_size)

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


def test_validation_sees_the_same_tokens_at_every_length(batches):
    made = batches(objective="masked")
    short, long = made.to_validate(64), made.to_validate(128)
    for name in short:
        assert torch.equal(short[name].flatten(), long[name].flatten())
    parts = [batches(rank, 3, objective="masked").to_validate(64)["labels"] for rank in range(3)]
    assert {len(part) for part in parts} == {3}
    together = torch.stack(parts, 1).flatten(0, 1)
    assert torch.equal(together[:8], short["labels"])
    assert (together[8:] == -100).all()
