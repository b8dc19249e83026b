import gzip
import io
import json
import subprocess
import sys

import numpy as np
import pytest

from bench.batching.corpora import wikitext
from seqwarm_kernels import cli
from seqwarm_kernels.data import BatchPlanner, write_chunks
from seqwarm_kernels.data.files.remote import check_location, write_file
from seqwarm_kernels.data.padding import BatchingSettings, TextCorpus, compare, count_tokens

from ..support.pages import check_page
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


def test_the_table(text, capsys):
    assert run("--text", text, "--max-tokens", 400, "--window", 800) == 0
    out = capsys.readouterr().out
    assert "800 lines in 1 file, blank ones not counted." in out
    assert "Tokens: words between spaces; 20 per line on average, 40 at most." in out
    rows = [line for line in out.splitlines() if "%" in line]
    assert "greedy: the longest items first" in out
    assert [row.split("  ")[0] for row in rows] == [
        "random batches of 32",
        "window of 320, batches of 32",
        "budget 400, window 800, greedy",
        "budget 400, window 800, BatchPlanner",
        "budget 400, window 800, packed",
    ]


def test_the_numbers(text, capsys):
    found = as_json(capsys, "--text", text, "--max-tokens", 400, "--window", 800)
    assert (found["items"], found["longest"], found["truncated"]) == (800, 40, 0)
    random, window, greedy, ours, packed = found["batchings"]
    tokens = 20 * sum(range(1, 41))
    assert {each["tokens"] for each in found["batchings"]} == {tokens}
    for each in found["batchings"]:
        assert each["padding"] == pytest.approx(1 - tokens / each["padded_tokens"])
    assert (random["batches"], window["batches"]) == (25, 25)
    assert random["padding"] > 0.4 > window["padding"] > greedy["padding"] >= ours["padding"] > 0
    assert ours["batches"] <= greedy["batches"]
    assert packed["padding"] == 0
    assert packed["budget_used"] == tokens / (packed["batches"] * 400) > 0.97


def test_items_longer_than_the_budget_are_truncated(text, capsys):
    found = as_json(capsys, "--text", text, "--max-tokens", 30, "--window", 800)
    assert found["truncated"] == 200
    assert found["batchings"][3]["tokens"] == 20 * (sum(range(1, 31)) + 10 * 30)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_bars_are_for_terminals(text, monkeypatch, is_terminal):
    errors = io.StringIO()
    errors.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", errors)
    assert run("--text", text) == 0
    shown = errors.getvalue()
    assert ("count tokens" in shown) == is_terminal
    assert shown.rpartition("\r")[0].rpartition("\r")[2].strip() == ""  # cleared at the end


def test_numbers_computed_by_hand():
    """Ten items in their random order, batches of four, sorted in windows of eight."""
    lengths = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    settings = BatchingSettings(batch_size=4, short_window=8, max_tokens=20, window=10)
    random, window, greedy, ours, packed = compare(lengths, settings)
    assert random.items.tolist() == [4, 4, 2]
    assert random.tokens.sum() == 55
    assert window.items.tolist() == [4, 4, 2]
    assert window.padded_tokens[:2].sum() <= random.padded_tokens[:2].sum()
    assert greedy.items.tolist() == [2, 2, 3, 3]  # 10 and 9, 8 and 7, 6 to 4, 3 to 1
    assert greedy.padded_tokens.tolist() == [20, 16, 18, 9]
    assert greedy.padding == 1 - 55 / 63
    assert ours.padded_tokens.sum() <= 63
    assert packed.padding == 0
    assert len(packed.items) == 3
    assert packed.budget_used == 55 / 60


