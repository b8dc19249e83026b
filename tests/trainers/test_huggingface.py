"""What SequenceLengthWarmup promises in a Hugging Face Trainer alone; test_contract.py has the rest."""

import copy
import json
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler, TokenLR

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from seqwarm_kernels.trainers.huggingface import SequenceLengthWarmup

from ..support.huggingface import PLAIN_SGD, logged
from ..support.ranks import leave_group, run_ranks, set_environment

WORDS, LENGTH, LEARNING_RATE = 50, 16, 0.5


def model(dropout=0.0):
    torch.manual_seed(1)
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(**sizes, **dropouts, bos_token_id=0, eos_token_id=0)
    made = transformers.GPT2LMHeadModel(config)
    made.loss_type = "ForCausalLM"
    return made


def schedule(duration=4, unit="step", **settings):
    return SequenceLengthScheduler(4, LENGTH, duration=duration, step_size=4, unit=unit, **settings)


def dataset(rows=16):
    """Rows of the same number of tokens."""
    torch.manual_seed(2)
    return [{"input_ids": row, "labels": row} for row in torch.randint(WORDS, (rows, LENGTH))]


def padded_dataset(rows=16):
    lengths = torch.arange(rows) % LENGTH + 1
    masks = (torch.arange(LENGTH) < lengths[:, None]).long()
    return [{**row, "attention_mask": mask} for row, mask in zip(dataset(rows), masks, strict=True)]


def trainer(folder, model, callbacks, data=None, kind=transformers.Trainer, **arguments):
    settings = {**PLAIN_SGD, "per_device_train_batch_size": 2, "learning_rate": LEARNING_RATE}
    data = dataset() if data is None else data
    arguments = transformers.TrainingArguments(output_dir=str(folder), **{**settings, **arguments})
    made = kind(model, arguments, train_dataset=data, eval_dataset=data[:2])
    made.remove_callback(transformers.PrinterCallback)
    for callback in callbacks:
        callback.add_to(made) if hasattr(callback, "add_to") else made.add_callback(callback)
    return made


def test_a_schedule_that_falls_again_has_reached_its_length(tmp_path):
    falling = SequenceLengthScheduler(4, LENGTH, duration=8, step_size=4, pacing=lambda share: float(share < 0.5))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the training ends at")
        trainer(tmp_path, model(), [SequenceLengthWarmup(falling)], max_steps=6).train()
    assert falling.seq_length < LENGTH


@pytest.mark.parametrize(
    ("unit", "progress", "warns_at", "limits"),
    [
        ("step", 3, 0, {"max_steps": 3}),
        ("step", 3, 0, {"num_train_epochs": 3, "gradient_accumulation_steps": 8}),
        ("sample", 6, 3, {"max_steps": 3}),
    ],
)
def test_a_training_that_is_too_short_warns_as_early_as_that_is_known(tmp_path, unit, progress, warns_at, limits):
    training = trainer(tmp_path, model(), [SequenceLengthWarmup(schedule(10, unit))], **limits)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the training ends at")
        with pytest.raises(UserWarning, match=f"grows for 10 {unit}s, and the training takes {progress}"):
            training.train()
    assert training.state.global_step == warns_at


