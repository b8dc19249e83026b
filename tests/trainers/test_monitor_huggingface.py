"""What Monitor promises in a Hugging Face Trainer alone; test_monitors.py has the rest."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from transformers import TrainerCallback

from seqwarm_kernels.trainers.huggingface import Monitor

from .test_huggingface import logged, model, trainer

ADAM = {"optim": "adamw_torch", "learning_rate": 0.01}
JUMPS = {**ADAM, "learning_rate": 0.3, "save_strategy": "steps", "save_steps": 3}  # the loss has spikes


def test_a_monitor_alone_changes_no_loss(tmp_path):
    """The warmup counts labels of GPT-2 in another way than the Trainer."""
    losses = []
    for callbacks in ([], [Monitor()]):
        made = model()
        made.loss_type = None
        training = trainer(tmp_path, made, callbacks, **ADAM)
        training.train()
        losses.append(logged(training))
    assert losses[0] == losses[1]


def test_each_of_several_monitors_resumes_with_its_counts(tmp_path):
    def several():
        return [Monitor(spike_threshold=each) for each in (1.01, 1.75, 1.01)]

    whole, resumed = several(), several()
    trainer(tmp_path, model(), whole, **JUMPS).train()
    later = trainer(tmp_path, model(), resumed, **JUMPS, restore_callback_states_from_checkpoint=True)
    later.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert [each.monitor.state_dict() for each in resumed] == [each.monitor.state_dict() for each in whole]
    assert whole[0].monitor.spikes > whole[1].monitor.spikes


def test_a_monitor_that_is_added_later_does_not_change_the_counts_of_another(tmp_path):
    whole = Monitor(spike_threshold=1.01)
    trainer(tmp_path, model(), [whole], **JUMPS).train()
    for step in (3, 6):  # the second time from a checkpoint of both
        old, new = Monitor(spike_threshold=1.01), Monitor(spike_threshold=1.75)
        resumed = trainer(tmp_path, model(), [old, new], **JUMPS)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert old.monitor.state_dict() == whole.monitor.state_dict()
        assert new.monitor.steps == 8


class LossOutside(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 2 * model(**inputs, num_items_in_batch=num_items_in_batch).loss


@pytest.mark.parametrize(
    ("kind", "smoothing"), [(LossOutside, 0.0), (transformers.Trainer, 0.1)], ids=["compute_loss", "smoothing"]
)
def test_a_loss_from_outside_of_the_model_is_watched(tmp_path, kind, smoothing):
    records = []
    arguments = {**ADAM, "label_smoothing_factor": smoothing, "gradient_accumulation_steps": 2}
    training = trainer(tmp_path, model(), [Monitor(records.append)], kind=kind, **arguments)
    training.train()
    assert [record.loss for record in records] == pytest.approx(logged(training), rel=1e-3)


def test_reporters_get_the_figures_until_the_monitor_is_removed(tmp_path):
    """The Trainer calls reporters before other callbacks."""
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            seen.append(logs.get("monitor/step"))

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                training.remove_callback(monitor)

    monitor = Monitor(read_every=1)
    training = trainer(tmp_path, model(), [Reporter(), monitor], **ADAM)
    training.train()
    assert seen == [1, 2, 3, *[None] * 6]
    assert not [name for name in training.evaluate() if name.startswith("monitor/")]
