"""Every argument of every public name is checked first, by an error that names it."""

import itertools
import json

import numpy as np
import pytest
import torch

from seqwarm_kernels import data
from seqwarm_kernels.data import padding

from ..support.arguments import JUNK, complaints
from .made import ListSource, Stream
from .token_files import END, documents, need_mds, write_flat, write_mds, write_megatron

#: More junk: `in` compares an array item by item, and NumPy reads bytes and refuses gradients.
MORE_JUNK = [
    np.array([1, 2]),
    np.float64(1.5),
    bytearray(b"x"),
    torch.ones(3, requires_grad=True),
    torch.ones(3, dtype=torch.bfloat16),
    torch.ones(3, dtype=torch.int64, device="meta"),
]

ITEMS = [[1] * length for length in (1, 2, 3, 4)]
LENGTHS = [len(item) for item in ITEMS]

#: Plain records that the package makes, a protocol, a class without arguments, and names whose arguments are refused by
#: Python or NumPy where they are used.
NOT_CALLED = {
    *("ChunkError", "ItemDataset", "Piece", "PieceDataset", "Plan", "Prepare", "ResumableLoader", "Source"),
    *("batch_state", "cut_item", "progress_bar"),
}


def planner():
    return data.BatchPlanner(8)


def sampler(**options):
    return data.LengthBatchSampler(LENGTHS, planner(), **options)


def stream():
    return data.LengthBatchStream(ListSource(ITEMS), planner())


def node(name):
    pytest.importorskip("torchdata.nodes")
    from seqwarm_kernels.data import torchdata_nodes

    return getattr(torchdata_nodes, name)


def results():
    return padding.compare(LENGTHS, padding.BatchingSettings())


SHARED = {"seed": 0, "shuffle": True, "rank": 0, "world_size": 1, "infinite": False}

#: By name: what is called, and a function of a folder that returns valid arguments.
CALLS = {
    "BatchPlanner": (
        data.BatchPlanner,
        lambda _: (
            {"max_tokens": 8, "batch_size": 2, "multiple_of": 1, "max_length": 8, "too_long": "reject"}
            | {"warmup": None, "packed": False}
        ),
    ),
    "BatchPlanner.plan": (planner().plan, lambda _: {"lengths": LENGTHS, "max_length": 8, "seeds": [0]}),
    "ChunkSource": (
        data.ChunkSource,
        lambda folder: (
            {**SHARED, "paths": chunks(folder), "buffer_chunks": 1, "with_lengths": True} | {"on_error": "raise"}
        ),
    ),
    "LengthBatchSampler": (
        data.LengthBatchSampler,
        lambda _: {**SHARED, "lengths": LENGTHS, "planner": planner(), "window": 2, "remainder": "drop"},
    ),
    "LengthBatchSampler.set_epoch": (sampler().set_epoch, lambda _: {"epoch": 0}),
    "LengthBatchStream": (
        data.LengthBatchStream,
        lambda _: (
            {"source": ListSource(ITEMS), "planner": planner(), "window": 2, "shuffle": True, "seed": 0}
            | {"rank": 0, "world_size": 1, "remainder": "drop"}
        ),
    ),
    "MDSSource": (
        data.MDSSource,
        lambda folder: {**SHARED, "folders": mds(folder), "column": "tokens", "dtype": "uint16", "buffer_size": 2},
    ),
    "MegatronSource": (
        data.MegatronSource,
        lambda folder: {**SHARED, "prefixes": write_megatron(folder, documents(3)), "buffer_size": 2},
    ),
    "PackedCollator": (data.PackedCollator, lambda _: {"max_tokens": 8}),
    "PaddedCollator": (data.PaddedCollator, lambda _: {"pad_token_id": 0, "multiple_of": 1, "max_tokens": 8}),
    "ParquetSource": (
        data.ParquetSource,
        lambda folder: (
            {**SHARED, "paths": parquet(folder), "column": "text", "length_column": "length", "buffer_chunks": 1}
            | {"with_lengths": True, "on_error": "raise"}
        ),
    ),
    "SequenceSource": (data.SequenceSource, lambda _: {**SHARED, "sequence": ITEMS}),
    "SequenceSource.lengths": (data.SequenceSource(ITEMS).lengths, lambda _: {"length": len}),
    "StreamSource": (data.StreamSource, lambda _: {**SHARED, "dataset": Stream(ITEMS), "buffer_size": 2}),
    "TokenSource": (
        data.TokenSource,
        lambda folder: (
            {**SHARED, "paths": write_flat(folder, documents(3)), "end_token": END, "start_token": None}
            | {"document_ends": None, "dtype": "uint16", "index_folder": folder / "index", "buffer_size": 2}
        ),
    ),
    "count_lengths": (
        data.count_lengths,
        lambda folder: {"paths": parquet(folder), "length_fn": len, "column": "text"},
    ),
    "read_uncompressed": (data.read_uncompressed, lambda folder: {"path": text_file(folder)}),
    "visible_files": (data.visible_files, lambda folder: {"folder": folder, "onerror": print}),
    "write_chunks": (
        data.write_chunks,
        lambda folder: (
            {"items": ["a", "b"], "folder": folder / "new", "items_per_chunk": 1, "format": "text"}
            | {"compression": "gz", "length_fn": len, "progress": False}
        ),
    ),
    "padding.BatchingSettings": (
        padding.BatchingSettings,
        lambda _: {"batch_size": 2, "short_window": 4, "max_tokens": 8, "window": 4, "seed": 0},
    ),
    "padding.DataSet": (padding.DataSet, lambda folder: {"paths": [write_megatron(folder, documents(3))]}),
    "padding.TextCorpus": (padding.TextCorpus, lambda folder: {"paths": [text_file(folder)], "unit": "line"}),
    "padding.compare": (padding.compare, lambda _: {"lengths": LENGTHS, "settings": padding.BatchingSettings()}),
    "padding.count_tokens": (padding.count_tokens, lambda _: {"items": ["a b"], "tokenizer": "bytes"}),
    "padding.table": (padding.table, lambda _: {"results": results()}),
    "padding.draw": (
        padding.draw,
        lambda folder: {"lengths": LENGTHS, "results": results(), "token_kind": "words", "path": folder / "a.png"},
    ),
}