def test_lengths_and_tokens_are_logged(tmp_path):
    seen = []

    class Reporter(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            seen.append(logs.get("seq_length"))

    training = trainer(tmp_path, model(), [Reporter, SequenceLengthWarmup(schedule())], gradient_accumulation_steps=2)
    training.train()
    assert logged(training, "seq_length") == [4, 4, 8, 12]
    assert logged(training, "train_tokens") == [16, 32, 64, 112]
    assert seen == [4, 4, 8, 12, 12]  # the last record is the Trainer's summary
    assert "seq_length" not in training.evaluate()


def test_a_callback_that_the_trainer_restores_goes_on_in_mid_epoch(tmp_path):
    """With shuffled rows and dropout, on the same bits."""
    arguments = {"optim": "adamw_torch", "learning_rate": 1e-2, "train_sampling_strategy": "random"}
    arguments |= {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    arguments |= {"restore_callback_states_from_checkpoint": True}

    def made(folder):
        warmup = SequenceLengthWarmup(schedule(duration=60, unit="token"))
        return trainer(folder, model(dropout=0.1), [warmup], padded_dataset(), **arguments)

    uninterrupted, resumed = made(tmp_path), made(tmp_path / "again")
    uninterrupted.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert 4 < logged(uninterrupted, "seq_length")[2] < LENGTH
    for name in ("loss", "seq_length", "train_tokens"):
        assert logged(resumed, name) == logged(uninterrupted, name)
    for name, parameter in uninterrupted.model.named_parameters():
        assert torch.equal(resumed.model.get_parameter(name), parameter), name


def test_after_an_interruption_a_removed_callback_does_not_cut(tmp_path):
    warmed, warmup, lengths = model(), SequenceLengthWarmup(schedule(duration=100)), []

    def record(embedding, inputs):
        lengths.append(inputs[0].shape[1])
        if len(lengths) == 2:
            raise KeyboardInterrupt

    warmed.transformer.wte.register_forward_pre_hook(record)
    training = trainer(tmp_path, warmed, [warmup], max_steps=2)
    with pytest.raises(KeyboardInterrupt):
        training.train()
    training.remove_callback(warmup)
    training.train()
    assert lengths == [4, 4, LENGTH, LENGTH]
    other = SequenceLengthWarmup(schedule(duration=100))
    other.add_to(training)
    training.train()
    assert lengths[4:] == [4, 4]


def test_a_callback_that_is_removed_in_training_does_not_cut(tmp_path):
    class Remove(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                training.remove_callback(warmup)

    warmed, warmup, lengths = model(), SequenceLengthWarmup(schedule(duration=100)), []
    warmed.transformer.wte.register_forward_pre_hook(lambda embedding, inputs: lengths.append(inputs[0].shape[1]))
    training = trainer(tmp_path, warmed, [Remove()], max_steps=4)
    warmup.add_to(training)
    training.train()
    assert lengths == [4, 4, LENGTH, LENGTH]


def test_a_search_for_the_batch_size_starts_over(tmp_path):
    """The first step had the rate of the last one before, 0.7 of the peak, and not that of 0 tokens."""
    warmed, warmup, rates = model(), SequenceLengthWarmup(schedule()), []
    optimizer = torch.optim.SGD(warmed.parameters(), lr=1.0)
    rate = TokenLR(optimizer, warmup_tokens=100, decay_tokens=1000, source=warmup.count_tokens)
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))

    class OutOfMemory(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.train_batch_size == 4 and state.global_step == 3:
                raise RuntimeError("CUDA out of memory.")

    arguments = {"per_device_train_batch_size": 4, "auto_find_batch_size": True, "max_steps": 4}
    training = trainer(tmp_path, warmed, [OutOfMemory()], **arguments)
    training.optimizer, training.lr_scheduler = optimizer, rate
    warmup.add_to(training)
    training.train()
    size = training.state.train_batch_size
    assert size < 4
    assert logged(training, "seq_length") == [4, 4, 8, 12]
    assert rates == pytest.approx([0, 0.16, 0.32] + [size * tokens / 100 for tokens in (0, 4, 8, 16)])


@pytest.mark.parametrize(("total", "steps"), [(56, 4), (57, 5)])
def test_an_end_by_tokens_evaluates_and_saves_as_one_by_max_steps(tmp_path, total, steps):
    """Rows of 16 tokens, cut to 4, 4, 8, 12, 16: a batch of two more has 8, 16, 32, 56, 88 tokens in all."""
    settings = {"max_steps": 1000, "save_strategy": "steps", "save_steps": 500, "eval_strategy": "steps"}
    warmup = SequenceLengthWarmup(schedule(), total_tokens=total)
    training = trainer(tmp_path, model(), [warmup], **settings, eval_steps=500)
    training.train()
    assert training.state.global_step == steps
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{steps}"]
    assert sum("eval_loss" in record for record in training.state.log_history) == 1


@pytest.mark.parametrize("delay", [3, 4])
def test_an_end_by_tokens_evaluates_only_by_steps(tmp_path, delay):
    settings = {"save_strategy": "epoch", "eval_strategy": "steps", "eval_delay": delay, "eval_steps": 500}
    training = trainer(tmp_path, model(), [SequenceLengthWarmup(schedule(), total_tokens=25)], **settings)
    training.train()
    assert training.state.global_step == 3
    assert any("eval_loss" in record for record in training.state.log_history) == (delay == 3)


def test_a_count_without_a_training_raises(tmp_path):
    warmed, other = model(), SequenceLengthWarmup(schedule())
    with pytest.raises(ValueError, match="count_tokens needs a running training with this"):
        other.count_tokens()
    training = trainer(tmp_path, warmed, [SequenceLengthWarmup(schedule())])
    training.optimizer = torch.optim.SGD(warmed.parameters(), lr=1.0)
    training.lr_scheduler = TokenLR(training.optimizer, warmup_tokens=10, decay_tokens=20, source=other.count_tokens)
    with pytest.raises(ValueError, match="count_tokens needs a running training with this"):
        training.train()


@pytest.mark.slow
def test_a_compiled_model_is_warmed_up(tmp_path):
    flags = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    compiled, plain = (
        trainer(tmp_path, model(), [SequenceLengthWarmup(schedule())], max_steps=5, **each) for each in (flags, {})
    )
    compiled.train()
    plain.train()
    assert logged(compiled, "seq_length") == [4, 4, 8, 12, 16]
    torch.testing.assert_close(logged(compiled), logged(plain), rtol=1e-5, atol=1e-5)


def after_an_evaluation(rank, port, folder):
    set_environment(rank, port)
    training = trainer(folder, model(), [SequenceLengthWarmup(schedule())], ddp_backend="gloo", max_steps=2)
    training.evaluate()
    training.train()
    (folder / f"{rank}.json").write_text(json.dumps(training.model.transformer.wte.weight.tolist()))
    leave_group()


@pytest.mark.slow
def test_ranks_agree_after_an_evaluation_before_training(tmp_path):
    """Accelerate leaves out DDP for a model that it has prepared for evaluation."""
    run_ranks(after_an_evaluation, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second


def test_a_checkpoint_of_another_configuration_raises(tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer(tmp_path, model(), [SequenceLengthWarmup(schedule())], **arguments).train()
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    name = "seqwarm_kernels.SequenceLengthWarmup"
    assert saved["stateful_callbacks"][name]["train_tokens"] == 16
    arguments |= {"max_steps": 4, "save_strategy": "no"}

    def resume(callback, **flags):
        training = trainer(tmp_path / "again", model(), [callback], **arguments, **flags)
        training.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))

    for restore in (False, True):
        with pytest.raises(ValueError, match="duration is 4 in the state, 9 here"):
            resume(SequenceLengthWarmup(schedule(9)), restore_callback_states_from_checkpoint=restore)
    del saved["stateful_callbacks"][name]
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="must have a state of SequenceLengthWarmup, got none"):
        resume(SequenceLengthWarmup(schedule()))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))], ids=["copy", "pickle"])
