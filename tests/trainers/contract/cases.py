"""The trainings of the contract: their settings, their data, and a small model that notes what it is called with."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from seqwarm_kernels import SequenceLengthScheduler

WORDS, WIDTH, LENGTH = 11, 6, 18  #: rows are longer than the schedule's last length, so every batch is cut
SHORTEST, LONGEST, STEP_SIZE = 4, 16, 4
ITEMS, BATCH_SIZE, EPOCHS = 16, 2, 2
EVALUATED = 4  #: items of an evaluation
LEARNING_RATE, ADAM_RATE = 0.5, 3e-3
IGNORED = -100
FAILS_AT = 5
EVEN_LENGTH = 48  #: which every length of the schedule divides
PADDING = None  #: an entry of a row that is not a token


@dataclass(frozen=True)
class Case:
    """A training: 2 epochs of 16 items, in batches of 2 on each rank."""

    options: Mapping[str, Any] = field(default_factory=dict)  #: of resize_batch
    unit: str = "step"
    duration: int = 10
    data: str = "rows"  #: "rows" of one length, of an "even" length, "padded", or sequences in one row, see `PACKED`
    network: str | None = None  #: a decoder or a family of transformers in place of the small model
    accumulate: int = 1
    evaluate_every: int | None = 4  #: optimizer steps
    log_every: int = 1
    asks: bool = False  #: for the count of tokens in each forward
    rates: str | None = None  #: a learning rate by tokens of tests/support/token_rates.py
    total_tokens: int | None = None
    max_steps: int | None = None
    fails: type[BaseException] | None = None  #: raised in the sixth forward
    saves: bool = False  #: a checkpoint after the first epoch
    clip: float | None = None  #: the largest norm of gradients
    is_watched: bool = False  #: by the trainer's Monitor
    adam: bool = False  #: instead of plain SGD

    @property
    def epoch_steps(self) -> int:
        """On one rank."""
        return ITEMS // BATCH_SIZE // self.accumulate

    @property
    def is_packed(self) -> bool:
        return self.data in PACKED

    @property
    def length(self) -> int:
        return EVEN_LENGTH if self.data == "even" else LENGTH

    def model(self) -> Any:
        if self.network is None:
            return Model()
        return Decoder(self.network) if "-" in self.network else of_family(self.network)

    def schedule(self) -> SequenceLengthScheduler:
        options = {"duration": self.duration, "step_size": STEP_SIZE, "unit": self.unit}
        return SequenceLengthScheduler(SHORTEST, LONGEST, **options)


def items(case: Case) -> list[list[Any]]:
    """Rows of (token, label). The first label is ignored, and padding is on the right."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(1, WORDS, (ITEMS, case.length), generator=generator).tolist()
    made = [[(token, token if index else IGNORED) for index, token in enumerate(row)] for row in rows]
    if case.data in ("rows", "even"):
        return made
    lengths = [8 + 7 * index % 11 for index in range(ITEMS)]  # from 8 to 18
    cut = [row[:length] for row, length in zip(made, lengths, strict=True)]
    return cut if case.is_packed else [row + [PADDING] * (LENGTH - len(row)) for row in cut]


def collate_rows(rows):
    filled = [[(0, IGNORED) if entry is PADDING else entry for entry in row] for row in rows]
    tokens, labels = torch.tensor(filled).unbind(2)
    return {"input_ids": tokens.contiguous(), "labels": labels.contiguous()}


def collate_padded(rows):
    mask = [[int(entry is not PADDING) for entry in row] for row in rows]
    return {**collate_rows(rows), "attention_mask": torch.tensor(mask)}


def collate_packed(sequences):
    """All sequences in one row, with positions that start again at each of them."""
    row = collate_rows([[entry for sequence in sequences for entry in sequence]])
    positions = [index for sequence in sequences for index in range(len(sequence))]
    return {**row, "position_ids": torch.tensor([positions])}


def collate_flattened(sequences):
    """As a collator of transformers packs them, with boundaries of its own names."""
    collator = pytest.importorskip("transformers").DataCollatorWithFlattening
    items = [{"input_ids": [token for token, _ in sequence]} for sequence in sequences]
    return collator(return_flash_attn_kwargs=True, return_seq_idx=True)(items)


#: How sequences are packed: with positions that start again at each of them, or with more.
PACKED = {"packed": collate_packed, "flattened": collate_flattened}
COLLATE = {"rows": collate_rows, "even": collate_rows, "padded": collate_padded, **PACKED}


def loader(case, size=BATCH_SIZE, *, rank=0, world_size=1, is_evaluation=False, **settings):
    """Batches in order. Of several ranks, each takes every `world_size`-th batch."""
    data = items(case)[:EVALUATED] if is_evaluation else items(case)
    batches = [range(start, start + size) for start in range(0, len(data), size)][rank::world_size]
    own = [data[index] for batch in batches for index in batch]
    return DataLoader(own, size, collate_fn=COLLATE[case.data], **settings)


