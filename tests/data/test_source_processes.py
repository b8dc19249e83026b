"""Processes that read a source together, and processes that are killed: each document is served once."""

import functools
import json
import multiprocessing
import os
import uuid

import numpy as np
import pytest
from torch.utils.data import DataLoader

from seqwarm_kernels.data import (
    BatchPlanner,
    ChunkSource,
    ItemDataset,
    LengthBatchStream,
    PaddedCollator,
    Prepare,
    ResumableLoader,
    visible_files,
    write_chunks,
)
from seqwarm_kernels.data.files.remote import check_location
from seqwarm_kernels.utils.files import write_atomically

from ..support.kills import KILLS, assert_kills_change_nothing
from ..support.ranks import join_group, leave_group, run_ranks
from ..support.tiers import first_fast
from .data_sets import FORMATS, NEEDS
from .token_files import documents, need_mds, numbers

FORK = multiprocessing.get_context("fork")
EPOCHS = 2
SAVED_AFTER = 17  #: items; few states are saved, so that most kills hit the reading. No size of a chunk is a multiple.
DOCUMENTS = documents(600, longest=10)


def written_as(name, folder):
    if NEEDS.get(name) == "streaming":
        need_mds()
    return FORMATS[name][0](folder, DOCUMENTS)


# ---- two ranks, each with workers


def loader(name, path):
    stream = LengthBatchStream(FORMATS[name][1](path), BatchPlanner(200), window=100, remainder="empty")
    prepare = Prepare(PaddedCollator())
    return ResumableLoader(DataLoader(ItemDataset(), batch_sampler=stream, collate_fn=prepare, num_workers=2))


def documents_of(batch):
    rows = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [row[mask.bool()].tolist() for row, mask in rows if mask.any()]  # an empty batch has none


def serve(rank, port, name, path, folder):
    """An epoch, interrupted after some batches. Both ranks open the files at the same time, and search documents."""
    join_group(rank, port)
    first, seen = loader(name, path), []
    for number, batch in enumerate(first):
        seen += documents_of(batch)
        if number == 4:
            break
    second = loader(name, path)
    second.load_state_dict(first.state_dict())
    for batch in second:
        seen += documents_of(batch)
    (folder / f"{rank}.json").write_text(json.dumps([numbers(seen), sum(map(len, seen))]))
    leave_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chunks", "flat", "zipped mds"])
def test_two_processes_see_every_document_once(tmp_path, name):
    run_ranks(serve, name, written_as(name, tmp_path), tmp_path)
    (one, tokens), (other, more) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert sorted(one + other) == list(range(len(DOCUMENTS)))
    assert min(len(one), len(other)) > 100
    assert tokens + more == sum(map(len, DOCUMENTS))


# ---- kills


def read(name, folder):
    """Read the epochs of a source, or the rest of them. The state is saved now and then."""
    place = json.loads((folder.parent / "place.json").read_text())
    os.environ |= {**place["environment"], "XDG_CACHE_HOME": str(folder / "cache")}  # a kill may hit a download
    source = FORMATS[name][1](place["path"], seed=3)
    path, seen = folder / "progress.json", []
    if path.exists():
        saved = json.loads(path.read_bytes())
        source.load_state_dict(saved["state"])
        seen = saved["seen"]
    while source.epoch < EPOCHS:
        for item in source:
            seen.append(np.asarray(item).tolist())
            if len(seen) % SAVED_AFTER == 0:
                write_atomically(path, json.dumps({"seen": seen, "state": source.state_dict()}).encode())
    write_atomically(folder / "seen.json", json.dumps(seen).encode())


def assert_same_items(one, other):
    seen = [json.loads((folder / "seen.json").read_bytes()) for folder in (one, other)]
    assert seen[0] == seen[1]
    first, second = seen[0][: len(seen[0]) // 2], seen[0][len(seen[0]) // 2 :]
    assert sorted(first) == sorted(second) != first != second
    assert sorted(numbers(first)) == list(range(len(DOCUMENTS)))


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("where", ["local", pytest.param("s3", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", first_fast(["chunks", "parquet", "flat", "zipped mds", "stream"]))
def test_kills(request, tmp_path, name, where, kills):
    path, environment = written_as(name, tmp_path), {}
    if where == "s3":
        if name == "stream":
            pytest.skip("takes no path")
        environment = request.getfixturevalue("s3").environment
        path = uploaded(tmp_path, path)
    (tmp_path / "place.json").write_text(json.dumps({"path": str(path), "environment": environment}))
    use = functools.partial(read, name)
    assert_kills_change_nothing(tmp_path, use, assert_same_items, kills=kills, context=FORK)


def uploaded(folder, path):
    """Copy a folder to S3. Returns the URL of `path`, which is below the folder."""
    import s3fs

    name = uuid.uuid4().hex
    s3fs.S3FileSystem(skip_instance_cache=True).put(f"{folder}/", f"bucket/{name}/", recursive=True)
    return f"s3://bucket/{name}/{path.relative_to(folder)}"


TEXTS = [f"text {number} " * (number % 9) + "." for number in range(600)]


def write(format, folder):
    """Write chunks, or go on with it."""
    place = json.loads((folder.parent / "place.json").read_text())
    os.environ |= place["environment"]
    if not (folder / "target.json").exists():
        target = f"{place['url']}/{uuid.uuid4().hex}" if place["url"] else str(folder / "new")
        write_atomically(folder / "target.json", json.dumps(target).encode())
    write_chunks(TEXTS, written(folder), 50, length_fn=len, progress=False, format=format)


def written(folder):
    return check_location("folder", json.loads((folder / "target.json").read_bytes()))


def assert_same_files(one, other):
    first, second = written(one), written(other)
    names = [path.name for path in visible_files(first)]
    assert names == [path.name for path in visible_files(second)]
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize(("format", "where"), first_fast([("text", "local"), ("text", "s3"), ("parquet", "local")]))
def test_kills_of_writers(request, tmp_path, format, where, kills):
    """A killed process leaves no file that is not whole, and the next one ends with the same files."""
    if format == "parquet":
        pytest.importorskip("pyarrow")
    environment, url = {}, None
    if where == "s3":
        environment, url = request.getfixturevalue("s3").environment, f"s3://bucket/{uuid.uuid4().hex}"
    (tmp_path / "place.json").write_text(json.dumps({"url": url, "environment": environment}))
    use = functools.partial(write, format)
    assert_kills_change_nothing(tmp_path, use, assert_same_files, kills=kills, context=FORK)


def write_all(folder):
    write_chunks(TEXTS, folder, 10, length_fn=len, progress=False)


def test_two_processes_write_into_one_folder_at_once(tmp_path):
    running = [FORK.Process(target=write_all, args=(tmp_path / "chunks",)) for _ in range(2)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0, 0]
    source = ChunkSource(tmp_path / "chunks", shuffle=False, with_lengths=True)
    assert list(source) == [(text, len(text)) for text in TEXTS]
