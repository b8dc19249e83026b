"""Lightning's Trainer."""

import lightning.pytorch as pl

from seqwarm_kernels.trainers.lightning import Monitor, SequenceLengthWarmup

from ...support.lightning import LossModule, quiet_trainer
from .adapter import Adapter
from .cases import EPOCHS, loader
from .oracle import Rule


class Module(LossModule):
    def __init__(self, adapter):
        super().__init__(adapter.model, None)
        self.optimizer_and_rates = adapter.optimizer()  # of all trainings

    def configure_optimizers(self):
        optimizer, rates = self.optimizer_and_rates
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}


class Records(pl.loggers.logger.Logger):
    """Keeps what loggers get."""

    name, version = "records", 0

    def __init__(self):
        super().__init__()
        self.records = []

    def log_metrics(self, metrics, step=None):
        self.records.append(metrics)

    def log_hyperparams(self, *args, **kwargs):
        pass


class Lightning(Adapter):
    rule, Monitor = Rule("batches"), Monitor

    def __init__(self, case, model, folder):
        super().__init__(case, model, folder)
        self.warmup = SequenceLengthWarmup(case.schedule(), total_tokens=case.total_tokens, **case.options)
        self.module, self.first, self.logs = Module(self), 0, Records()

    def trainer(self):
        """A new one, since a second `fit` of the same continues the first."""
        case = self.case
        saving = [pl.callbacks.ModelCheckpoint(self.folder, "{step}", save_top_k=-1)] if case.saves else []
        ranks = {"devices": 2, "strategy": "ddp"} if self.processes > 1 else {}
        every = case.evaluate_every
        return quiet_trainer(
            self.warmup,
            *self.monitors,
            *saving,
            max_epochs=EPOCHS,
            max_steps=case.max_steps or -1,
            accumulate_grad_batches=case.accumulate,
            val_check_interval=every * case.accumulate if every else None,
            check_val_every_n_epoch=None if every else 1,
            num_sanity_val_steps=0,
            log_every_n_steps=case.log_every,
            logger=self.logs,
            gradient_clip_val=case.clip,
            enable_checkpointing=case.saves,
            use_distributed_sampler=False,
            **ranks,
        )

    def fit(self, resume=None):
        self.first, self.logs = resume or 0, Records()
        validation = loader(self.case, is_evaluation=True) if self.case.evaluate_every else None
        path = self.folder / f"step={resume}.ckpt" if resume else None
        self.trainer().fit(self.module, self.batches(), validation, ckpt_path=path)

    def evaluate(self):
        self.trainer().validate(self.module, loader(self.case, is_evaluation=True), verbose=False)

    def logged(self):
        every = self.case.log_every
        records = [record for record in self.logs.records if "train_tokens" in record]
        return {every * number: record for number, record in enumerate(records, self.first // every + 1)}
