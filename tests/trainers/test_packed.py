"""Packed batches under warmup in the trainers: every sequence is cut, and logs count the tokens that the model sees."""

import copy
import itertools
import json

import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler, apply_alibi, resize_batch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from seqwarm_kernels.trainers.huggingface import SequenceLengthWarmup

from ..support.huggingface import PLAIN_SGD, logged
from ..support.ranks import leave_group, run_ranks, set_environment
from ..support.tiers import first_fast

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


def arguments(folder, config=transformers.TrainingArguments, **more):
    settings = {**PLAIN_SGD, "per_device_train_batch_size": SEQUENCES, "learning_rate": LEARNING_RATE}
    return config(output_dir=str(folder), **{**settings, **more})


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


@pytest.mark.parametrize(("collator", "method"), first_fast([*itertools.product(COLLATORS, METHODS)]))
def test_hugging_face_trains_on_every_sequence(tmp_path, collator, method):
    """The warmup used to truncate the packed row: 8 of 320 tokens trained in the first step."""
    warmed, expected, warmup = model(), model(), SequenceLengthWarmup(schedule(), **method)
    seen = count_tokens(warmed)
    trainer = transformers.Trainer(warmed, arguments(tmp_path), train_dataset=sequences(), data_collator=collator)
    warmup.add_to(trainer)
    trainer.train()
    lengths = [8, 16, 24, 32]
    assert logged(trainer, "seq_length") == lengths
    assert seen == ([LENGTH * SEQUENCES] * 4 if method else [length * SEQUENCES for length in lengths])
    assert logged(trainer, "train_tokens") == torch.tensor(seen).cumsum(0).tolist()
    losses = by_hand(expected, sequences(), method)
    torch.testing.assert_close(logged(trainer, "loss"), losses, rtol=1e-4, atol=1e-4)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(warmed.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)


def trained(folder, collator, method, **more):
    """What the log says, and how many tokens went through this rank's model in each step."""
    warmed, warmup = model(), SequenceLengthWarmup(schedule(), **method)
    seen = count_tokens(warmed)
    data = [{**item, "labels": item["input_ids"]} for item in sequences()]
    trainer = transformers.Trainer(warmed, arguments(folder, **more), train_dataset=data, data_collator=collator)
    warmup.add_to(trainer)
    trainer.train()
    return {"loss": logged(trainer, "loss"), "train_tokens": logged(trainer, "train_tokens"), "seen": seen}


def all_trained(folder, **more):
    collators = [COLLATORS[1], transformers.default_data_collator]  # packed, and rows of equal length
    methods = [{}, {"mode": "reshape"}]  # neither pads
    return [trained(folder, *case, **more) for case in itertools.product(collators, methods)]


def one_of_two(rank, port, folder):
    set_environment(rank, port)
    found = all_trained(folder, ddp_backend="gloo", per_device_train_batch_size=SEQUENCES // 2)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    leave_group()


@pytest.mark.slow
def test_two_processes_train_on_what_the_log_says(tmp_path):
    run_ranks(one_of_two, tmp_path)
    alone = all_trained(tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for expected, *found in zip(alone, *ranks, strict=True):
        seen = torch.tensor([rank["seen"] for rank in found]).sum(0)
        assert seen.tolist() == expected["seen"]
        for rank in found:
            assert rank["train_tokens"] == seen.cumsum(0).tolist() == expected["train_tokens"]
            torch.testing.assert_close(rank["loss"], expected["loss"], rtol=1e-4, atol=1e-4)


def test_lightning_trains_on_every_sequence():
    lightning = pytest.importorskip("lightning.pytorch")
    from seqwarm_kernels.trainers import lightning as trainers

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.tokens = model(), []

        def training_step(self, batch, batch_idx):
            self.tokens.append(int(self.trainer.callback_metrics.get("train_tokens", 0)))
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)

    module = Module()
    seen = count_tokens(module.model)
    loader = torch.utils.data.DataLoader(sequences(), SEQUENCES, collate_fn=COLLATORS[1])
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    warmup = trainers.SequenceLengthWarmup(schedule(), mode="reshape", remainder="pad")
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, log_every_n_steps=1, callbacks=[warmup], **quiet)
    trainer.fit(module, loader)
    assert seen == [LENGTH * SEQUENCES] * 4
    assert module.tokens == [0, *torch.tensor(seen).cumsum(0).tolist()[:3]]
    assert warmup.state_dict()["train_tokens"] == sum(seen)


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="w0", eos_token="w1")


