"""Trainings of Lightning without what tests do not look at."""

import lightning.pytorch as pl

_OFF = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def quiet_trainer(*callbacks, kind=pl.Trainer, **settings):
    """One epoch on a CPU, unless the settings say otherwise."""
    return kind(**{"accelerator": "cpu", "max_epochs": 1, **_OFF, "callbacks": list(callbacks), **settings})


class LossModule(pl.LightningModule):
    """Trains a model that returns its loss, and notes the losses."""

    def __init__(self, model, optimizer, **options):
        super().__init__()
        self.model, self.losses, self.optimizer_of = model, [], lambda: optimizer(self.parameters(), **options)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch)["loss"]
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        self.model(**batch)

    def configure_optimizers(self):
        return self.optimizer_of()