class Model(nn.Module):
    """Predicts a token from the mean of those before it in its sequence. Notes each call, and where it is to fail.

    Attributes:
        calls: (is training, rows, length, loss) of each forward, and ("step", learning rate) of each optimizer step.
        fails: raised in the sixth forward in training.
        ask: called in each forward in training.
    """

    accepts_loss_kwargs = True  # for Hugging Face's Trainer: the loss takes num_items_in_batch,
    loss_type = "ForCausalLM"  # and leaves the first label of each row out

    def __init__(self, seed=1):
        super().__init__()
        self.calls, self.fails, self.ask = [], None, None
        self.make_layers(torch.Generator().manual_seed(seed))

    def make_layers(self, generator):
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.double()
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, input_ids, labels, attention_mask=None, position_ids=None, num_items_in_batch=None, **boundaries):
        if boundaries:
            lengths = boundaries["cu_seq_lens_q"].diff().tolist()
            position_ids = torch.cat([torch.arange(length) for length in lengths])[None]
            assert boundaries["seq_idx"].unique_consecutive(return_counts=True)[1].tolist() == lengths
            assert boundaries["max_length_q"] == max(lengths)
        return self.trained(labels, num_items_in_batch, input_ids, attention_mask, position_ids)

    def trained(
        self, labels, num_items_in_batch, input_ids, attention_mask, position_ids, *, shift_labels=None, **others
    ):
        """The loss and the logits of a call, which is noted. A rank's part of a batch has shifted labels."""
        if self.fails is not None and sum(call[0] is True for call in self.calls) == FAILS_AT:
            raise self.fails
        if self.ask is not None and self.training:
            self.ask()
        logits = self.logits(input_ids, attention_mask, position_ids, **others)
        if shift_labels is None:
            shift_labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
        targets = shift_labels.flatten()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
        loss = loss / ((targets != IGNORED).sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        rows, longest = input_ids.shape
        if position_ids is not None:
            longest = int(position_ids.max()) + 1
        self.calls.append((self.training, rows, longest, loss.item()))
        return {"loss": loss, "logits": logits}

    def logits(self, input_ids, attention_mask, position_ids):
        rows, length = input_ids.shape
        positions = torch.arange(length).expand(rows, length) if position_ids is None else position_ids
        sequence = (positions == 0).cumsum(1)
        is_seen = (sequence[:, :, None] == sequence[:, None]) & torch.ones(length, length, dtype=torch.bool).tril()
        if attention_mask is not None:
            is_seen = is_seen & attention_mask[:, None].bool()
        weights = is_seen.double() / is_seen.sum(2, keepdim=True).clamp(min=1)
        inputs = self.tokens(input_ids) + self.positions(positions)
        return self.head(torch.tanh(inputs + weights @ inputs))

    def note_step(self, optimizer, args, kwargs):
        """A hook after each step of an optimizer."""
        self.calls.append(("step", optimizer.param_groups[0]["lr"]))


class Decoder(Model):
    """A Llama of transformers, "llama-" and the name of its attention. Its loss is computed in float64."""

    def __init__(self, network, seed=1):
        self.attention = network.removeprefix("llama-")
        super().__init__(seed)

    def make_layers(self, generator):
        import transformers

        import seqwarm_kernels.models.seqwarm  # noqa: F401
        from seqwarm_kernels import apply_alibi

        sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
        config = transformers.LlamaConfig(vocab_size=WORDS, max_position_embeddings=EVEN_LENGTH, **sizes)
        torch.manual_seed(generator.initial_seed())
        self.network = transformers.LlamaForCausalLM(config)
        if self.attention != "alibi":
            self.network.set_attn_implementation(self.attention)
        else:
            apply_alibi(self.network, EVEN_LENGTH)
        self.double()

    def forward(self, input_ids, labels, num_items_in_batch=None, attention_mask=None, position_ids=None, **others):
        return self.trained(labels, num_items_in_batch, input_ids, attention_mask, position_ids, **others)

    def logits(self, input_ids, attention_mask, position_ids, **others):
        options = {"attention_mask": attention_mask, "position_ids": position_ids, **others}
        return self.network(input_ids=input_ids, **options).logits


def of_family(name):
    """A converted model of tests/models/zoo.py, which notes its calls as `Model` does. Its slopes are learned."""
    from seqwarm_kernels import apply_alibi

    from ...models.zoo import FAMILIES, make

    model = make(name).train()
    apply_alibi(model, LENGTH, learn_slopes=not FAMILIES[name].pretrained_with_alibi)
    model.calls, model.fails, model.ask = [], None, None
    model.note_step = functools.partial(Model.note_step, model)

    def note(module, args, kwargs, output):
        model.calls.append((module.training, *output["logits"].shape[:2], output["loss"].item()))

    model.register_forward_hook(note, with_kwargs=True)
    return model
