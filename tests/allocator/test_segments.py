"""Under "segments" all lengths have one shape: one pass stands for all of them."""

import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler, no_compilation, warmup_allocator

transformers = pytest.importorskip("transformers")


def llama():
    config = transformers.LlamaConfig(
        vocab_size=29, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def test_one_pass_stands_for_all_lengths():
    scheduler = SequenceLengthScheduler(4, 24, duration=5, step_size=4)
    options = {"mode": "segments"}
    assert warmup_allocator(llama(), 24, scheduler=scheduler, resize_options=options).lengths == (24,)
    assert len(warmup_allocator(llama(), 24, scheduler=scheduler).lengths) == 6


def test_a_length_that_the_model_gets_as_a_number_needs_two():
    seen = set()

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(5, 3)

        def forward(self, ids, segment_length=None, window=None):
            seen.add((segment_length, window))
            return self.embedding(ids)

    scheduler = SequenceLengthScheduler(4, 24, duration=5, step_size=4)
    for mode, expected in (("segments", {(4, None), (24, None)}), ("window", {(None, 3), (None, 23)})):
        model, batch = Own(), {"ids": torch.zeros(1, 24, dtype=torch.long)}
        report = warmup_allocator(model, 24, scheduler=scheduler, example_batch=batch, resize_options={"mode": mode})
        assert sorted(report.lengths) == [4, 24]
        assert expected == seen
        seen.clear()


def test_a_ramp_after_it_compiles_nothing():
    torch._dynamo.reset()
    model = torch.compile(llama(), backend="eager")
    scheduler = SequenceLengthScheduler(4, 24, duration=5, step_size=4)
    ids = torch.randint(29, (2, 24))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    options = {"mode": "segments"}
    warmup_allocator(model, 24, example_batch=batch, scheduler=scheduler, resize_options=options)
    scheduler.attach(model, **options)
    with no_compilation():
        for _ in range(6):
            model(**batch).loss.backward()
            scheduler.step()