def sft_trainer(folder, model, **more):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    config = arguments(folder, trl.SFTConfig, max_length=2 * LENGTH, per_device_train_batch_size=4, **more)
    data = datasets.Dataset.from_list(sequences())
    return trl.SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer())


@pytest.mark.parametrize("method", METHODS)
def test_trl_trains_on_every_packed_sequence(tmp_path, method):
    """Each row of TRL has two sequences, and each batch four rows."""
    warmed, expected, warmup = model(), model(), SequenceLengthWarmup(schedule(), **method)
    seen = count_tokens(warmed)
    trainer = sft_trainer(tmp_path, warmed, packing=True)
    order = [{"input_ids": ids} for row in trainer.train_dataset["input_ids"] for ids in (row[:LENGTH], row[LENGTH:])]
    warmup.add_to(trainer)
    trainer.train()
    assert seen == ([LENGTH * SEQUENCES] * 4 if method else [length * SEQUENCES for length in (8, 16, 24, 32)])
    assert logged(trainer, "train_tokens") == torch.tensor(seen).cumsum(0).tolist()
    assert logged(trainer, "num_tokens") == logged(trainer, "train_tokens")
    losses = by_hand(expected, order, method)
    torch.testing.assert_close(logged(trainer, "loss"), losses, rtol=1e-4, atol=1e-4)


def test_a_resumed_training_goes_on_after_add_to(tmp_path):
    reported = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            reported.append(logs["train_tokens"])

    def train(**resumed):
        warmup, warmed = SequenceLengthWarmup(schedule()), model()
        settings = arguments(tmp_path, save_strategy="steps", save_steps=2, gradient_accumulation_steps=2, max_steps=4)
        trainer = transformers.Trainer(
            warmed, settings, train_dataset=sequences(64), data_collator=COLLATORS[0], callbacks=[Reporter]
        )
        warmup.add_to(trainer)
        trainer.train(**resumed)
        return [logged(trainer, name) for name in ("loss", "seq_length", "train_tokens")]

    uninterrupted = train()
    assert uninterrupted[1:] == [[8, 16, 24, 32], [128, 384, 768, 1280]]
    assert reported == [128, 384, 768, 1280, 1280]  # the last record is the Trainer's summary
    assert train(resume_from_checkpoint=str(tmp_path / "checkpoint-2")) == uninterrupted


def test_labels_are_smoothed_after_they_are_cut(tmp_path):
    warmup, settings = SequenceLengthWarmup(schedule()), arguments(tmp_path, label_smoothing_factor=0.1)
    trainer = transformers.Trainer(model(), settings, train_dataset=sequences(), data_collator=COLLATORS[0])
    warmup.add_to(trainer)
    trainer.train()
    assert logged(trainer, "seq_length") == [8, 16, 24, 32]


@pytest.mark.parametrize("is_copy", [False, True])
def test_a_callback_of_another_trainer_raises_instead_of_cutting_nothing(tmp_path, is_copy):
    warmup = SequenceLengthWarmup(schedule())
    warmup.add_to(transformers.Trainer(model(), arguments(tmp_path)))
    passed = copy.deepcopy(warmup) if is_copy else warmup
    trainer = transformers.Trainer(model(), arguments(tmp_path), train_dataset=sequences(), data_collator=COLLATORS[0])
    trainer.add_callback(passed)
    with pytest.raises(ValueError, match="add_to must be called with the trainer that trains"):
        trainer.train()
    assert trainer.state.global_step == 0
