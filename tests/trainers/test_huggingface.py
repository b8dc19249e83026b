"""What the callbacks promise in a Hugging Face Trainer alone; test_contract.py has the rest."""

from types import SimpleNamespace

import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

import seqwarm_kernels.models.seqwarm  # noqa: F401
from seqwarm_kernels.trainers.huggingface import Monitor, SequenceLengthWarmup

from ..support.huggingface import logged, quiet_trainer, tiny_gpt2
from ..support.tiers import first_fast

WORDS, LENGTH, LEARNING_RATE = 50, 16, 0.5


def model(dropout=0.0):
    made = tiny_gpt2(WORDS, LENGTH, dropout=dropout)
    made.loss_type = "ForCausalLM"
    return made


def schedule(duration=4, unit="step", **settings):
    return SequenceLengthScheduler(4, LENGTH, duration=duration, step_size=4, unit=unit, **settings)


def dataset(rows=16):
    """Rows of the same number of tokens."""
    torch.manual_seed(2)
    return [{"input_ids": row, "labels": row} for row in torch.randint(WORDS, (rows, LENGTH))]


def trainer(folder, model, callbacks=(), data=None, *, given=None, **arguments):
    data = dataset() if data is None else data
    given = {"train_dataset": data, "eval_dataset": data[:2], **(given or {})}
    settings = {"per_device_train_batch_size": 2, "learning_rate": LEARNING_RATE, **arguments}
    return quiet_trainer(folder, model, *callbacks, given=given, **settings)


def trained(*given, **arguments):
    made = trainer(*given, **arguments)
    made.train()
    return made


def test_several_devices_of_one_process_get_no_boundaries(tmp_path):
    """The Trainer's nn.DataParallel would give each a part of them, beside some rows."""
    made, seen = model(), []
    made.set_attn_implementation("seqwarm")
    made.register_forward_pre_hook(lambda model, args, kwargs: seen.extend(kwargs), with_kwargs=True)
    training = trainer(tmp_path, made, [SequenceLengthWarmup(schedule(), mode="segments")], max_steps=1)
    training.args._n_gpu = 2
    training.train()
    assert "position_ids" in seen
    assert "cu_seq_lens_q" not in seen


@pytest.mark.parametrize("made", [lambda: SequenceLengthWarmup(schedule()), Monitor], ids=["warmup", "monitor"])
def test_callbacks_must_be_added_to_their_trainer(tmp_path, made):
    with pytest.raises(ValueError, match="callbacks"):
        quiet_trainer(tmp_path, model(), given={"callbacks": [made()]})
    callback = made()
    training = trainer(tmp_path, model(), [callback])
    with pytest.raises(ValueError, match="trainer"):
        callback.add_to(training)


class Adds(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 1:
            SequenceLengthWarmup(schedule()).add_to(self.trainer)


def test_a_warmup_that_would_cut_nothing_raises(tmp_path):
    warmup, other = SequenceLengthWarmup(schedule()), Adds()
    trainer(tmp_path, model(), [warmup])
    for callback, steps in ((warmup, 0), (other, 1)):  # of another trainer; added in mid training
        other.trainer = trainer(tmp_path, model())
        other.trainer.add_callback(callback)
        with pytest.raises(ValueError, match="add_to"):
            other.trainer.train()
        assert other.trainer.state.global_step == steps


def test_bad_input_raises(tmp_path):
    training = trainer(tmp_path, model(), [SequenceLengthWarmup(schedule())])
    with pytest.raises(ValueError, match="one SequenceLengthWarmup"):
        SequenceLengthWarmup(schedule()).add_to(training)
    with pytest.raises(TypeError, match="sequence_dim"):
        trained(tmp_path, model(), [SequenceLengthWarmup(schedule(), sequence_dim=1)])
    config = SimpleNamespace(cp_size=1, sp_size=2)
    with pytest.raises(ValueError, match="sp_size"):
        SequenceLengthWarmup(schedule()).on_train_begin(SimpleNamespace(parallelism_config=config), None, None)


def test_a_callback_that_is_removed_in_training_does_not_cut(tmp_path):
    class Remove(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                training.remove_callback(warmup)

    warmed, warmup, lengths = model(), SequenceLengthWarmup(schedule(duration=100)), []
    warmed.transformer.wte.register_forward_pre_hook(lambda embedding, inputs: lengths.append(inputs[0].shape[1]))
    training = trainer(tmp_path, warmed, [Remove()], max_steps=3)
    warmup.add_to(training)
    training.train()
    assert lengths == [4, 4, LENGTH]
    other = trained(tmp_path, model(), [warmup], max_steps=3)
    assert logged(other, "seq_length") == [4, 4, 4]
    assert type(other) is type(training)


@pytest.mark.parametrize(("total", "steps", "delay", "evaluations"), first_fast([(57, 5, 5, 1), (56, 4, 5, 0)]))
def test_an_end_by_tokens_evaluates_and_saves_as_one_by_max_steps(tmp_path, total, steps, delay, evaluations):
    """Rows of 16 tokens, cut to 4, 4, 8, 12, 16: a batch of two more has 8, 16, 32, 56, 88 tokens in all."""
    settings = {"max_steps": 1000, "save_strategy": "steps", "save_steps": 500, "eval_strategy": "steps"}
    warmup = SequenceLengthWarmup(schedule(), total_tokens=total)
    training = trained(tmp_path, model(), [warmup], **settings, eval_steps=500, eval_delay=delay)
    assert training.state.global_step == steps
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{steps}"]
    assert sum("eval_loss" in record for record in training.state.log_history) == evaluations
    assert not {"seq_length", "train_tokens"} & training.evaluate().keys()  # which has whole rows


ADAM = {"optim": "adamw_torch", "learning_rate": 0.01}
JUMPS = {**ADAM, "learning_rate": 0.3, "save_strategy": "steps", "save_steps": 3}  # the loss has spikes


def test_a_monitor_alone_changes_no_loss(tmp_path):
    """The warmup counts labels of GPT-2 in another way than the Trainer."""
    losses = []
    for callbacks in ([], [Monitor()]):
        made = model()
        made.loss_type = None
        losses.append(logged(trained(tmp_path, made, callbacks, **ADAM, max_steps=3)))
    assert losses[0] == losses[1]


def test_each_of_several_monitors_resumes_with_its_counts(tmp_path):
    """One that is added later starts to count there."""
    whole = [Monitor(spike_threshold=each) for each in (1.01, 1.75, 1.01)]
    trained(tmp_path, model(), whole, **JUMPS)
    resumed = [Monitor(spike_threshold=each) for each in (1.01, 1.75, 1.01, 9.0)]
    later = trainer(tmp_path, model(), resumed, **JUMPS, restore_callback_states_from_checkpoint=True)
    later.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    *states, added = [each.monitor.state_dict() for each in resumed]
    assert states == [each.monitor.state_dict() for each in whole]
    assert states[0]["spikes"] > states[1]["spikes"]
    assert added["steps"] == 8


class LossOutside(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 2 * model(**inputs, num_items_in_batch=num_items_in_batch).loss


def test_a_loss_from_outside_of_the_model_is_watched(tmp_path):
    records = []
    arguments = {**ADAM, "kind": LossOutside, "gradient_accumulation_steps": 2, "max_steps": 2}
    training = trained(tmp_path, model(), [Monitor(records.append)], **arguments)
    assert [record.loss for record in records] == pytest.approx(logged(training), rel=1e-3)


def test_reporters_get_the_figures_until_the_monitor_is_removed(tmp_path):
    """The Trainer calls reporters before other callbacks."""
    seen = []

    class Reporter(transformers.TrainerCallback):
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
