"""Two processes with loaders of two workers see every document once, also after a restart: all sources."""

import json

import pytest
from torch.utils.data import DataLoader

from seqwarm_kernels.data import (
    BatchPlanner,
    ItemDataset,
    LengthBatchStream,
    PaddedCollator,
    Prepare,
    ResumableLoader,
)

from ..support.ranks import join_group, leave_group, run_ranks
from .data_sets import FORMATS
from .token_files import documents, need_mds, numbers

DOCUMENTS = documents(600, longest=10)


def loader(name, path):
    stream = LengthBatchStream(FORMATS[name][1](path), BatchPlanner(200), window=100, remainder="empty")
    return ResumableLoader(
        DataLoader(ItemDataset(), batch_sampler=stream, collate_fn=Prepare(PaddedCollator()), num_workers=2)
    )


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
    state = first.state_dict()
    second = loader(name, path)
    second.load_state_dict(state)
    for batch in second:
        seen += documents_of(batch)
    (folder / f"{rank}.json").write_text(json.dumps([numbers(seen), sum(map(len, seen))]))
    leave_group()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_two_processes_see_every_document_once(tmp_path, name):
    if name == "mds":
        need_mds()
    path = FORMATS[name][0](tmp_path, DOCUMENTS)
    run_ranks(serve, name, path, tmp_path)
    (one, tokens), (other, more) = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert sorted(one + other) == list(range(len(DOCUMENTS)))
    assert min(len(one), len(other)) > 100
    assert tokens + more == sum(map(len, DOCUMENTS))
