"""Every converted model family trains, evaluates and resumes in each trainer."""

import importlib

import pytest
import torch

from ..models import training
from ..models.zoo import FAMILIES, transformers
from ..support.tiers import first_fast

pytestmark = pytest.mark.filterwarnings("ignore")


def hugging_face(name, folder, resume=False):
    pytest.importorskip("accelerate")
    warmup = importlib.import_module("seqwarm_kernels.trainers.huggingface").SequenceLengthWarmup
    model = training.trainable(name)
    lengths = training.Lengths(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=training.STEPS,
        per_device_train_batch_size=training.BATCH_SIZE,
        learning_rate=training.LEARNING_RATE,
        save_steps=training.SAVED_AT,
        eval_strategy="steps",
        eval_steps=training.SAVED_AT,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = training.rows()
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:8])
    warmup(training.schedule()).add_to(trainer)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{training.SAVED_AT}") if resume else None)
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return losses[training.SAVED_AT :] if resume else losses, lengths, model


def lightning(name, folder, resume=False):
    pl = pytest.importorskip("lightning.pytorch")
    warmup = importlib.import_module("seqwarm_kernels.trainers.lightning").SequenceLengthWarmup

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = training.trainable(name)
            self.losses = []

        def training_step(self, batch, batch_idx):
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, batch_idx):
            self.model(**batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=training.LEARNING_RATE)

    module = Module()
    lengths = training.Lengths(module.model)
    saving = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_epochs=2, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=training.STEPS,
        callbacks=[warmup(training.schedule()), saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    rows = training.rows()
    train, validate = (torch.utils.data.DataLoader(part, batch_size=training.BATCH_SIZE) for part in (rows, rows[:8]))
    trainer.fit(module, train, validate, ckpt_path=folder / f"step={training.SAVED_AT}.ckpt" if resume else None)
    return module.losses, lengths, module.model


def composer(name, folder, resume=False):
    pytest.importorskip("composer", reason="needs Composer: make test-composer")
    from .composer.test_seq_length_warmup import SeqLengthWarmup
    from .composer.training import HuggingFaceModel, Run

    inner = training.trainable(name)
    lengths, rows, schedule = training.Lengths(inner), training.rows(), training.schedule()
    train, validate = (torch.utils.data.DataLoader(part, batch_size=training.BATCH_SIZE) for part in (rows, rows[:8]))
    share = schedule.duration / training.STEPS
    run = Run(
        f"{training.STEPS}ba",
        SeqLengthWarmup(share, schedule.min_seq_length, schedule.max_seq_length, schedule.step_size),
        model=HuggingFaceModel(inner, use_logits=True),
        dataloader=train,
        eval_dataloader=validate,
        eval_interval=f"{training.SAVED_AT}ba",
        save_folder=str(folder / ("again" if resume else "")),
        save_interval=f"{training.SAVED_AT}ba",
        load_path=str(next(folder.glob(f"*-ba{training.SAVED_AT}-rank0.pt"))) if resume else None,
    )
    return run.fit().seen.losses, lengths, inner


@pytest.mark.parametrize("run", [hugging_face, lightning, composer])
@pytest.mark.parametrize("name", first_fast(FAMILIES))
def test_a_family_trains_evaluates_and_resumes(name, run, tmp_path):
    losses, lengths, model = run(name, tmp_path)
    training.check_run(losses, lengths)
    if (name, run) == ("gpt_neox", hugging_face):
        pytest.xfail("transformers saves the head under another name, and its Trainer does not find it on resuming")
    resumed_losses, _, resumed = run(name, tmp_path, resume=True)
    training.check_resumed(losses, resumed_losses, model, resumed)