def test_paragraphs_folders_and_compressed_files(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one\ntwo three\n\n \nfour\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.rst.gz").write_bytes(gzip.compress(b"five\n\nsix\n"))
    (tmp_path / ".hidden").write_text("not this one")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xff")
    (tmp_path / "zeros.bin").write_bytes(bytes(10))
    (tmp_path / "broken.gz").write_bytes(b"not gzip")
    found = as_json(capsys, "--text", tmp_path, "--items", "paragraph")
    assert (found["items"], found["files"], found["not_text"], found["longest"]) == (4, 2, 2, 3)
    assert [problem.partition(":")[0] for problem in found["damaged"]] == [str(tmp_path / "broken.gz")]
    assert as_json(capsys, "--text", tmp_path)["items"] == 5
    assert run("--text", tmp_path) == 0
    out = capsys.readouterr().out
    assert "5 lines in 2 files, blank ones not counted.\nSkipped, not text: 2 files.\n" in out
    assert f"Skipped, damaged: {tmp_path / 'broken.gz'}: the compressed file is damaged: " in out
    assert "JSON" not in out


def test_a_link_to_nothing_is_counted_as_damaged(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b.txt").symlink_to("nowhere")
    found = as_json(capsys, "--text", tmp_path)
    assert (found["items"], found["damaged"]) == (
        1,
        [f"{tmp_path / 'b.txt'}: cannot be read: No such file or directory"],
    )


def test_a_folder_with_only_a_truncated_file(tmp_path, capsys):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one two three\n" * 99)[:-9])
    assert run("--text", tmp_path) == 2
    message = f"no text found in {tmp_path}; {tmp_path / 'a.txt.gz'}: the compressed file is truncated"
    assert message in capsys.readouterr().err


def test_json_is_counted_as_plain_text(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    assert as_json(capsys, "--text", tmp_path)["longest"] == 2
    assert run("--text", tmp_path) == 0
    assert "1 file of JSON: each line is counted as plain text, JSON syntax included." in capsys.readouterr().out


def test_partial_files_are_not_read(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "a.txt.0123.partial").write_text("two\n")
    assert as_json(capsys, "--text", tmp_path)["items"] == 1
    assert as_json(capsys, "--text", tmp_path)["not_text"] == 0


@pytest.mark.slow
def test_a_closed_pipe_is_not_an_error(text):
    command = [sys.executable, "-m", "seqwarm_kernels", "padding", "--text", text]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


def test_items_without_tokens_take_a_slot_in_every_padded_batch():
    lengths = np.array([0, 0, 0, 0, 3])
    random, window, greedy, ours, packed = compare(
        lengths, BatchingSettings(batch_size=2, short_window=4, max_tokens=3)
    )
    for each in (random, window, greedy, ours):
        assert each.padded_tokens.min() > 0
        assert each.tokens.sum() == 3
    assert greedy.padded_tokens.tolist() == [3, 3, 1] or greedy.padded_tokens.sum() >= 7
    assert ours.padded_tokens.sum() == BatchPlanner(3).plan(lengths).padded_tokens.sum() == 7
    assert packed.padding == 0


def test_a_corpus_without_tokens(tmp_path, text, monkeypatch, capsys):
    monkeypatch.setattr(
        "seqwarm_kernels.data.padding.count_tokens", lambda items, _: (np.zeros(len(items), int), "none")
    )
    found = as_json(capsys, "--text", text)
    assert [each["padding"] for each in found["batchings"]] == [1.0, 1.0, 1.0, 1.0, 0.0]
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert run("--text", text, "--figure", tmp_path / "figure.png") == 0


@pytest.mark.parametrize(
    ("tokenizer", "expected", "counted"),
    [("whitespace", [2, 1], "words between spaces"), ("bytes", [6, 3], "bytes")],
)
def test_tokenizers_without_a_package(tokenizer, expected, counted):
    lengths, words = count_tokens(["äb  c", "abc"], tokenizer)
    assert lengths.tolist() == expected
    assert words == counted


def test_a_tokenizer_trained_on_the_text():
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    items = ["the cat and the dog", "the dog", "€"] * 50
    lengths, words = count_tokens(items, "bpe")
    assert lengths.tolist()[:2] == [5, 2]
    assert "byte-level BPE of " in words
    assert "trained on this text" in words


def test_a_tokenizer_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    inner = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "?": 2}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="?").save_pretrained(tmp_path)
    lengths, words = count_tokens(["a b a", "a"], str(tmp_path))
    assert lengths.tolist() == [4, 2]
    assert words == str(tmp_path)


def test_a_figure(text, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "figure.png"
    assert run("--text", text, "--figure", path) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_page_has_the_batches_and_how_it_was_made(text, tmp_path, capsys):
    pytest.importorskip("plotly", reason="plotly is not installed")
    path = tmp_path / "padding.png"
    found = as_json(capsys, "--text", text, "--max-tokens", 400, "--seed", 5, "--figure", path)
    page = check_page(path.with_suffix(".html"))
    padding, sizes, items = map(page.traces, range(3))
    settings = BatchingSettings(max_tokens=400, seed=5)
    lengths = np.array([1 + number % 40 for number in range(800)])
    for expected, each in zip(compare(lengths, settings), found["batchings"], strict=True):
        shares = 1 - expected.tokens / expected.padded_tokens
        middle = np.quantile(shares, 0.5, method="inverted_cdf")
        assert padding[each["name"]][100] == pytest.approx((0.5, middle))
        assert [value for _, value in sizes[each["name"]]][:: 200] == [
            expected.padded_tokens.min(), expected.padded_tokens.max(),
        ]  # fmt: skip
        assert f"{each['padding']:.1%}" in page.text
    assert (items["items"][0], items["items"][-1]) == ((0, 1), (1, 40))
    assert "seed\n5\n" in page.text
    assert "torch 2" in page.text
    assert f"seqwarm padding --text {text} --max-tokens 400 --seed 5" in page.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nothing.txt"], "no such file or folder: nothing.txt"),
        (["--text", "bad.txt"], "bad.txt, line 1: invalid UTF-8"),
        (["--text", "zero.txt"], "zero.txt, line 1: not text: it holds a NUL character"),
        (["--text", "blank.txt"], "no text found in blank.txt"),
        (["--text", "good.txt", "--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--text", "good.txt", "--max-tokens", str(2**70)], f"--max-tokens must be at most {2**31 - 1}, got {2**70}"),
        (["--text", "good.txt", "--batch-size", str(2**70)], f"--batch-size must be at most {2**31 - 1}, got {2**70}"),
        (["--text", "good.txt", "--window", "-1"], "--window must be at least 1, got -1"),
        (["--text", "good.txt", "--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--text", "good.txt", "--figure", "no/folder.png"], "--figure must be in an existing folder"),
    ],
)
def test_errors(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name, content in {"bad": b"\xff", "zero": b"a\0", "blank": b"\n \n", "good": b"a b\nc\n"}.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("seqwarm padding: error: ")
    assert message in error
    assert "Traceback" not in error


def test_an_unknown_tokenizer(text, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    assert run("--text", text, "--tokenizer", "./nowhere") == 2
    error = capsys.readouterr().err
    assert (
        "--tokenizer must be one of whitespace, bytes, bpe, or a name that transformers can load, got './nowhere'"
        in error
    )


@pytest.mark.parametrize(
    ("blocked", "arguments", "message"),
    [
        ("tokenizers", ["--tokenizer", "bpe"], 'pip install "tokenizers"'),
        ("transformers", ["--tokenizer", "roberta-base"], 'pip install "transformers"'),
        ("matplotlib", ["--figure", "a.png"], 'pip install "seqwarm_kernels[demo]"'),
        ("plotly", ["--figure", "a.png"], 'pip install "seqwarm_kernels[demo]"'),
    ],
)
def test_packages_that_are_missing(text, monkeypatch, capsys, blocked, arguments, message):
    monkeypatch.setitem(sys.modules, blocked, None)
    assert run("--text", text, *arguments) == 1
    assert message in capsys.readouterr().err


def test_an_unknown_unit(text):
    with pytest.raises(ValueError, match="unit must be one of line, paragraph, got 'page'"):
        TextCorpus([text], "page")


@pytest.mark.slow
@pytest.mark.skipif(WIKITEXT is None, reason="SEQWARM_TEST_DATA does not name a folder with wikitext-2/valid.txt")
def test_on_wikitext(capsys):
    """The table of the blog post on a small part of its corpus: 67 %, 21 %, and at most 10 % with one window."""
    found = as_json(capsys, "--text", WIKITEXT)
    random, window, greedy, ours, packed = found["batchings"]
    assert random["padding"] == pytest.approx(0.67, abs=0.03)
    assert window["padding"] == pytest.approx(0.21, abs=0.02)
    assert ours["padding"] <= 0.1 < greedy["padding"]
    assert ours["batches"] <= 1.05 * greedy["batches"]
    assert packed["padding"] == 0


# ---- data sets


@pytest.fixture(params=["flat", "ends", "megatron", "mds", "parquet", "parquet file", "s3", "chunks"])
def data_set(request, tmp_path):
    """Options for a data set, and the lengths of its documents."""
    made = documents(300)
    lengths = [len(document) for document in made]
    if request.param == "flat":
        return [write_llm_c(tmp_path, made), "--end-token", END], lengths
    if request.param == "ends":
        np.save(tmp_path / "ends.npy", np.cumsum(lengths))
        return [write_npy(tmp_path, made), "--document-ends", tmp_path / "ends.npy"], lengths
    if request.param == "megatron":
        return [write_megatron(tmp_path, made).with_suffix(".bin")], lengths
    if request.param == "mds":
        return [write_mds(tmp_path, made, encoding="bytes"), "--column", "tokens", "--dtype", "uint16"], lengths
    path, texts = tmp_path / "chunks", ["a" * length for length in lengths]
    if request.param.startswith("parquet"):
        pytest.importorskip("pyarrow")
        write_chunks(texts, path, 100, format="parquet", length_fn=len, progress=False)
        if request.param == "parquet file":
            write_chunks(texts, path := tmp_path / "one", format="parquet", length_fn=len, progress=False)
            path = path / "chunk-000000.parquet"
        is_folder = request.param == "parquet"  # of write_chunks, which says the column of lengths
        return [path, *([] if is_folder else ["--column", "text", "--length-column", "length"])], lengths
    if request.param == "s3":
        request.getfixturevalue("s3")
        path = f"s3://bucket/{tmp_path.name}"
    write_chunks(texts, path, 100, length_fn=len, progress=False)
    return [path], lengths


def test_a_data_set(data_set, capsys):
    options, lengths = data_set
    found = as_json(capsys, "--data", *options, "--max-tokens", 400)
    assert (found["items"], found["longest"], found["unit"]) == (300, max(lengths), "document")
    assert found["batchings"][0]["tokens"] == sum(lengths)
    assert found["paths"] == [str(options[0])]
    assert run("--data", *options) == 0
    out = capsys.readouterr().out
    assert f"300 documents in {options[0]}, read by {found['source']}.\n" in out
    assert f"per document on average, {max(lengths)} at most" in out


def test_several_files_of_a_data_set(tmp_path, capsys):
    paths = [write_llm_c(tmp_path, documents(count), name=f"{count}.bin") for count in (10, 20)]
    assert as_json(capsys, "--data", *paths, "--end-token", END)["items"] == 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--end-token or --start-token or --document-ends must be given, one of them, got none"),
        (["--end-token", "7", "--column", "a"], "--column is not an option of TokenSource"),
        (["--end-token", "7", "--dtype", "float32"], "--dtype must be a NumPy dtype of ints such as 'uint16'"),
        (["--end-token", "8"], "token 8 is not among"),
    ],
)
def test_options_that_do_not_fit_a_data_set(tmp_path, capsys, options, message):
    path = write_flat(tmp_path, documents(30))
    assert run("--data", path, *options) == 2
    assert message in capsys.readouterr().err


