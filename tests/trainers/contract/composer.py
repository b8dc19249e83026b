"""Composer's Trainer, whose schedule follows the trainer's own count of batches, samples or tokens."""

from ..composer import conftest  # noqa: F401  # lets Composer be imported

# isort: split
from composer import Trainer
from composer.algorithms import GradientClipping
from composer.loggers import InMemoryLogger
from composer.models import ComposerModel
from torch.utils.data import DataLoader, DistributedSampler

from seqwarm_kernels.trainers.composer import Monitor, SeqLengthWarmup, TokenCounter

from .adapter import Adapter
from .cases import BATCH_SIZE, EPOCHS, ITEMS, LENGTH, LONGEST, SHORTEST, STEP_SIZE, collate_packed
from .oracle import Rule

OPTIONS = {"mode", "keep_last_token", "boundaries"}
MODES = ("truncate", "flatten", "segments")


class Wrapped(ComposerModel):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(**batch)

    def loss(self, outputs, batch):
        return outputs["loss"]


class Composer(Adapter):
    rule, Monitor = Rule("rows", counts_whole_rows=True), Monitor
    warns_of_short = keeps_schedule = False

    @classmethod
    def supports(cls, case):
        """It truncates or cuts the batch as one stream, and packed rows cannot be split into microbatches."""
        has_mode = case.options.keys() <= OPTIONS and case.options.get("mode", "truncate") in MODES
        is_one_batch = not case.is_packed or case.accumulate == 1
        has_share = case.max_steps is None and (not case.is_packed or case.unit == "step")
        return has_mode and is_one_batch and has_share and case.log_every == 1

    def __init__(self, case, model, folder):
        super().__init__(case, model, folder)
        total = EPOCHS * {"step": self.epoch_steps(), "sample": ITEMS, "token": ITEMS * LENGTH}[case.unit]
        self.max_duration = f"{total}{ {'step': 'ba', 'sample': 'sp', 'token': 'tok'}[case.unit] }"
        self.warmup = SeqLengthWarmup(
            *(case.duration / total, SHORTEST, LONGEST, STEP_SIZE),
            truncate="mode" not in case.options,
            preserve_end_of_sequence="keep_last_token" in case.options,
            **(case.options if case.options.get("mode") == "segments" else {}),
        )
        self.counter = TokenCounter(case.total_tokens)
        self.wrapped, self.logs, self.first = Wrapped(model), InMemoryLogger(), 0
        self.optimizer_and_rates = self.optimizer()  # of all trainings

    def trainer(self, resume=None):
        case, saving = self.case, {}
        if case.saves:
            saving = {"save_folder": str(self.folder), "save_interval": f"{self.epoch_steps()}ba"}
        optimizer, rates = self.optimizer_and_rates
        return Trainer(
            model=self.wrapped,
            train_dataloader=self.sampled(),
            eval_dataloader=self.sampled(is_evaluation=True) if case.evaluate_every else None,
            eval_interval=f"{case.evaluate_every}ba" if case.evaluate_every else 1,
            max_duration=self.max_duration,
            device_train_microbatch_size=None if case.is_packed else BATCH_SIZE,
            algorithms=[self.warmup, *([GradientClipping("norm", case.clip)] if case.clip else [])],
            callbacks=[self.counter, *self.monitors],
            loggers=self.logs,
            optimizers=optimizer,
            schedulers=rates,
            step_schedulers_every_batch=True,
            load_path=str(next(self.folder.glob(f"*-ba{resume}-rank0.pt"))) if resume else None,
            device="cpu",
            seed=0,
            progress_bar=False,
            **saving,
        )

    def sampled(self, is_evaluation=False):
        """On several ranks, Composer wants a sampler for them."""
        own = self.batches(is_evaluation=is_evaluation)
        size = BATCH_SIZE * (1 if is_evaluation else self.case.accumulate)
        sampler = DistributedSampler(own.dataset, num_replicas=1, rank=0, shuffle=False)
        collate = collate_packed if self.case.is_packed else own.collate_fn  # Composer refuses batches with numbers
        return DataLoader(own.dataset, size, sampler=sampler, collate_fn=collate)

    def fit(self, resume=None):
        self.logs, self.first = InMemoryLogger(), resume or 0
        trainer = self.trainer(resume)
        self.model.calls.clear()  # torch makes a step without effect to load an optimizer's state
        trainer.fit()

    def evaluate(self):
        self.trainer().eval(self.sampled(is_evaluation=True))

    def logged(self):
        lengths = [length for _, length in self.logs.data["seq_length_warmup/curr_seq_len"]]
        logged = {step: {"seq_length": length} for step, length in enumerate(lengths, self.first + 1)}
        for name in self.logs.data:
            if name == "train_tokens" or name.startswith("monitor/"):
                for time, value in self.logs.data[name]:
                    logged[time.batch.value][name] = value
        return logged

    def source(self):
        return self.counter.count_tokens
