"""Every converted model family trains, evaluates and resumes in Composer's trainer."""

import pytest
import torch

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from composer import Trainer
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader

from seqwarm_kernels.trainers.composer import SeqLengthWarmup

from ...models import training
from ...models.zoo import FAMILIES
from .training import Seen


def run(name, folder, resume=False):
    inner = training.trainable(name)
    lengths = training.Lengths(inner)
    seen, rows = Seen(), training.rows()
    model = HuggingFaceModel(inner, use_logits=True)
    train, validate = (DataLoader(part, batch_size=training.BATCH_SIZE) for part in (rows, rows[:8]))
    scheduler = training.schedule()
    warmup = SeqLengthWarmup(
        duration=scheduler.duration / training.STEPS,
        min_seq_length=scheduler.min_seq_length,
        max_seq_length=scheduler.max_seq_length,
        step_size=scheduler.step_size,
    )
    trainer = Trainer(
        model=model,
        train_dataloader=train,
        eval_dataloader=validate,
        eval_interval=f"{training.SAVED_AT}ba",
        max_duration=f"{training.STEPS}ba",
        algorithms=warmup,
        callbacks=seen,
        optimizers=torch.optim.AdamW(model.parameters(), lr=training.LEARNING_RATE),
        save_folder=str(folder / ("again" if resume else "")),
        save_interval=f"{training.SAVED_AT}ba",
        load_path=str(next(folder.glob(f"*-ba{training.SAVED_AT}-rank0.pt"))) if resume else None,
        device="cpu",
        seed=0,
        progress_bar=False,
    )
    trainer.fit()
    return seen.losses, lengths, inner


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_trains_evaluates_and_resumes(name, tmp_path):
    losses, lengths, model = run(name, tmp_path)
    training.check_run(losses, lengths)
    resumed_losses, _, resumed = run(name, tmp_path, resume=True)
    training.check_resumed(losses, resumed_losses, model, resumed)