def test_text_at_a_url(text, s3, capsys):
    url = check_location("url", "s3://bucket/text")
    write_file(url / text.name, text.read_bytes())
    found, local = (as_json(capsys, "--text", place) for place in (url, text))
    assert found["batchings"] == local["batchings"]
    assert found["files"] == local["files"]


def test_options_of_data_sets_for_text(text, capsys):
    assert run("--text", text, "--dtype", "uint16") == 2
    assert "--dtype needs --data, got --text" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nothing.bin", "nothing"])
def test_a_data_set_that_is_missing(tmp_path, capsys, name):
    assert run("--data", tmp_path / name) == 2
    assert f"no such file or folder: {tmp_path / name}" in capsys.readouterr().err


def test_a_folder_that_is_no_data_set(tmp_path, capsys):
    write_flat(tmp_path, documents(3))
    assert run("--data", tmp_path) == 2
    assert "or folders with manifest.json of write_chunks, index.json of MDS shards or Parq" in capsys.readouterr().err


def test_parquet_files_of_text_without_lengths(tmp_path, capsys):
    pytest.importorskip("pyarrow")
    write_chunks(["a"], tmp_path, format="parquet", progress=False)
    assert run("--data", tmp_path) == 2
    message = (
        f"{tmp_path / 'chunk-000000.parquet'} has none: call count_lengths, or name their column with --length-column"
    )
    assert message in capsys.readouterr().err


def test_a_file_of_tokens_in_a_folder_that_cannot_be_written(tmp_path, capsys):
    path, options = write_flat(tmp_path, documents(3)), ["--end-token", END]
    index = tmp_path / f"train.bin.end_token-{END}.npz"
    index.mkdir()
    assert run("--data", path, *options) == 2
    assert f"--index-folder must be a folder that can be written, got {tmp_path}" in capsys.readouterr().err
    assert as_json(capsys, "--data", path, *options, "--index-folder", tmp_path / "indices")["items"] == 3
