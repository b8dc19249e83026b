"""Packed batches of Transformers and TRL under warmup: every sequence is cut and counted."""

import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler, apply_alibi, resize_batch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from seqwarm_kernels.trainers.huggingface import SequenceLengthWarmup

from ..support.huggingface import logged, quiet_trainer

WORDS, LENGTH, SEQUENCES, LEARNING_RATE = 50, 40, 8, 0.5
COLLATORS = [
    transformers.DataCollatorWithFlattening(),
    transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
]
METHODS = [{}, {"mode": "reshape", "remainder": "pad"}]


def model():
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    made = transformers.LlamaForCausalLM(config)
    apply_alibi(made, LENGTH)
    return made


def count_tokens(model):
    """A list with the number of tokens of each forward in training mode."""
    seen = []
    model.model.embed_tokens.register_forward_pre_hook(
        lambda embedding, inputs: seen.append(inputs[0].numel()) if embedding.training else None
    )
    return seen


def schedule():
    """Lengths 8, 16, 24, 32 of four steps."""
    return SequenceLengthScheduler(8, LENGTH, duration=4, step_size=8)


def sequences(number=4 * SEQUENCES):
    torch.manual_seed(2)
    return [{"input_ids": row.tolist()} for row in torch.randint(WORDS, (number, LENGTH))]


def padded(items):
    """Rows of other lengths, padded on the right. All labels are kept."""
    rows = [torch.tensor(item["input_ids"])[: LENGTH - 3 * index] for index, item in enumerate(items)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return {"input_ids": ids, "labels": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


def trainer_of(folder, model, *callbacks, collator=COLLATORS[0]):
    given = {"train_dataset": sequences(), "data_collator": collator}
    settings = {"per_device_train_batch_size": SEQUENCES, "learning_rate": LEARNING_RATE}
    return quiet_trainer(folder, model, *callbacks, given=given, **settings)


def by_hand(model, data, method):
    """Trains on the sequences of each step, cut one by one. The loss is the mean over all their labels.

    A piece's first token is predicted from the piece before it.
    """
    optimizer, lengths, losses = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), schedule(), []
    for start in range(0, len(data), SEQUENCES):
        rows = [torch.tensor(item["input_ids"])[None] for item in data[start : start + SEQUENCES]]
        cut = [resize_batch({"ids": row, "labels": row}, lengths.seq_length, **method) for row in rows]
        logits = [model(input_ids=batch["ids"]).logits.flatten(0, 1)[:-1] for batch in cut]
        labels = [batch["labels"].flatten()[1:] for batch in cut]
        loss = torch.nn.functional.cross_entropy(torch.cat(logits), torch.cat(labels))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        lengths.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("method", METHODS)
def test_a_collator_of_hugging_face(tmp_path, method):
    """It gives boundaries of its own names. The warmup used to truncate the packed row to 8 of 320 tokens."""
    warmed, expected = model(), model()
    seen = count_tokens(warmed)
    trainer = trainer_of(tmp_path, warmed, SequenceLengthWarmup(schedule(), **method), collator=COLLATORS[1])
    trainer.train()
    lengths = [8, 16, 24, 32]
    assert logged(trainer, "seq_length") == lengths
    assert seen == ([LENGTH * SEQUENCES] * 4 if method else [length * SEQUENCES for length in lengths])
    assert logged(trainer, "train_tokens") == torch.tensor(seen).cumsum(0).tolist()
    losses = by_hand(expected, sequences(), method)
    torch.testing.assert_close(logged(trainer, "loss"), losses, rtol=1e-4, atol=1e-4)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(warmed.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)


def test_a_callback_of_another_trainer_raises_instead_of_cutting_nothing(tmp_path):
    warmup = SequenceLengthWarmup(schedule())
    trainer_of(tmp_path, model(), warmup)
    trainer = trainer_of(tmp_path, model())
    trainer.add_callback(warmup)
    with pytest.raises(ValueError, match="add_to"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_warmup_that_is_added_in_mid_training_raises_before_the_next_step(tmp_path):
    class Adds(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step == 1:
                SequenceLengthWarmup(schedule()).add_to(trainer)

    trainer = trainer_of(tmp_path, model(), Adds())
    with pytest.raises(ValueError, match="add_to"):
        trainer.train()
    assert trainer.state.global_step == 1
