"""Short trainings with each trainer, which start in a folder or resume there. Trainers are imported when called."""

import json
import pickle
import re

import pytest
import torch

END = "end.pt"


def train_gpt2(folder):
    """examples/train_gpt2, with DistributedDataParallel if there are several ranks. Tokens are beside the folder."""
    _train_gpt2(folder, total_tokens=2000, validate_every=0.15)


def train_gpt2_fsdp2(folder):
    _train_gpt2(folder, total_tokens=800, validate_every=0.2, parallel="fsdp2")


def _train_gpt2(folder, **settings):
    from ..test_train_gpt2 import script, train

    settings |= {"objective": "masked", "validation_tokens": 256, "micro_batch_size": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(script.model.SIZES, "toy", {**script.model.SIZES["toy"], "layers": 2, "width": 32})
        train(folder, folder.parent / "cache", "--resume", **settings)


def hugging_face(folder):
    from seqwarm_kernels.diagnostics import JsonLines
    from seqwarm_kernels.trainers.huggingface import Monitor, SequenceLengthWarmup

    from ..trainers import test_huggingface as made

    warmup = SequenceLengthWarmup(made.schedule(duration=60, unit="token"))
    training = made.trainer(
        *(folder / "run", made.model(dropout=0.1), [warmup, Monitor(JsonLines(folder / "monitor.jsonl"))]),
        _padded(made.dataset(16)),
        optim="adamw_torch",
        learning_rate=1e-2,
        train_sampling_strategy="random",
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=1,
        max_steps=12,
    )
    state = newest_complete((folder / "run").glob("checkpoint-*/trainer_state.json"))  # the Trainer writes it last
    training.train(resume_from_checkpoint=None if state is None else str(state.parent))
    save_end(folder, training.model, warmup.state_dict())


def _padded(rows):
    length = len(rows[0]["input_ids"])
    masks = [(torch.arange(length) <= number % length).long() for number in range(len(rows))]
    return [{**row, "attention_mask": mask} for row, mask in zip(rows, masks, strict=True)]


def lightning(folder):
    from seqwarm_kernels.diagnostics import JsonLines
    from seqwarm_kernels.trainers.lightning import Monitor, SequenceLengthWarmup

    from ..trainers import test_lightning as made

    checkpoints = made.lightning.callbacks.ModelCheckpoint(folder / "run", filename="{epoch}", save_top_k=-1)
    warmup, model = SequenceLengthWarmup(made.schedule(150, "token")), made.Model()
    callbacks = [warmup, Monitor(JsonLines(folder / "monitor.jsonl")), checkpoints]
    training = made.trainer(*callbacks, enable_checkpointing=True, max_epochs=20)
    checkpoint = newest_complete((folder / "run").glob("*.ckpt"))
    training.fit(model, made.loader(_padded(made.rows(4))), ckpt_path=checkpoint)
    save_end(folder, model, warmup.state_dict())


def composer(folder):
    from ..trainers.composer import conftest  # noqa: F401, I001  # first: it lets Composer be imported

    from seqwarm_kernels.diagnostics import JsonLines
    from seqwarm_kernels.trainers.composer import Monitor

    from ..trainers.composer import training
    from ..trainers.composer.test_seq_length_warmup import warmup

    checkpoint = newest_complete((folder / "run").glob("ep0-ba*-rank0.pt"))
    run = training.Run(
        "10ba",
        warmup(),
        model=training.tiny_gpt2(dropout=0.1),
        callbacks=[Monitor(JsonLines(folder / "monitor.jsonl"))],
        save_folder=str(folder / "run"),
        save_interval="2ba",
        save_overwrite=True,
        load_path=None if checkpoint is None else str(checkpoint),
    )
    if run.trainer.state.timestamp.batch < run.trainer.state.max_duration:  # else Composer refuses to fit
        run.fit()
    save_end(folder, run.model, {})


def newest_complete(checkpoints):
    """The file with the largest step or epoch in its path that can be read; None if there is none."""
    ordered = sorted(checkpoints, key=lambda path: [int(number) for number in re.findall(r"\d+", str(path))])
    return next((path for path in reversed(ordered) if _is_complete(path)), None)


def _is_complete(path):
    try:
        if path.suffix == ".json":
            json.loads(path.read_text())
        else:
            torch.load(path, weights_only=False)
    except (ValueError, EOFError, RuntimeError, pickle.UnpicklingError):
        return False
    return True


def save_end(folder, model, progress):
    torch.save({"weights": model.state_dict(), "progress": progress}, folder / END)


def assert_same_end(one, other):
    """Equal weights, bit for bit, equal progress of the schedule, equal records of every step."""
    ends = [torch.load(folder / END) for folder in (one, other)]
    assert ends[0]["progress"] == ends[1]["progress"]
    for name, tensor in ends[0]["weights"].items():
        assert torch.equal(tensor, ends[1]["weights"][name]), name
    assert (one / "monitor.jsonl").read_bytes() == (other / "monitor.jsonl").read_bytes()
