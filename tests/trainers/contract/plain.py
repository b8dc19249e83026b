"""A loop of one's own, as docs/guides/plain_loop.md writes it, with the schedule attached to the model."""

import torch
from torch.nn.parallel import DistributedDataParallel

from ...support.ranks import join_group
from .adapter import Adapter
from .cases import EPOCHS, loader
from .oracle import Rule


class Plain(Adapter):
    rule = Rule("batches")
    warns_of_short = ends_by_tokens = shards_rows = has_monitor = False

    def __init__(self, case, model, folder):
        super().__init__(case, model, folder)
        self.scheduler, self.log, self.train_tokens = case.schedule(), {}, 0

    @staticmethod
    def join_ranks(rank, port):
        Adapter.join_ranks(rank, port)
        join_group(rank, port)

    def fit(self, resume=None):
        case, self.train_tokens, self.scheduler.progress = self.case, 0, 0
        optimizer, rates = self.optimizer()
        parts = {"model": self.model, "optimizer": optimizer, "rates": rates, "schedule": self.scheduler}
        if resume:
            states = torch.load(self.folder / f"{resume}.pt", weights_only=False)
            self.train_tokens = states.pop("tokens")
            for name, state in states.items():
                parts[name].load_state_dict(state)
        model = DistributedDataParallel(self.model) if self.world_size > 1 else self.model
        attachment = self.scheduler.attach(model, **case.options)
        try:
            for step in range(resume or 0, EPOCHS * self.epoch_steps()):
                if step == case.max_steps or (case.total_tokens and self.train_tokens >= case.total_tokens):
                    break
                if step % self.epoch_steps() == 0:
                    batches = iter(self.batches())
                model.train()
                for _ in range(case.accumulate):
                    (model(**next(batches))["loss"] / case.accumulate).backward()
                if case.clip:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                optimizer.zero_grad()
                self.count(attachment, step + 1)
                rates.step()
                if case.evaluate_every and (step + 1) % case.evaluate_every == 0:
                    self.evaluate()
                if case.saves and step + 1 == self.epoch_steps():
                    states = {name: part.state_dict() for name, part in parts.items()}
                    torch.save({**states, "tokens": self.train_tokens}, self.folder / f"{step + 1}.pt")
        finally:
            attachment.remove()
            optimizer.zero_grad()

    def count(self, attachment, step):
        seen = torch.tensor(attachment.take_seen())
        if self.world_size > 1:
            torch.distributed.all_reduce(seen)
        tokens, samples = seen.tolist()
        self.train_tokens += tokens
        self.scheduler.step({"step": 1, "token": tokens, "sample": samples}[self.case.unit])
        if step % self.case.log_every == 0:
            self.log[step] = {"seq_length": attachment.seq_length, "train_tokens": self.train_tokens}

    def evaluate(self):
        self.model.eval()
        with torch.no_grad():
            for batch in loader(self.case, is_evaluation=True):
                self.model(**batch)

    def logged(self):
        return self.log

    def progress(self):
        return self.scheduler.progress

    def source(self):
        return lambda: self.train_tokens