#: Valid values that would read a file that does not exist, or ask the network.
VALID = {
    *(("read_uncompressed", "path"), ("padding.count_tokens", "tokenizer"), ("padding.draw", "path")),
    *(("MDSSource", "folders"), ("padding.DataSet", "paths"), ("MegatronSource", "prefixes"), ("TokenSource", "paths")),
}


def text_file(folder):
    path = folder / "a.txt"
    path.write_text("a\nb\n")
    return path


def chunks(folder):
    data.write_chunks(["a", "bc"], folder / "chunks", 1, length_fn=len)
    return folder / "chunks"


def parquet(folder):
    pytest.importorskip("pyarrow")
    data.write_chunks(["a", "bc"], folder / "parquet", 1, format="parquet", length_fn=len)
    return folder / "parquet"


def mds(folder):
    need_mds()
    return write_mds(folder, documents(3))


def test_every_public_name_is_called():
    assert {name.partition(".")[0] for name in CALLS} - {"padding"} == set(data.__all__) - NOT_CALLED


@pytest.mark.parametrize("name", CALLS)
def test_valid_arguments(name, tmp_path):
    call, arguments = CALLS[name]
    valid = arguments(tmp_path)
    if name == "padding.draw":
        pytest.importorskip("matplotlib")
    call(**valid)


@pytest.mark.parametrize("name", CALLS)
def test_junk(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, arguments = CALLS[name]
    numbers = itertools.count()

    def make():
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        return arguments(folder)

    found = []
    for argument in make():
        junk_values = [
            junk for junk in [*JUNK, *MORE_JUNK] if (name, argument) not in VALID or not isinstance(junk, str)
        ]
        found += complaints(call, make, argument, junk_values)
    assert not found, "\n".join(found)


NUMPY = {"seed": np.int64(3), "rank": np.int32(0), "world_size": np.int64(2)}


@pytest.mark.parametrize(
    "make",
    [
        lambda _: data.LengthBatchSampler(LENGTHS, data.BatchPlanner(np.int64(8)), window=np.int64(2), **NUMPY),
        lambda _: data.LengthBatchSampler(
            LENGTHS, data.BatchPlanner(batch_size=np.int64(2), max_length=np.int64(8), multiple_of=np.int64(2)), **NUMPY
        ),
        lambda _: data.LengthBatchStream(ListSource(ITEMS), planner(), window=np.int64(2), **NUMPY),
        lambda folder: data.ChunkSource(chunks(folder), buffer_chunks=np.int64(1), **NUMPY),
        lambda folder: data.ParquetSource(parquet(folder), buffer_chunks=np.int64(1), **NUMPY),
        lambda folder: data.MegatronSource(write_megatron(folder, documents(3)), buffer_size=np.int64(1), **NUMPY),
        lambda _: data.SequenceSource(ITEMS, **NUMPY),
        lambda _: data.StreamSource(Stream(ITEMS), buffer_size=np.int64(1), **NUMPY),
    ],
)
def test_ints_of_numpy_give_states_of_plain_ints(make, tmp_path):
    made = make(tmp_path)
    if hasattr(made, "set_epoch"):
        made.set_epoch(np.int64(1))
    next(iter(made))
    state = made.state_dict()
    assert json.loads(json.dumps(state)) == state
    other = make(tmp_path)
    other.load_state_dict(state)
    assert other.state_dict() == state


def source_node():
    made = node("SourceNode")(data.SequenceSource(ITEMS))
    made.reset()
    return made


#: By name: makes what has a state, takes the state, and loads one.
STATES = {
    "SequenceSource": (lambda: data.SequenceSource(ITEMS), "state_dict", "load_state_dict"),
    "StreamSource": (lambda: data.StreamSource(Stream(ITEMS)), "state_dict", "load_state_dict"),
    "SourceNode": (source_node, "get_state", "reset"),
}


@pytest.mark.parametrize("name", STATES)
def test_junk_in_states(name):
    make, take, load = STATES[name]
    state = getattr(make(), take)()
    found = []
    for entry in state:
        made = make()

        def loaded(made=made, **entries):
            before = getattr(made, take)()
            try:
                getattr(made, load)(entries)
            except (TypeError, ValueError):
                assert getattr(made, take)() == before
                raise

        junk_values = [junk for junk in [*JUNK, *MORE_JUNK] if junk is not True]  # which is 1
        found += complaints(loaded, lambda: dict(state), entry, junk_values)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("number", [2**53 + 1, 2**62])
def test_huge_numbers_in_states(name, number):
    make, take, load = STATES[name]
    made = make()
    before = getattr(made, take)()
    for entry in before.keys() & {"epoch", "block", "position", "items", "min_length", "batches_served"}:
        with pytest.raises(ValueError, match=f"{entry} must be at most {2**53}, got {number}"):
            getattr(made, load)({**before, entry: number})
        assert getattr(made, take)() == before
