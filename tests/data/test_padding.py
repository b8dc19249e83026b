"""The comparison of ways of batching, and the command `padding` that prints and draws it."""

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest

from bench.batching.corpora import wikitext
from seqwarm_kernels import cli
from seqwarm_kernels.data import BatchPlanner, padding, write_chunks
from seqwarm_kernels.data.files.remote import check_location, write_file
from seqwarm_kernels.data.padding import compare, count_tokens, read_text

from .token_files import END, documents, write_flat, write_llm_c, write_mds, write_megatron, write_npy

WIKITEXT = wikitext()


@pytest.fixture
def text(tmp_path):
    """Lines of 1 to 40 words, 20 of each."""
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join("word " * (1 + number % 40) for number in range(800)))
    return path


def run(*arguments):
    return cli.main(["padding", *map(str, arguments)])


def as_json(capsys, *arguments):
    assert run(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


# ---- the comparison


def test_numbers_computed_by_hand():
    """Ten items in their random order, batches of four, sorted in windows of eight."""
    lengths = np.arange(1, 11)
    random, window, greedy, ours, packed = compare(lengths, batch_size=4, short_window=8, max_tokens=20, window=10)
    assert random.items.tolist() == window.items.tolist() == [4, 4, 2]
    assert random.tokens.sum() == 55
    assert window.padded_tokens[:2].sum() <= random.padded_tokens[:2].sum()
    assert sorted(greedy.items.tolist()) == [2, 2, 3, 3]  # 10 and 9, 8 and 7, 6 to 4, 3 to 1
    assert sorted(greedy.padded_tokens.tolist()) == [9, 16, 18, 20]
    assert greedy.padding == 1 - 55 / 63
    assert ours.padded_tokens.sum() <= 63
    assert packed.padding == 0
    assert len(packed.items) == 3
    assert packed.budget_used == pytest.approx(55 / 60)


def test_items_without_tokens_take_a_slot_in_every_padded_batch():
    lengths = np.array([0, 0, 0, 0, 3])
    random, window, greedy, ours, packed = compare(lengths, batch_size=2, short_window=4, max_tokens=3)
    for each in (random, window, greedy, ours):
        assert each.padded_tokens.min() > 0
        assert each.tokens.sum() == 3
    assert ours.padded_tokens.sum() == BatchPlanner(3).plan(lengths).padded_tokens.sum() == 7
    assert packed.padding == 0
    nothing = compare(np.zeros(9, int))
    assert [each.padding for each in nothing] == [1, 1, 1, 1, 0]


@pytest.mark.skipif(WIKITEXT is None, reason="SEQWARM_TEST_DATA does not name a folder with wikitext-2/valid.txt")
def test_on_wikitext(capsys):
    """The table of the blog post on a small part of its corpus: 67 %, 21 %, and at most 9.5 % with one window."""
    random, window, greedy, ours, packed = as_json(capsys, "--text", WIKITEXT)["batchings"]
    assert random["padding"] == pytest.approx(0.67, abs=0.03)
    assert window["padding"] == pytest.approx(0.21, abs=0.02)
    assert round(ours["padding"], 3) <= 0.095 < greedy["padding"]
    assert ours["batches"] == greedy["batches"] == 16
    assert packed["padding"] == 0


# ---- texts


def test_text(text, capsys):
    options = ["--text", text, "--max-tokens", 400, "--window", 800]
    found = as_json(capsys, *options)
    assert (found["items"], found["unit"], found["longest"], found["truncated"]) == (800, "line", 40, 0)
    random, window, greedy, ours, packed = found["batchings"]
    tokens = 20 * sum(range(1, 41))
    assert {each["tokens"] for each in found["batchings"]} == {tokens}
    for each in found["batchings"]:
        assert each["padding"] == pytest.approx(1 - tokens / each["padded_tokens"])
    assert random["padding"] > 0.4 > window["padding"] > greedy["padding"] >= ours["padding"] > packed["padding"] == 0
    assert packed["budget_used"] > 0.97
    cut = as_json(capsys, *options, "--max-tokens", 30)
    assert cut["truncated"] == 200
    assert cut["batchings"][3]["tokens"] == 20 * (sum(range(1, 31)) + 10 * 30)
    assert run(*options, "--max-tokens", 30) == 0
    assert "40 at most, 200 lines truncated to 30." in capsys.readouterr().out
    assert run(*options) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if "%" in line]
    assert [row.split("  ")[0] for row in rows] == [each["name"] for each in found["batchings"]]
    assert [f"{each['padding']:.1%}" in row for each, row in zip(found["batchings"], rows, strict=True)] == [True] * 5


