"""Files that are cut, changed, or of another version are refused with an error that names the file, and stay."""

import contextlib
import json
import shutil
from functools import partial

import pytest
import torch

from seqwarm_kernels.data import ChunkSource, ParquetSource, write_chunks
from seqwarm_kernels.diagnostics import JsonLines, StepRecord
from seqwarm_kernels.tuning import NoStableSchedule, Validation, tune_schedule

from .mutations import EXAMPLES, changed, damaged, explore, refusal_of

LINES = [f"line {number}" for number in range(20)]


def explore_json(path, kind, examples, *uses):
    """Damage a file. Each use works, or refuses it with an error that names its folder, and leaves it as it is."""
    content = path.read_bytes()

    def check(example):
        path.write_bytes(example if kind == "bytes" else json.dumps(example, default=str).encode())
        before = path.read_bytes()
        for use in uses:
            refusal = refusal_of(use)
            if refusal is not None:
                assert str(path.parent) in refusal
                assert path.read_bytes() == before
            path.write_bytes(before)

    explore(examples, damaged(content) if kind == "bytes" else changed(json.loads(content)), check)


def write_lines(folder, format="text"):
    write_chunks(LINES, folder, 10, length_fn=len, format=format, progress=False)


@pytest.mark.parametrize("kind", ["bytes", "entries"])
@pytest.mark.parametrize("examples", EXAMPLES)
def test_manifest(tmp_path, kind, examples):
    def read_all():
        assert {item for item, _ in ChunkSource(tmp_path, with_lengths=True)} <= set(LINES)

    write_lines(tmp_path)
    explore_json(tmp_path / "manifest.json", kind, examples, read_all, lambda: write_lines(tmp_path))


def read_parquet(folder):
    return list(ParquetSource(folder, length_column="length", with_lengths=True))


@pytest.mark.parametrize("name", ["chunk-000000.txt.gz", "chunk-000000.lengths.npy", "chunk-000000.parquet"])
@pytest.mark.parametrize("examples", EXAMPLES)
def test_chunks_and_lengths(tmp_path, name, examples):
    """Damage is found, or gives other items of the right kind. Writing again mends it."""
    write, read = write_lines, lambda folder: list(ChunkSource(folder, with_lengths=True))
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
        write, read = partial(write_lines, format="parquet"), read_parquet
    write(tmp_path)
    path = tmp_path / name

    def check(example):
        path.write_bytes(example)
        for use in (read, write):
            refusal = refusal_of(partial(use, tmp_path))
            assert refusal is None or str(path) in refusal
        if refusal is None:
            assert len(read(tmp_path)) == 20

    explore(examples, damaged(path.read_bytes()), check)


def test_parquet_whose_columns_are_of_another_kind(tmp_path):
    """A column that is said to have no nulls, with statistics of nulls, must not abort the process."""
    pytest.importorskip("pyarrow")
    write_lines(tmp_path, "parquet")
    path = tmp_path / "chunk-000000.parquet"
    content = path.read_bytes()
    footer = int.from_bytes(content[-8:-4], "little")
    optional, required = 2, 0  # also other numbers of the footer
    for position in range(len(content) - 8 - footer, len(content) - 8):
        if content[position] == optional:
            path.write_bytes(content[:position] + bytes([required]) + content[position + 1 :])
            refusal = refusal_of(lambda: read_parquet(tmp_path))
            assert refusal is None or str(path) in refusal


def test_parquet_whose_column_has_another_name(tmp_path):
    """Checksums do not cover names."""
    pytest.importorskip("pyarrow")
    write_lines(tmp_path, "parquet")
    path = tmp_path / "chunk-000000.parquet"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"text", b"next"))
    write_lines(tmp_path, "parquet")
    assert path.read_bytes() == content


def record(step):
    return StepRecord(step, 1.0, 1.0, False, 1.0, 1.0, 1.0, 1.0, None)


@pytest.mark.parametrize("examples", EXAMPLES)
def test_json_lines(tmp_path, examples):
    path = tmp_path / "monitor.jsonl"
    content = "".join(record(step).to_json() + "\n" for step in (1, 2, 3)).encode()

    def check(example):
        path.write_bytes(example)
        refusal = refusal_of(lambda: JsonLines(path))
        if refusal is not None:
            assert str(path) in refusal
            assert path.read_bytes() == example
            return
        output = JsonLines(path)
        output(record(10))
        output.close()
        assert json.loads(path.read_bytes().splitlines()[-1])["step"] == 10

    explore(examples, damaged(content), check)


def trial(scheduler, end):
    yield Validation(0, 10.0)
    yield Validation(end, 9.0)


def tune(folder):
    return tune_schedule(
        *(trial,), max_seq_length=32, learning_rate_warmup=4, min_seq_lengths=[8], durations=[10], folder=folder,
        progress=False,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["bytes", "entries"])
@pytest.mark.parametrize("pattern", ["configuration.json", "trial_*.json"])
@pytest.mark.parametrize("examples", EXAMPLES)
def test_a_search(tmp_path, kind, pattern, examples):
    def search():
        with contextlib.suppress(NoStableSchedule):  # other perplexities have another outcome
            tune(tmp_path)

    tune(tmp_path)
    (path,) = tmp_path.glob(pattern)
    explore_json(path, kind, examples, search)


def without_weights(path):
    state = torch.load(path, weights_only=True)
    del state["weights"]
    torch.save(state, path)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.fixture(scope="module")
def run_of_gpt2(tmp_path_factory):
    pytest.importorskip("tokenizers")
    from .trainings import train_gpt2

    folder = tmp_path_factory.mktemp("gpt2") / "run"
    train_gpt2(folder)
    return folder


@pytest.mark.parametrize(("name", "content"), [("config.json", '{"size'), ("records.jsonl", "5")])
def test_text_files_of_train_gpt2(tmp_path, name, content):
    pytest.importorskip("tokenizers")
    from experiments.running import load_script

    (tmp_path / name).write_text(content)
    model = load_script().model
    with pytest.raises(model.UserError, match=rf"{name} is damaged, or was written by another version"):
        {"config.json": model.read_config, "records.jsonl": model.read_records}[name](tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [cut, without_weights])
def test_a_checkpoint_of_train_gpt2(tmp_path, run_of_gpt2, damage):
    from .trainings import train_gpt2

    folder = tmp_path / "run"
    shutil.copytree(run_of_gpt2, folder)
    damage(folder / "checkpoint.pt")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match=r"checkpoint.pt is damaged, or was written by") as refused:
        train_gpt2(folder)
    assert type(refused.value).__name__ == "UserError"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
