"""Windows of text, and packed paragraphs."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tqdm import tqdm

from seqwarm_kernels.demo.batches import PackedText, Paragraphs, training_batch, validation_set
from seqwarm_kernels.demo.model import GPT
from seqwarm_kernels.demo.records import BASELINE, RUNS, WARMUP
from seqwarm_kernels.demo.report_folder import SUMMARY
from seqwarm_kernels.demo.text import read_corpus
from seqwarm_kernels.demo.training import Trainer, make_scheduler

from .test_training import TINY, train

TEXT = torch.arange(1000, dtype=torch.int16)  # every token is its own position
PACKED = replace(TINY, packing=True)
BUDGET = PACKED.batch_size * PACKED.seq_length


@pytest.fixture
def corpus(text_file):
    return read_corpus((str(text_file),), PACKED.seq_length)


def test_a_batch_depends_only_on_seed_and_step():
    batch = training_batch(TEXT, seed=3, step=7, batch_size=4, seq_length=16)
    torch.rand(5)
    again = training_batch(TEXT, seed=3, step=7, batch_size=4, seq_length=16)
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    for seed, step in ((3, 8), (4, 7)):
        other = training_batch(TEXT, seed, step, batch_size=4, seq_length=16)
        assert not torch.equal(batch["input_ids"], other["input_ids"])


def test_a_batch_does_not_change_the_random_state():
    before = torch.get_rng_state()
    training_batch(TEXT, seed=0, step=0, batch_size=4, seq_length=16)
    assert torch.equal(before, torch.get_rng_state())


def test_label_is_the_next_token():
    batch = training_batch(TEXT, seed=0, step=0, batch_size=64, seq_length=990)
    assert torch.equal(batch["labels"], batch["input_ids"] + 1)
    assert batch["input_ids"].min() == 0  # the first and the last window are drawn
    assert batch["labels"].max() == 999


@pytest.mark.parametrize(("count", "expected"), [(5, 5), (1000, 62)])
def test_validation_windows_cover_the_text_without_overlap(count, expected):
    batch = validation_set(TEXT, count, seq_length=16)
    starts = batch["input_ids"][:, 0]
    assert len(starts) == expected
    assert (starts.diff() >= 16).all()
    assert starts[0] == 0
    assert batch["labels"][-1, -1] == 999


def test_every_byte_belongs_to_one_paragraph(corpus):
    paragraphs = Paragraphs(corpus.training)
    assert torch.cat([paragraphs[index] for index in range(len(paragraphs))]).equal(corpus.training.long())
    assert paragraphs.lengths() == [len(paragraphs[index]) for index in range(len(paragraphs))]
    assert len(Paragraphs(torch.frombuffer(bytearray(b"one\n\ntwo\0three"), dtype=torch.uint8))) == 3


@pytest.mark.parametrize("run", RUNS)
def test_packed_batches_are_full_and_have_the_text(corpus, run):
    text = bytes(corpus.training.tolist())
    batches = PackedText(corpus.training, PACKED, make_scheduler(run, PACKED))
    for number in range(8):
        batch = batches.next_batch()
        starts = batch["cu_seqlens"].tolist()
        assert batch["input_ids"].shape == batch["labels"].shape == (1, starts[-1])
        assert starts[-1] <= BUDGET
        assert starts[-1] > 0.9 * BUDGET or run == WARMUP  # a batch may be smaller if the length changes
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
    uninterrupted = Trainer(run, settings, corpus)
    records = train(uninterrupted)
    assert records[-1].validation_loss < records[0].validation_loss - 0.3
    assert records[-1].tokens == settings.total_tokens
    interrupted = Trainer(run, settings, corpus)
    rest = interrupted.train(tqdm(disable=True))
    for _ in range(3):
        next(rest)
    state = interrupted.state_dict()
    resumed = Trainer(run, settings, corpus)
    resumed.load_state_dict(state)
    last = train(resumed)[-1]
    assert last.validation_loss == records[-1].validation_loss


def test_the_command_with_packing(demo, text_file, tmp_path):
    options = ["--text", text_file, "--quick", "--packing", "--steps", 4, "--seq-length", 32, "--device", "cpu"]
    assert demo(*options, "--report", tmp_path / "run") == 0
    assert "packed paragraphs" in (tmp_path / "run" / SUMMARY).read_text()
