"""The Trainer of Hugging Face."""

from seqwarm_kernels.trainers.huggingface import Monitor, SequenceLengthWarmup

from ...support.huggingface import quiet_trainer
from .adapter import Adapter
from .cases import BATCH_SIZE, COLLATE, EPOCHS, EVALUATED, items
from .oracle import Rule


class HuggingFace(Adapter):
    rule, Monitor = Rule("labels"), Monitor
    knows_steps_of_epochs = True

    def __init__(self, case, model, folder):
        super().__init__(case, model, folder)
        self.warmup = SequenceLengthWarmup(case.schedule(), total_tokens=case.total_tokens, **case.options)
        settings = {
            "per_device_train_batch_size": BATCH_SIZE,
            "per_device_eval_batch_size": BATCH_SIZE,
            "gradient_accumulation_steps": case.accumulate,
            "num_train_epochs": EPOCHS,
            "max_steps": case.max_steps or -1,
            "logging_steps": case.log_every,
            "eval_strategy": "steps" if case.evaluate_every else "no",
            "eval_steps": case.evaluate_every,
            "save_strategy": "epoch" if case.saves else "no",
            "prediction_loss_only": True,
            "remove_unused_columns": False,
            "max_grad_norm": case.clip or 0.0,
            "restore_callback_states_from_checkpoint": True,
            "ddp_backend": "gloo" if self.processes > 1 else None,
        }
        given = {
            "train_dataset": items(case),
            "eval_dataset": items(case)[:EVALUATED],
            "data_collator": COLLATE[case.data],
            "optimizers": self.optimizer(),
        }
        self.trainer = quiet_trainer(folder, model, self.warmup, *self.monitors, given=given, **settings)
        if self.processes > self.world_size:  # the Trainer's own loader has other rows for each rank
            self.trainer.get_train_dataloader = self.batches

    def fit(self, resume=None):
        self.trainer.train(resume_from_checkpoint=str(self.folder / f"checkpoint-{resume}") if resume else None)

    def evaluate(self):
        self.trainer.evaluate()

    def logged(self):
        return {record["step"]: record for record in self.trainer.state.log_history if "loss" in record}
