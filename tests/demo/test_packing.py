"""The demo on packed paragraphs."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tqdm import tqdm

from seqwarm_kernels.demo.model import GPT
from seqwarm_kernels.demo.packing import PackedText, Paragraphs
from seqwarm_kernels.demo.records import BASELINE, RUNS, WARMUP
from seqwarm_kernels.demo.report_folder import SUMMARY
from seqwarm_kernels.demo.text import read_corpus
from seqwarm_kernels.demo.training import Trainer, make_scheduler

from .test_training import TINY, train

PACKED = replace(TINY, packing=True)
BUDGET = PACKED.batch_size * PACKED.seq_length


@pytest.fixture
def corpus(text_file):
    return read_corpus((str(text_file),), PACKED.seq_length)


def test_every_byte_belongs_to_one_paragraph(corpus):
    paragraphs = Paragraphs(corpus.training)
    assert torch.cat([paragraphs[index] for index in range(len(paragraphs))]).equal(corpus.training.long())
    assert paragraphs.lengths() == [len(paragraphs[index]) for index in range(len(paragraphs))]
    assert len(Paragraphs(torch.frombuffer(bytearray(b"one\n\ntwo\0three"), dtype=torch.uint8))) == 3


@pytest.mark.parametrize("run", RUNS)
def test_batches_are_full_and_hold_the_text(corpus, run):
    text = bytes(corpus.training.tolist())
    batches = PackedText(corpus.training, PACKED, make_scheduler(run, PACKED))
    for number in range(8):
        batch = batches.next_batch()
        starts = batch["cu_seqlens"].tolist()
        assert batch["input_ids"].shape == batch["labels"].shape == (1, starts[-1])
        assert starts[-1] <= BUDGET
        assert starts[-1] > 0.9 * BUDGET or run == WARMUP  # where the length changes, a batch may be smaller
        limit = PACKED.seq_length if run == BASELINE or number else PACKED.min_seq_length
        for start, end in pairwise(starts):
            ids, labels = batch["input_ids"][0, start:end], batch["labels"][0, start:end]
            assert len(ids) <= limit
            assert bytes(ids.tolist()) in text
            assert labels.tolist() == [*ids[1:].tolist(), -100]


def test_the_model_keeps_packed_sequences_apart():
    torch.manual_seed(0)
    model, ids = GPT(layers=2, heads=2, width=16), torch.randint(256, (1, 12))
    starts = torch.tensor([0, 5, 6, 12], dtype=torch.int32)
    alone = torch.cat([model(part) for part in ids.split([5, 1, 6], 1)], 1)
    torch.testing.assert_close(model(ids, starts), alone)


@pytest.mark.parametrize("run", RUNS)
def test_a_packed_run_learns_and_resumes(corpus, run):
    settings = replace(PACKED, steps=30, evaluations=6)
    unbroken = Trainer(run, settings, corpus)
    records = train(unbroken)
    assert records[-1].validation_loss < records[0].validation_loss - 0.3
    assert records[-1].tokens == settings.total_tokens
    broken = Trainer(run, settings, corpus)
    rest = broken.train(tqdm(disable=True))
    for _ in range(3):
        next(rest)
    state = broken.state_dict()
    resumed = Trainer(run, settings, corpus)
    resumed.load_state_dict(state)
    last = train(resumed)[-1]
    assert last.validation_loss == records[-1].validation_loss


def test_the_command_takes_it(demo, text_file, tmp_path):
    options = ["--text", text_file, "--quick", "--packing", "--steps", 4, "--seq-length", 32, "--device", "cpu"]
    assert demo(*options, "--report", tmp_path / "run") == 0
    assert "packed paragraphs" in (tmp_path / "run" / SUMMARY).read_text()
