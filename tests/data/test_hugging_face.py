"""Sources over the real `datasets`, if it is installed."""

import json
import random

import pytest

from seqwarm_kernels.data.sources.sequence_source import SequenceSource
from seqwarm_kernels.data.sources.stream_source import StreamSource

from ..support.tiers import first_fast

datasets = pytest.importorskip("datasets", reason="datasets is not installed")

TEXTS = [f"item {number}" for number in range(500)]


@pytest.fixture(scope="module")
def dataset():
    return datasets.Dataset.from_dict({"text": TEXTS})


def texts(items):
    return [item["text"] for item in items]


def test_map_style(dataset):
    assert sorted(texts(SequenceSource(dataset))) == sorted(TEXTS)
    assert texts(SequenceSource(dataset, shuffle=False)) == TEXTS


@pytest.mark.parametrize("change", first_fast(["files shuffled", "unchanged", "mapped", "filtered"]))
@pytest.mark.parametrize("shuffle", first_fast([True, False]))
def test_a_stream_resumes_from_any_position(dataset, change, shuffle):
    def make():
        stream = dataset.to_iterable_dataset(num_shards=5)
        if change == "mapped":
            stream = stream.map(lambda item: {"text": item["text"] + "!"})
        elif change == "filtered":
            stream = stream.filter(lambda item: item["text"] != "item 77")
        elif change == "files shuffled":
            stream = stream.shuffle(seed=1, buffer_size=1)
        return StreamSource(stream, buffer_size=64, shuffle=shuffle, infinite=True)

    uninterrupted = iter(make())
    expected = [next(uninterrupted) for _ in range(1200)]
    assert len({item["text"] for item in expected}) == (499 if change == "filtered" else 500)
    for position in random.Random(0).sample(range(1200), 4):
        source = make()
        iterator = iter(source)
        for _ in range(position):
            next(iterator)
        restored = make()
        restored.load_state_dict(json.loads(json.dumps(source.state_dict())))
        iterator = iter(restored)
        assert [next(iterator) for _ in expected[position:]] == expected[position:]


def test_ranks_share_a_stream(dataset):
    parts = [
        texts(StreamSource(dataset.to_iterable_dataset(num_shards=3), buffer_size=64, rank=rank, world_size=4))
        for rank in range(4)
    ]
    assert sorted(text for part in parts for text in part) == sorted(TEXTS)
    assert {len(part) for part in parts} == {125}


def test_a_shuffle_buffer_is_rejected(dataset):
    with pytest.raises(ValueError, match="dataset must not have a shuffle buffer"):
        StreamSource(dataset.to_iterable_dataset().shuffle(seed=1).map(lambda item: item))
