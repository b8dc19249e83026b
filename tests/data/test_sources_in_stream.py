"""Sources in a `LengthBatchStream`: every item once per epoch, and restarts that are exact to the batch."""

import json
import operator
import random

import pytest

from seqwarm_kernels.data import (
    BatchPlanner,
    ChunkSource,
    LengthBatchStream,
    SequenceSource,
    StreamSource,
    write_chunks,
)

from ..support.tiers import first_fast
from .made import Stream

ITEMS = ["x" * (1 + number * 7 % 60) + str(number) for number in range(700)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("chunks")
    write_chunks(ITEMS, path, 60, length_fn=len)
    return path


@pytest.fixture(params=["chunks", "chunks with lengths", "sequence", "stream"])
def make(request, folder):
    def make(rank=0, world_size=1, infinite=False):
        length = len
        if request.param == "sequence":
            source = SequenceSource(ITEMS, infinite=infinite)
        elif request.param == "stream":
            source = StreamSource(Stream(ITEMS), buffer_size=90, infinite=infinite)
        else:
            with_lengths = request.param == "chunks with lengths"
            source = ChunkSource(folder, buffer_chunks=2, infinite=infinite, with_lengths=with_lengths)
            length = operator.itemgetter(1) if with_lengths else len
        planner = BatchPlanner(400)
        return LengthBatchStream(
            source, planner, length=length, window=130, rank=rank, world_size=world_size, remainder="empty"
        )

    return make


def texts(batch):
    return [item if isinstance(item, str) else item[0] for item in batch]


def test_an_epoch_has_every_item_once(make):
    stream = make()
    for _ in range(3):
        assert sorted(text for batch in stream for text in texts(batch)) == sorted(ITEMS)


@pytest.mark.parametrize("infinite", first_fast([False, True]))
def test_resumes_from_20_random_positions(make, infinite):
    def batches(stream, count):
        found = []
        while len(found) < count:
            for batch in stream:
                found.append(texts(batch))
                if len(found) == count:
                    break
        return found

    expected = batches(make(infinite=infinite), 180)
    for position in random.Random(0).sample(range(180), 20):
        killed = make(infinite=infinite)
        assert batches(killed, position) == expected[:position]
        resumed = make(infinite=infinite)
        resumed.load_state_dict(json.loads(json.dumps(killed.state_dict())))
        assert batches(resumed, 180 - position) == expected[position:]


def test_two_ranks_share_an_epoch_and_end_together(make):
    parts = [list(make(rank, 2)) for rank in range(2)]
    assert len(parts[0]) == len(parts[1])
    assert sorted(text for part in parts for batch in part for text in texts(batch)) == sorted(ITEMS)
