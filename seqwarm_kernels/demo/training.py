"""Training and evaluation of one run: one of both, with a checkpoint at every evaluation, or a trial of a search."""

from __future__ import annotations

import io
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..allocator.report import AllocatorReport
from ..allocator.warmup import warmup_allocator
from ..ops.resize_batch.schema import IGNORED_LABEL
from ..schedule.scheduler import SequenceLengthScheduler
from ..tuning import Validation
from ..utils.run_folder import RunFolder
from .model import build_model, next_byte_loss
from .records import RUNS, WARMUP, Record
from .settings import Settings
from .text import Batch, Corpus, training_batch, validation_set

GRADIENT_NORM = 1.0
CHECKPOINT, METRICS = "checkpoint.pt", "metrics.jsonl"  #: files of the folder

#: Durations to try, in per cent of a run. Above 90, the full length would hardly be trained.
_PERCENT = range(15, 91, 5)

_VALIDATIONS = 12  #: in a trial, without the first one, which comes before any training


def learning_rate(tokens: int, settings: Settings) -> float:
    """Returns the learning rate after `tokens`: a short linear warmup, then a cosine to zero.

    It follows tokens and not steps. While sequences are short, a step has few tokens, and a decay by steps would be far
    advanced before the model has seen its share of the text.
    """
    share = tokens / settings.total_tokens
    if share < settings.learning_rate_warmup:
        return settings.peak_learning_rate * share / settings.learning_rate_warmup
    decayed = (share - settings.learning_rate_warmup) / (1 - settings.learning_rate_warmup)
    return settings.peak_learning_rate * (1 + math.cos(math.pi * decayed)) / 2


def make_scheduler(run: str, settings: Settings) -> SequenceLengthScheduler:
    """Returns the schedule of a run, the only difference between the two runs."""
    return SequenceLengthScheduler(
        min_seq_length=settings.min_seq_length,
        max_seq_length=settings.seq_length,
        duration=settings.length_warmup * settings.total_tokens if run == WARMUP else 0,
        step_size=settings.length_step_size,
        unit="token",
    )


class Trainer:
    """Model, optimizer, schedule and counts. `state_dict` has all of them. No step draws random numbers of torch."""

    def __init__(self, run: str, settings: Settings, corpus: Corpus, scheduler: SequenceLengthScheduler) -> None:
        self.run = run
        self.settings = settings
        self.text = corpus.training
        self.validation = validation_set(corpus.validation, settings.validation_windows, settings.seq_length)
        self.device = torch.device(settings.device)
        self.model = build_model(settings.layers, settings.heads, settings.width, settings.seed, settings.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=settings.weight_decay, fused=True
        )
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else None  #: of autocast
        self.scheduler = scheduler
        self.steps = self.tokens = self.evaluations = 0
        self.seconds = 0.0
        self.last_seq_length = scheduler.seq_length

    def warm_allocator(self) -> AllocatorReport:
        """Takes the one-time costs, so that the measured seconds of neither run include them."""
        return warmup_allocator(
            self.model,
            self.settings.seq_length,
            example_batch=self._to_device(self._full_batch()),
            loss_fn=next_byte_loss,
            optimizer=self.optimizer,
            autocast_dtype=self.dtype,
            max_grad_norm=GRADIENT_NORM,
            scheduler=self.scheduler,
        )

    def train(self) -> Iterator[Record]:
        """Trains to the end, and yields a record at each evaluation. Save `state_dict` then."""
        for point in self.settings.evaluation_points()[self.evaluations :]:
            losses = self._train_until(point), self._evaluate()
            self.evaluations += 1
            rate = learning_rate(self.tokens, self.settings)
            yield Record(self.run, self.steps, self.tokens, self.seconds, self.last_seq_length, rate, *losses)

    def _train_until(self, tokens: int) -> float | None:
        """Returns the mean loss of the tokens trained on, or None if there were none. Only this time is measured."""
        before = self.tokens
        started = time.perf_counter()
        loss_sum = torch.zeros((), device=self.device)
        while self.tokens < tokens:
            loss, count = self._step()
            loss_sum += loss * count
        total = loss_sum.item()  # waits for the device
        self.seconds += time.perf_counter() - started
        return None if self.tokens == before else total / (self.tokens - before)

    def _step(self) -> tuple[Tensor, int]:
        """Makes one optimizer step at the current length. Returns its loss and its number of tokens."""
        self.last_seq_length = self.scheduler.seq_length
        batch = self.scheduler.resize(self._full_batch())
        count = min(batch["labels"].numel(), self.settings.total_tokens - self.tokens)
        batch["labels"].view(-1)[count:] = IGNORED_LABEL  # so that both runs end on the same token
        batch = self._to_device(batch)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.tokens + count, self.settings)
        loss = self._loss(batch)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        self.optimizer.step()
        self.scheduler.step(count)
        self.steps += 1
        self.tokens += count
        return loss.detach(), count

    @torch.no_grad()
    def _evaluate(self) -> float:
        """Returns the mean validation loss at the full length, which both runs use."""
        self.model.eval()
        total, (inputs, labels) = 0.0, (self.validation["input_ids"], self.validation["labels"])
        for part in range(0, len(labels), self.settings.batch_size):
            rows = slice(part, part + self.settings.batch_size)
            batch = self._to_device({"input_ids": inputs[rows], "labels": labels[rows]})
            total += self._loss(batch).item() * len(batch["labels"])
        self.model.train()
        return total / len(labels)

    def _full_batch(self) -> Batch:
        settings = self.settings
        return training_batch(self.text, settings.seed, self.steps, settings.batch_size, settings.seq_length)

    def _to_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def _loss(self, batch: Batch) -> Tensor:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            return next_byte_loss(self.model(batch["input_ids"]), batch)

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that the rest of the run depends on, as tensors and plain values."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "counts": [self.steps, self.tokens, self.evaluations, self.last_seq_length, self.seconds],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.steps, self.tokens, self.evaluations, self.last_seq_length, self.seconds = state["counts"]