def test_the_figure(text, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "figures" / "padding.svg"
    assert run("--text", text, "--max-tokens", 400, "--figure", path) == 0
    assert path.read_text().startswith("<?xml")


def test_paragraphs_folders_and_compressed_files(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one\ntwo three\n\n \nfour\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.rst.gz").write_bytes(gzip.compress(b"five\n\nsix\n"))
    (tmp_path / ".hidden").write_text("not this one")
    (tmp_path / "a.txt.0123.partial").write_text("nor this one\n")
    for name, content in (("picture.png", b"\x89PNG\xff\xff"), ("zeros.bin", bytes(10)), ("broken.gz", b"not gzip")):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link.txt").symlink_to("nowhere")
    items, skipped = read_text(tmp_path, "paragraph")
    assert items == ["one\ntwo three", "four", "five", "six"]
    assert read_text(tmp_path)[0] == ["one", "two three", "four", "five", "six"]
    names = ("broken.gz", "link.txt", "picture.png", "zeros.bin")
    assert all(any(name in reason for reason in skipped) for name in names)
    assert as_json(capsys, "--text", tmp_path)["skipped"] == skipped
    assert run("--text", tmp_path, "--items", "paragraph") == 0
    assert "\nSkipped 4 files that are damaged or not text, such as " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("tokenizer", "texts", "expected"),
    [
        ("whitespace", ["äb  c", "abc"], [2, 1]),
        ("bytes", ["äb  c", "abc"], [6, 3]),
        ("bpe", ["the cat and the dog", "the dog", "€"] * 50, [5, 2]),  # trained on the text
    ],
)
def test_tokenizers(tokenizer, texts, expected):
    if tokenizer == "bpe":
        pytest.importorskip("tokenizers")
    lengths, _ = count_tokens(texts, tokenizer)
    assert lengths.tolist()[:2] == expected


def test_a_tokenizer_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    inner = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?").save_pretrained(tmp_path)
    lengths, _ = count_tokens(["a b a", "a"], str(tmp_path))
    assert lengths.tolist() == [4, 2]


# ---- what the command writes


@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error(text):
    command = [sys.executable, "-m", "seqwarm_kernels", "padding", "--text", text]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        *((["--text", name], name) for name in ("nothing.txt", "bad.txt", "zero.txt", "blank.txt")),
        (["--text", "good.txt", "--max-tokens", "0"], "max_tokens"),
        (["--text", "good.txt", "--window", "-1"], "window"),
        (["--text", "good.txt", "--dtype", "uint16"], "dtype"),
        (["--text", "good.txt", "--tokenizer", "./nowhere"], "tokenizer"),
        (["--data", "nothing.bin"], "nothing.bin"),
        (["--data", "train.bin"], "end_token"),
        (["--data", "train.bin", "--end-token", "7", "--column", "a"], "column"),
        (["--data", "train.bin", "--end-token", "7", "--dtype", "float32"], "dtype"),
        (["--data", "train.bin", "--end-token", "8"], "token 8"),
        (["--data", "texts"], "count_lengths"),
    ],
)
def test_errors(tmp_path, monkeypatch, capsys, arguments, named):
    if "--tokenizer" in arguments:
        pytest.importorskip("transformers")
    if "texts" in arguments:
        pytest.importorskip("pyarrow")
        write_chunks(["a"], tmp_path / "texts", format="parquet", progress=False)
    monkeypatch.chdir(tmp_path)
    for name, content in {"bad": b"\xff", "zero": b"a\0", "blank": b"\n \n", "good": b"a b\nc\n"}.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    write_flat(tmp_path, documents(30))
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("seqwarm padding: error: ")
    assert named in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("blocked", "arguments"),
    [
        ("tokenizers", ["--tokenizer", "bpe"]),
        ("transformers", ["--tokenizer", "roberta-base"]),
        ("matplotlib", ["--figure", "a.png"]),
    ],
)
def test_packages_that_are_missing(text, monkeypatch, capsys, blocked, arguments):
    monkeypatch.setitem(sys.modules, blocked, None)
    monkeypatch.setattr(padding, "compare", pytest.fail)  # they are named before the work
    assert run("--text", text, *arguments) == 1
    assert "pip install" in capsys.readouterr().err


# ---- data sets


def written(kind, folder):
    """Options for a data set, and the lengths of its documents."""
    made = documents(300)
    lengths, chunks = [len(document) for document in made], folder / "chunks"
    if kind == "ends":
        np.save(folder / "ends.npy", np.cumsum(lengths))
        return [write_npy(folder, made), "--document-ends", folder / "ends.npy"], lengths
    if kind == "mds":
        return [write_mds(folder, made, encoding="bytes"), "--column", "tokens", "--dtype", "uint16"], lengths
    if kind in ("chunks", "parquet", "parquet file"):
        format = "text" if kind == "chunks" else "parquet"
        write_chunks(["a" * length for length in lengths], chunks, 100, format=format, length_fn=len, progress=False)
        if kind == "parquet file":  # a folder of write_chunks says the column of lengths
            return [*chunks.glob("*.parquet"), "--column", "text", "--length-column", "length"], lengths
        return [chunks], lengths
    return [write_llm_c(folder, made), "--end-token", END] if kind == "flat" else [
        write_megatron(folder, made)
    ], lengths


@pytest.mark.parametrize("kind", ["flat", "ends", "megatron", "mds", "parquet", "parquet file", "chunks"])
def test_a_data_set(tmp_path, capsys, kind):
    if kind.startswith("parquet"):
        pytest.importorskip("pyarrow")
    options, lengths = written(kind, tmp_path)
    found = as_json(capsys, "--data", *options, "--max-tokens", 400)
    assert (found["items"], found["longest"], found["unit"]) == (300, max(lengths), "document")
    assert found["batchings"][0]["tokens"] == sum(lengths)


def test_texts_and_data_sets_at_urls(capsys):
    pytest.importorskip("upath")
    texts = [f"line {number} " + "word " * (number % 9) for number in range(60)]
    url = check_location("url", "memory://bucket/padding")
    write_file(url / "text.txt", "\n".join(texts).encode())
    assert as_json(capsys, "--text", url)["batchings"][0]["tokens"] == sum(len(text.split()) for text in texts)
    write_chunks(texts, url / "lengths", 20, length_fn=len, progress=False)
    assert as_json(capsys, "--data", url / "lengths")["batchings"][0]["tokens"] == sum(map(len, texts))


def test_a_file_of_tokens_in_a_folder_that_cannot_be_written(tmp_path, capsys):
    path, options = write_flat(tmp_path, documents(3)), ["--end-token", END]
    index = tmp_path / f"train.bin.end_token-{END}.npz"
    index.mkdir()
    assert run("--data", path, *options) == 2
    assert str(index) in capsys.readouterr().err
    assert as_json(capsys, "--data", path, *options, "--index-folder", tmp_path / "indices")["items"] == 3
