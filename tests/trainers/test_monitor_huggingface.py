"""Monitor in a real Hugging Face Trainer, against the Trainer's logs and the optimizer's state."""

import copy
import json
import math
import pickle

import pytest
import torch

from seqwarm_kernels.diagnostics import JsonLines

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from transformers import TrainerCallback

from seqwarm_kernels.trainers.huggingface import Monitor, SequenceLengthWarmup
from tests.support.tiers import first_fast

from ..diagnostics.plain import statistics_of
from .test_huggingface import dataset, logged, model, padded_dataset, schedule, trainer

ADAM = {"optim": "adamw_torch", "learning_rate": 0.01}
JUMPS = {**ADAM, "learning_rate": 0.3}  # the loss has spikes


class Plain:
    """The optimizer's statistics after each step, in plain numbers."""

    def __init__(self, training):
        self.rows = []
        step = training.create_optimizer().step

        def watched(*args, **kwargs):
            result = step(*args, **kwargs)
            self.rows.append(statistics_of(training.optimizer))
            return result

        training.optimizer.step = watched


def numbers(record):
    return [record.variance_l1, record.variance_max, record.momentum_l1, record.momentum_max, record.grad_norm]


@pytest.mark.parametrize("accumulate", first_fast([2, 1]))
@pytest.mark.parametrize("data", first_fast([padded_dataset, dataset]))
def test_records_are_the_logged_losses_and_the_optimizers_statistics(tmp_path, accumulate, data):
    records = []
    training = trainer(
        *(tmp_path, model(), [Monitor(records.append, read_every=3)], data()),
        **ADAM,
        gradient_accumulation_steps=accumulate,
    )
    plain = Plain(training)
    training.train()
    assert [record.step for record in records] == list(range(1, 8 // accumulate + 1))
    assert [record.loss for record in records] == pytest.approx(logged(training), rel=1e-3)  # logs are rounded
    assert len(plain.rows) == len(records)
    for record, expected in zip(records, plain.rows, strict=True):
        assert numbers(record) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("max_grad_norm", [0.01, 0.0])
def test_norms_are_those_before_clipping(tmp_path, max_grad_norm):
    records = []
    training = trainer(tmp_path, model(), [Monitor(records.append)], **ADAM, max_grad_norm=max_grad_norm)
    training.train()
    norms = [entry["grad_norm"] for entry in training.state.log_history if "grad_norm" in entry]
    assert [record.grad_norm for record in records] == pytest.approx(norms, rel=1e-6)
    assert min(norms) > 0.1


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


def test_with_a_warmup_the_loss_is_that_of_the_cut_batch(tmp_path):
    records = []
    training = trainer(tmp_path, model(), [Monitor(records.append), SequenceLengthWarmup(schedule())], **ADAM)
    training.train()
    assert [record.loss for record in records] == pytest.approx(logged(training), rel=1e-3)


def test_evaluation_is_not_counted(tmp_path):
    records = []
    monitor = Monitor(records.append)
    training = trainer(tmp_path, model(), [monitor], **ADAM, eval_strategy="steps", eval_steps=1)
    training.train()
    assert [record.loss for record in records] == pytest.approx(logged(training), rel=1e-3)
    training.evaluate()
    assert monitor.monitor.steps == 8


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("restore", first_fast([True, False]))
def test_a_resumed_training_goes_on_with_the_same_records(tmp_path, restore):
    options = {**JUMPS, "save_strategy": "steps", "save_steps": 3, "restore_callback_states_from_checkpoint": restore}
    whole = Monitor(JsonLines(tmp_path / "whole.jsonl"), spike_threshold=1.01)
    trainer(tmp_path / "whole", model(), [whole], **options).train()
    path = tmp_path / "parts.jsonl"
    first = Monitor(JsonLines(path), spike_threshold=1.01)
    trainer(tmp_path / "parts", model(), [first], **options).train()
    assert len(lines(path)) == 8
    second = Monitor(JsonLines(path), spike_threshold=1.01)
    resumed = trainer(tmp_path / "parts", model(), [second], **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    (monitor,) = [callback for callback in resumed.callback_handler.callbacks if isinstance(callback, Monitor)]
    assert lines(path) == lines(tmp_path / "whole.jsonl")
    assert monitor.monitor.state_dict() == whole.monitor.state_dict()
    assert whole.monitor.spikes > 0


@pytest.mark.parametrize("restore", first_fast([True, False]))
def test_each_of_several_monitors_resumes_with_its_counts(tmp_path, restore):
    options = {**JUMPS, "save_strategy": "steps", "save_steps": 3, "restore_callback_states_from_checkpoint": restore}

    def several(*outputs):
        thresholds = [1.01, 1.75, 1.01]
        return [Monitor(output, spike_threshold=each) for output, each in zip(outputs, thresholds, strict=True)]

    whole = several(print, print, print)
    trainer(tmp_path, model(), whole, **options).train()
    records = [[], [], []]
    resumed = trainer(tmp_path, model(), several(*(each.append for each in records)), **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    monitors = [callback for callback in resumed.callback_handler.callbacks if isinstance(callback, Monitor)]
    assert [each.monitor.state_dict() for each in monitors] == [each.monitor.state_dict() for each in whole]
    assert whole[0].monitor.spikes > whole[1].monitor.spikes
    assert [[record.step for record in each] for each in records] == [[7, 8]] * 3


def test_a_monitor_that_is_added_later_does_not_change_the_counts_of_another(tmp_path):
    options = {**JUMPS, "save_strategy": "steps", "save_steps": 3}
    whole = Monitor(spike_threshold=1.01)
    trainer(tmp_path, model(), [whole], **options).train()
    for step in (3, 6):  # the second time from a checkpoint of both
        old, new = Monitor(spike_threshold=1.01), Monitor(spike_threshold=1.75)
        resumed = trainer(tmp_path, model(), [old, new], **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert old.monitor.state_dict() == whole.monitor.state_dict()
        assert new.monitor.steps == 8


@pytest.mark.parametrize(
    "copied", first_fast([copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]), ids=["copy", "pickle"]
)
def test_copies(tmp_path, copied):
    monitor = copied(Monitor(JsonLines(tmp_path / "monitor.jsonl"), spike_threshold=1.5))
    assert isinstance(monitor, Monitor)
    options = {**ADAM, "save_strategy": "steps", "save_steps": 3, "restore_callback_states_from_checkpoint": True}
    training = trainer(tmp_path, model(), [monitor], **options)
    training.train()
    training.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [line["step"] for line in lines(tmp_path / "monitor.jsonl")] == list(range(1, 9))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("outside", ["label_smoothing_factor", "compute_loss_func", "compute_loss"])
def test_a_loss_from_outside_of_the_model_is_watched(tmp_path, outside, accumulate):
    records, smoothing = [], 0.1 * (outside == "label_smoothing_factor")
    arguments = {**ADAM, "label_smoothing_factor": smoothing, "gradient_accumulation_steps": accumulate}
    training = trainer(tmp_path, model(), [Monitor(records.append)], **arguments)

    def twice(model, inputs, return_outputs=False, num_items_in_batch=None):
        return 2 * model(**inputs, num_items_in_batch=num_items_in_batch).loss

    def function(outputs, labels, num_items_in_batch):
        return outputs.logits.square().sum() / num_items_in_batch

    if outside == "compute_loss":
        training.compute_loss = twice
    elif outside == "compute_loss_func":
        training.compute_loss_func = function
    training.train()
    assert [record.loss for record in records] == pytest.approx(logged(training), rel=1e-3)


def test_a_checkpoint_without_a_monitor_counts_from_there(tmp_path):
    options = {**ADAM, "save_strategy": "steps", "save_steps": 3}
    trainer(tmp_path, model(), [], **options).train()
    records = []
    resumed = trainer(tmp_path, model(), [Monitor(records.append)], **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [record.step for record in records] == [4, 5, 6, 7, 8]
    assert records[0].loss_ratio == 1.0


def test_a_second_training_starts_again_also_after_an_interrupted_one(tmp_path):
    class Interrupted(Monitor):
        def on_optimizer_step(self, args, state, control, **kwargs):
            super().on_optimizer_step(args, state, control, **kwargs)
            if state.global_step == 2 and self.is_interrupted:
                raise RuntimeError("interrupted")

    records = []
    monitor = Interrupted(records.append)
    monitor.is_interrupted = True
    made = model()
    training = trainer(tmp_path, made, [monitor], **ADAM)
    with pytest.raises(RuntimeError, match="interrupted"):
        training.train()
    monitor.is_interrupted = False
    training.train()
    assert [record.step for record in records] == [1, 2, 3, *range(1, 9)]


def test_an_optimizer_without_moments_is_watched_for_the_rest(tmp_path):
    reporter, records = Reporter(), []
    training = trainer(tmp_path, model(), [reporter, Monitor(records.append, read_every=1)])  # SGD
    training.train()
    assert [record.loss for record in records] == pytest.approx(logged(training), rel=1e-3)
    assert all(numbers(record)[:4] == [None] * 4 and record.grad_norm > 0 for record in records)
    names = {name for name in reporter.logs[0] if name.startswith("monitor/")}
    assert names == {"monitor/step", "monitor/loss_ratio", "monitor/grad_norm", "monitor/spikes"}


def test_options_are_checked_at_once():
    with pytest.raises(ValueError, match="spike_threshold must be at least 1"):
        Monitor(spike_threshold=0.5)
    with pytest.raises(TypeError, match="outputs must be callables"):
        Monitor("monitor.jsonl")


def test_a_loss_that_is_not_finite_is_a_spike(tmp_path):
    made, records = model(), []
    with torch.no_grad():
        made.transformer.wte.weight[0, 0] = math.nan
    trainer(tmp_path, made, [Monitor(records.append)], **ADAM).train()
    assert all(record.is_spike for record in records)


def test_a_compiled_model(tmp_path):
    records = []
    training = trainer(
        *(tmp_path, model(), [Monitor(records.append)]),
        **ADAM,
        torch_compile=True,
        torch_compile_backend="eager",
        max_steps=3,
    )
    training.train()
    assert [record.loss for record in records] == pytest.approx(logged(training), rel=1e-3)


class Reporter(TrainerCallback):
    """Collects the logs as they reach a reporter, which the Trainer calls before other callbacks."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs, **kwargs):
        self.logs.append(dict(logs))


FIGURES = ("loss_ratio", "variance_l1", "variance_max", "momentum_l1", "momentum_max", "grad_norm")


def test_reporters_get_the_figures_of_the_newest_record(tmp_path):
    reporter, records, warmup = Reporter(), [], SequenceLengthWarmup(schedule())
    monitor = Monitor(records.append, read_every=3, spike_threshold=1.01)
    training = trainer(tmp_path, model(), [reporter, monitor, warmup], **JUMPS)
    training.train()
    assert len(records) == 8
    *logs, summary = reporter.logs
    assert [log["seq_length"] for log in reporter.logs] == [4, 4, 8, 12, 16, 16, 16, 16, 16]
    assert [log.get("monitor/step") for log in logs] == [None, None, 3, 3, 3, 6, 6, 6]
    for log in logs[2:]:
        record = records[log["monitor/step"] - 1]
        assert {name: log[f"monitor/{name}"] for name in FIGURES} == {name: getattr(record, name) for name in FIGURES}
        assert log["monitor/spikes"] == sum(record.is_spike for record in records[: record.step])
    assert 0 < logs[-1]["monitor/spikes"] < 6
    assert summary["monitor/step"] == 6
    history = [record for record in training.state.log_history if "loss" in record]
    assert [{**log, "step": step} for step, log in enumerate(logs, 1)] == history
    assert not [name for name in training.evaluate() if name.startswith(("monitor/", "seq_length"))]


def test_a_removed_monitor_logs_nothing(tmp_path):
    class Remove(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                training.remove_callback(monitor)

    reporter, monitor = Reporter(), Monitor(read_every=1)
    training = trainer(tmp_path, model(), [reporter, Remove, monitor], **ADAM)
    with pytest.raises(ValueError, match="trainer must not have this Monitor yet"):
        monitor.add_to(training)
    training.train()
    assert [log.get("monitor/step") for log in reporter.logs] == [1, 2, 3, *[None] * 6]


def test_a_monitor_in_callbacks_raises(tmp_path):
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(
        ValueError, match=r"^callbacks must not hold Monitor; call Monitor\(\.\.\.\)\.add_to\(trainer\)"
    ):
        transformers.Trainer(model(), arguments, callbacks=[Monitor()])