def run_both(folder: RunFolder, settings: Settings, corpus: Corpus) -> list[Record]:
    """Trains both runs one after the other, from the folder's checkpoint on, and returns all evaluations."""
    records, state = [], None
    if (folder.path / CHECKPOINT).exists():
        stored = torch.load(folder.path / CHECKPOINT, map_location="cpu", weights_only=True)
        records, state = [Record(**record) for record in stored["records"]], stored["trainer"]
    for run in RUNS:
        done = [record for record in records if record.run == run]
        if done and done[-1].tokens == settings.total_tokens:
            continue
        trainer = Trainer(run, settings, corpus, make_scheduler(run, settings))
        print(f"{run}: {trainer.warm_allocator()}")
        if done and state is not None:
            trainer.load_state_dict(state)
        for record in trainer.train():
            records.append(record)
            _save(folder, records, trainer.state_dict())
            print(_line(record), flush=True)
    return records


def _save(folder: RunFolder, records: list[Record], state: dict[str, Any]) -> None:
    """Writes the checkpoint, and then all metrics, so that the metrics are never ahead of the checkpoint."""
    values = [asdict(record) for record in records]
    buffer = io.BytesIO()
    torch.save({"records": values, "trainer": state}, buffer)
    folder.write(CHECKPOINT, buffer.getvalue())
    folder.write(METRICS, "".join(json.dumps(each) + "\n" for each in values).encode())


def _line(record: Record) -> str:
    train_loss = "     -" if record.train_loss is None else f"{record.train_loss:6.3f}"
    return (
        f"{record.run:<9}{record.tokens:>12,} tokens {record.seconds:>8.1f} s  "
        f"length {record.seq_length:>5}  train loss {train_loss}  "
        f"validation loss {record.validation_loss:6.3f}"
    )


@dataclass(frozen=True)
class DemoTrial:
    """Trials of a search, in the unit "token", with at most one validation for each step at the full length."""

    settings: Settings
    corpus: Corpus

    def __call__(self, scheduler: SequenceLengthScheduler, end: int) -> Iterator[Validation]:
        evaluations = -(-_VALIDATIONS * self.settings.total_tokens // end)
        trainer = Trainer(WARMUP, replace(self.settings, evaluations=evaluations), self.corpus, scheduler)
        for record in trainer.train():
            perplexity = torch.tensor(record.validation_loss, dtype=torch.float64).exp().item()  # may be infinite
            yield Validation(record.tokens, perplexity, record.tokens)

    def search_options(self, multiples: float) -> dict[str, Any]:
        """Options of `tune_schedule`. A whole run is at least as long as a trial.

        Raises:
            ValueError: a trial is longer than the run.
        """
        settings, total = self.settings, self.settings.total_tokens
        warmup = round(settings.learning_rate_warmup * total)
        if multiples * warmup > total:
            raise ValueError(f"multiples must keep a trial within the run's {total:,} tokens, got {multiples:g}")
        return {
            "max_seq_length": settings.seq_length,
            "learning_rate_warmup": warmup,
            "unit": "token",
            "durations": tuple(sorted({total * percent // 100 for percent in _PERCENT})),  # a short run has some twice
            "settings": {**asdict(settings), "text_sha256": self.corpus.fingerprint()},
        }
