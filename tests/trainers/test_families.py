"""Every converted model family trains, evaluates and resumes in each trainer."""

import pytest
import torch

from ..models import training
from ..models.zoo import FAMILIES
from ..support.tiers import first_fast

pytestmark = pytest.mark.filterwarnings("ignore")


def hugging_face(name, folder, resume=False):
    pytest.importorskip("accelerate")
    from seqwarm_kernels.trainers.huggingface import SequenceLengthWarmup

    from ..support.huggingface import logged, quiet_trainer

    model, rows = training.trainable(name), training.rows()
    lengths = training.Lengths(model)
    trainer = quiet_trainer(
        folder,
        model,
        SequenceLengthWarmup(training.schedule()),
        given={"train_dataset": rows, "eval_dataset": rows[:8]},
        max_steps=training.STEPS,
        per_device_train_batch_size=training.BATCH_SIZE,
        optim="adamw_torch",
        learning_rate=training.LEARNING_RATE,
        save_strategy="steps",
        save_steps=training.SAVED_AT,
        eval_strategy="steps",
        eval_steps=training.SAVED_AT,
    )
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{training.SAVED_AT}") if resume else None)
    return logged(trainer)[training.SAVED_AT if resume else 0 :], lengths, model


def lightning(name, folder, resume=False):
    pl = pytest.importorskip("lightning.pytorch")
    from seqwarm_kernels.trainers.lightning import SequenceLengthWarmup

    from ..support.lightning import LossModule, quiet_trainer

    module = LossModule(training.trainable(name), torch.optim.AdamW, lr=training.LEARNING_RATE)
    lengths, rows = training.Lengths(module.model), training.rows()
    saving = pl.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_epochs=2, save_top_k=-1)
    warmup, settings = SequenceLengthWarmup(training.schedule()), {"max_epochs": None, "max_steps": training.STEPS}
    trainer = quiet_trainer(warmup, saving, enable_checkpointing=True, default_root_dir=folder, **settings)
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
