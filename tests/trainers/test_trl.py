"""TRL's trainers under warmup, against loops over rows that are cut as lists of tokens."""

import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid

from seqwarm_kernels import SequenceLengthScheduler, apply_alibi

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("trl")

import datasets
import tokenizers
import transformers
import trl

from seqwarm_kernels.trainers.huggingface import Monitor, SequenceLengthWarmup

from ..models.zoo import make
from ..support.huggingface import logged, quiet_trainer

WORDS, LENGTH, LEARNING_RATE, BETA = 50, 16, 0.5, 0.5
PADDING, END = 0, 1
LENGTHS = [4, 4, 8, 12]  #: of the schedule's steps


def schedule():
    return SequenceLengthScheduler(4, LENGTH, duration=4, step_size=4)


def model():
    made = make("llama", vocab_size=WORDS, pad_token_id=PADDING, eos_token_id=END)
    apply_alibi(made, LENGTH)  # and reads position ids, which keep packed sequences apart
    return made


def tokenizer():
    words = {"pad": PADDING, "end": END, **{f"w{number}": number for number in range(2, WORDS)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="pad"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="pad", eos_token="end")


def rows(names, number):
    """Prompts of two words, and texts of 3 to 5 or of 10 words."""
    torch.manual_seed(2)
    lengths = [10 if index % 2 else 3 + index % 4 for index in range(number)]
    counts = [[2 if name == "prompt" else length + (name == "rejected") for name in names] for length in lengths]
    texts = [[" ".join(f"w{word}" for word in torch.randint(2, WORDS, (count,))) for count in row] for row in counts]
    return [dict(zip(names, row, strict=True)) for row in texts]


def trained(folder, kind, config, data, *callbacks, given=None, **arguments):
    """A trainer after its training."""
    given = {"train_dataset": datasets.Dataset.from_list(data), "processing_class": tokenizer(), **(given or {})}
    settings = {"per_device_train_batch_size": 2, "learning_rate": LEARNING_RATE, "bf16": False, **arguments}
    callbacks = (SequenceLengthWarmup(schedule()), *callbacks)
    trainer = quiet_trainer(folder, model(), *callbacks, kind=kind, config=config, given=given, **settings)
    trainer.train()
    return trainer


SFT = (trl.SFTTrainer, trl.SFTConfig)
DPO = (trl.DPOTrainer, trl.DPOConfig)


def padded(sequences):
    """(rows, longest) tokens, and which of them are no padding."""
    longest = max(map(len, sequences))
    ids = torch.tensor([sequence + [PADDING] * (longest - len(sequence)) for sequence in sequences])
    mask = torch.tensor([[1] * len(sequence) + [0] * (longest - len(sequence)) for sequence in sequences])
    return ids, mask


def log_probabilities(model, ids, mask):
    """Of each token but the first."""
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    return -cross_entropy(logits.mT, ids[:, 1:], reduction="none")


def by_hand(data, rows_of_step, loss_of):
    """The losses of a training on rows cut to `LENGTHS`."""
    policy, losses = model(), []
    optimizer = torch.optim.SGD(policy.parameters(), lr=LEARNING_RATE)
    for step, length in enumerate(LENGTHS):
        loss = loss_of(policy, data[step * rows_of_step : (step + 1) * rows_of_step], length)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sft_loss(policy, step, length):
    """The mean over all labels of completions."""
    ids, mask = padded([row["input_ids"][:length] for row in step])
    labels = padded([row["labels"][:length] for row in step])[0]
    counts = (labels[:, 1:] != -100) & (mask[:, 1:] == 1)
    return -log_probabilities(policy, ids, mask)[counts].mean()


def test_sft_equals_a_loop(tmp_path):
    records, given = [], rows(("prompt", "completion"), 16)
    settings = {"gradient_accumulation_steps": 2, "max_length": LENGTH}
    trainer = trained(tmp_path, *SFT, given, Monitor(records.append), **settings)
    data = list(trainer.train_dataset)
    assert any(-100 in row["labels"] for row in data)
    torch.testing.assert_close(logged(trainer), by_hand(data, 4, sft_loss), rtol=1e-4, atol=1e-4)
    assert [record.loss for record in records] == pytest.approx(logged(trainer))
    assert logged(trainer, "seq_length") == LENGTHS
    tokens = [min(len(row["input_ids"]), LENGTHS[index // 4]) for index, row in enumerate(data)]
    expected = torch.tensor(tokens).view(4, 4).sum(1).cumsum(0).tolist()
    assert logged(trainer, "num_tokens") == logged(trainer, "train_tokens") == expected


def packed_loss(policy, step, length):
    """The mean over all sequences, two to a row."""
    tokens = torch.tensor([row["input_ids"] for row in step]).view(-1, LENGTH)[:, :length]
    return cross_entropy(policy(input_ids=tokens).logits[:, :-1].mT, tokens[:, 1:])


def test_sft_trains_on_every_packed_sequence(tmp_path):
    data = [{"input_ids": row.tolist()} for row in torch.randint(2, WORDS, (16, LENGTH))]
    trainer = trained(tmp_path, *SFT, data, packing=True, max_length=2 * LENGTH)
    losses = by_hand(list(trainer.train_dataset), 2, packed_loss)
    torch.testing.assert_close(logged(trainer), losses, rtol=1e-4, atol=1e-4)
    tokens = (4 * torch.tensor(LENGTHS)).cumsum(0).tolist()
    assert logged(trainer, "train_tokens") == logged(trainer, "num_tokens") == tokens


def dpo_loss(policy, step, length):
    """Chosen and rejected rows are cut alike, and so are those of the reference model."""
    reference, sums = model(), {}
    for name in ("chosen_ids", "rejected_ids"):
        ids, mask = padded([(row["prompt_ids"] + row[name])[:length] for row in step])
        starts = torch.tensor([len(row["prompt_ids"]) for row in step])[:, None]
        counts = mask * (torch.arange(ids.shape[1]) >= starts)
        with torch.no_grad():
            expected = log_probabilities(reference, ids, mask)
        sums[name] = ((log_probabilities(policy, ids, mask) - expected) * counts[:, 1:]).sum(1)
    return -logsigmoid(BETA * (sums["chosen_ids"] - sums["rejected_ids"])).mean()


def test_dpo_equals_a_loop(tmp_path):
    data = rows(("prompt", "chosen", "rejected"), 8)
    trainer = trained(tmp_path, *DPO, data, given={"ref_model": model()}, beta=BETA)
    losses = by_hand(list(trainer.train_dataset), 2, dpo_loss)
    torch.testing.assert_close(logged(trainer), losses, rtol=1e-4, atol=1e-4)
    assert logged(trainer, "seq_length") == LENGTHS
    assert logged(trainer, "num_tokens") == logged(trainer, "train_tokens")
    assert len({round(loss, 3) for loss in losses}) > 2


def test_log_probabilities_of_whole_rows_are_refused(tmp_path):
    data = rows(("prompt", "chosen", "rejected"), 8)
    with pytest.raises(ValueError, match="precompute_ref_log_probs"):
        trained(tmp_path, *DPO, data, given={"ref_model": model()}, precompute_ref_log_probs=True)
