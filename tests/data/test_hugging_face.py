"""Sources over the real `datasets`, if it is installed."""

import itertools
import json

import pytest

from seqwarm_kernels.data import BatchPlanner, LengthBatchStream
from seqwarm_kernels.data.sources.sequence_source import SequenceSource
from seqwarm_kernels.data.sources.stream_source import StreamSource

datasets = pytest.importorskip("datasets", reason="datasets is not installed")

TEXTS = [f"item {number}" for number in range(200)]


@pytest.fixture(scope="module")
def dataset():
    return datasets.Dataset.from_dict({"text": TEXTS})


def texts(items):
    return [item["text"] for item in items]


def test_map_style(dataset):
    assert sorted(texts(SequenceSource(dataset))) == sorted(TEXTS)
    assert texts(SequenceSource(dataset, shuffle=False)) == TEXTS


def test_a_shuffle_buffer_is_rejected(dataset):
    with pytest.raises(ValueError, match="dataset"):
        StreamSource(dataset.to_iterable_dataset().shuffle(seed=1).map(lambda item: item))


CHANGES = {
    "unchanged": lambda stream: stream,
    "shuffled": lambda stream: stream.shuffle(seed=1, buffer_size=1),
    "filtered": lambda stream: stream.filter(lambda item: item["text"] != "item 77"),
    "skipped": lambda stream: stream.skip(99),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_read_of_a_stream_before(dataset, change):
    """It was left out of the first epoch."""

    def make():
        return CHANGES[change](dataset.to_iterable_dataset(num_shards=3))

    stream = make()
    list(itertools.islice(stream, 70))
    source, fresh = (StreamSource(each, buffer_size=40) for each in (stream, make()))
    epochs = [texts(fresh) for _ in range(2)]
    assert [texts(source) for _ in range(2)] == epochs
    source.load_state_dict(StreamSource(make(), buffer_size=40).state_dict())
    for epoch in epochs:
        head = list(itertools.islice(source, 50))
        restored = StreamSource(stream, buffer_size=40)
        restored.load_state_dict(json.loads(json.dumps(source.state_dict())))
        assert texts(head) + texts(restored) == epoch
        source = restored


def test_a_split_by_rank_is_refused_in_a_stream(dataset):
    """Each rank would take its batches of its own part only."""
    split = pytest.importorskip("datasets.distributed").split_dataset_by_node
    parts = [split(dataset.to_iterable_dataset(num_shards=4), rank, 2).map(lambda item: item) for rank in range(2)]
    sources = [StreamSource(part, buffer_size=64) for part in parts]
    assert sorted(text for source in sources for text in texts(source)) == sorted(TEXTS)
    assert StreamSource(parts[0], world_size=3).world_size == 6
    with pytest.raises(ValueError, match="world_size"):
        LengthBatchStream(sources[0], BatchPlanner(64), length=lambda item: len(item["text"]), rank=0, world_size=2)
    assert StreamSource(dataset.to_iterable_dataset()).world_size == 1