def test_a_copy_trains_by_itself(tmp_path, copied):
    source = SequenceLengthWarmup(schedule(), mode="reshape")
    training = trainer(tmp_path, model(), [copied(source)], max_steps=3)
    training.train()
    assert logged(training, "seq_length") == [4, 4, 8]
    assert source.state_dict()["scheduler"]["progress"] == 0


def test_a_callback_is_added_again_or_to_another_trainer(tmp_path):
    warmup = SequenceLengthWarmup(schedule())
    first, second = (trainer(tmp_path, model(), [warmup], max_steps=3) for _ in range(2))
    for training in (first, second, first):
        training.remove_callback(warmup)
        warmup.add_to(training)
        training.train()
        assert logged(training, "seq_length") == [4, 4, 8]
    assert type(first) is type(second)


def test_bad_input_raises(tmp_path):
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), **PLAIN_SGD)
    with pytest.raises(ValueError, match=r"^callbacks must not hold SequenceLengthWarmup; call .*add_to\(trainer\)"):
        transformers.Trainer(model(), arguments, callbacks=[SequenceLengthWarmup(schedule())])
    training = trainer(tmp_path, model(), [SequenceLengthWarmup(schedule())])
    with pytest.raises(ValueError, match="trainer must have one SequenceLengthWarmup"):
        SequenceLengthWarmup(schedule()).add_to(training)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sequence_dim'"):
        trainer(tmp_path, model(), [SequenceLengthWarmup(schedule(), sequence_dim=1)]).train()
    begin = SequenceLengthWarmup(schedule()).on_train_begin
    config = SimpleNamespace(cp_size=1, sp_size=2)
    with pytest.raises(ValueError, match="parallelism_config must have sp_size=1, got 2"):
        begin(SimpleNamespace(parallelism_config=config), None, None)


def test_label_smoothing_sees_the_cut_batch(tmp_path):
    """The Trainer smooths labels outside of the model."""
    warmed = model()
    smoothed = {"label_smoothing_factor": 0.1, "max_steps": 1}
    training = trainer(tmp_path, warmed, [SequenceLengthWarmup(schedule())], **smoothed)
    training.train()
    cut = [{name: value[:4] for name, value in row.items()} for row in dataset()]
    plain = trainer(tmp_path, model(), [], cut, **smoothed)
    plain.train()
    torch.testing.assert_close(logged(training), logged(plain))
