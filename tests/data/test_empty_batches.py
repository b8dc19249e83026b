"""Batches without items, which ranks get that run out, and of items without tokens."""

import pytest
import torch
from torch.utils.data import DataLoader

from seqwarm_kernels import SequenceLengthScheduler, apply_alibi, resize_batch
from seqwarm_kernels.data import (
    BatchPlanner,
    LengthBatchSampler,
    PackedCollator,
    PaddedCollator,
    Prepare,
    ResumableLoader,
)

COLLATORS = [PaddedCollator(multiple_of=4), PackedCollator()]
ITEMS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def llama(transformers):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=23, num_key_value_heads=2, **sizes))


def gpt2(transformers):
    config = transformers.GPT2Config(vocab_size=23, n_embd=16, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("items", [[], [[]], [{"input_ids": [], "labels": []}]])
def test_a_padded_batch(items):
    batch = PaddedCollator(pad_token_id=9, multiple_of=4, max_tokens=4)(items)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[9] * 4],
        "attention_mask": [[0] * 4],
        "labels": [[-100] * 4],
    }
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


@pytest.mark.parametrize("items", [[], [[]], [[], torch.zeros(0)], [{"input_ids": [], "labels": []}]])
def test_a_packed_batch(items):
    batch = PackedCollator(max_tokens=1)(items)
    assert batch["input_ids"].tolist() == batch["position_ids"].tolist() == [[0]]
    assert batch["labels"].tolist() == [[-100]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 1]
    assert batch["max_length_q"] == batch["max_length_k"] == 1
    assert {batch[name].dtype for name in ("input_ids", "position_ids", "labels")} == {torch.int64}


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("is_converted", [True, False])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_models_run_on_it_and_learn_nothing(make, is_converted, collator):
    """They raised an error in the middle of the last step, where the other ranks wait."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = make(transformers)
    if is_converted:
        apply_alibi(model, max_seq_length=8)
    batch = collator([])
    labels = batch.pop("labels")
    logits = model(**batch).logits
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
    loss.backward()
    assert loss == 0
    assert model(**batch, labels=labels, num_items_in_batch=7).loss == 0  # as the Trainer sums over ranks
    model(**batch, labels=labels).loss.backward()  # a mean, NaN
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("collator", COLLATORS)
@pytest.mark.parametrize("options", [{}, {"mode": "reshape"}, {"mode": "reshape", "remainder": "overlap"}])
def test_it_is_cut_like_others(options, collator):
    scheduler = SequenceLengthScheduler(2, 8, duration=10, step_size=2)
    for copy in (True, False):
        cut, info = resize_batch(collator([]), 2, copy=copy, return_info=True, **options)
        assert cut["input_ids"].numel() > 0
        assert (cut["labels"] == -100).all()
        assert info.num_valid_tokens == ("attention_mask" not in cut)
    assert scheduler.resize(collator([]), **options)["input_ids"].shape == cut["input_ids"].shape


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_a_rank_that_runs_out(packed, prepared):
    """The planned length of such a batch is 0, and its tokens are within the budget."""
    collate = PackedCollator() if packed else PaddedCollator(multiple_of=4)
    planner = BatchPlanner(4, packed=packed, multiple_of=1 if packed else 4)
    batches = []
    for rank in range(2):
        sampler = LengthBatchSampler(list(map(len, ITEMS)), planner, rank=rank, world_size=2, remainder="empty")
        dataset, prepare = (range(len(ITEMS)), Prepare(collate, dataset=ITEMS)) if prepared else (ITEMS, collate)
        batches += ResumableLoader(DataLoader(dataset, batch_sampler=sampler, collate_fn=prepare))
    tokens = [int(batch["input_ids"].count_nonzero()) for batch in batches]  # padding has id 0
    assert tokens == [3, 3, 3, 0]
