"""SequenceLengthWarmup in a real Hugging Face Trainer, against training loops without a Trainer."""

import copy
import json
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler, TokenLR, resize_batch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

from seqwarm_kernels.trainers.huggingface import SequenceLengthWarmup

from ..support.huggingface import PLAIN_SGD, logged
from ..support.ranks import leave_group, run_ranks, set_environment
from ..support.tiers import first_fast

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


def collated(data, size=2):
    rows = [data[start : start + size] for start in range(0, len(data), size)]
    return [{name: torch.stack([row[name] for row in batch]) for name in batch[0]} for batch in rows]


def divisor(trainer):
    """The Trainer's num_items_in_batch for each label with a loss. Some versions count the first label, too."""
    batch = collated(dataset(2))
    return float(trainer.get_batch_samples(iter(batch), 1, "cpu")[1]) / (2 * (LENGTH - 1))


def by_hand(model, schedule, data, divisor, accumulate=1, **options):
    """Trains without a Trainer. The loss of a step is taken over all labels that are left after cutting."""
    optimizer, losses, batches = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), [], collated(data)
    for start in range(0, len(batches), accumulate):
        cut = [resize_batch(batch, schedule.seq_length, **options) for batch in batches[start : start + accumulate]]
        count = divisor * sum(batch["labels"][:, 1:].numel() for batch in cut)
        parts = [model(**batch, num_items_in_batch=count).loss for batch in cut]
        sum(parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(sum(parts).item())
    return losses


def assert_same_weights(model, expected, **tolerance):
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, **tolerance)


@pytest.mark.parametrize(
    ("accumulate", "options"),
    first_fast([(2, {"mode": "flatten"}), (1, {}), (2, {}), (3, {}), (1, {"mode": "reshape"})]),
)
def test_training_equals_a_loop_over_resized_batches(tmp_path, accumulate, options):
    warmed, expected = model(), model()
    callback = SequenceLengthWarmup(schedule(), **options)
    training = trainer(tmp_path, warmed, [callback], gradient_accumulation_steps=accumulate)
    training.train()
    losses = by_hand(expected, schedule(), dataset(), divisor(training), accumulate, **options)
    torch.testing.assert_close(logged(training), losses, rtol=1e-5, atol=1e-5)
    assert_same_weights(warmed, expected)
    assert not warmed._forward_pre_hooks


@pytest.mark.parametrize(
    ("unit", "duration", "steps", "progress"),
    [("step", 4, 3, 3), ("token", 4 * LENGTH, 2, 2 * 2 * 4), ("step", 4, 4, None)],
)
def test_a_training_that_ends_before_the_schedule_warns_once(tmp_path, unit, duration, steps, progress):
    training = trainer(tmp_path, model(), [SequenceLengthWarmup(schedule(duration, unit))], max_steps=steps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training.train()
    texts = [str(each.message) for each in caught if "the training ended at" in str(each.message)]
    assert len(texts) == (progress is not None)
    assert all(f"grows for {duration} {unit}s, and the training took {progress}" in text for text in texts)


def test_a_schedule_that_falls_again_has_reached_its_length(tmp_path):
    falling = SequenceLengthScheduler(4, LENGTH, duration=8, step_size=4, pacing=lambda share: float(share < 0.5))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the training ended at")
        trainer(tmp_path, model(), [SequenceLengthWarmup(falling)], max_steps=6).train()
    assert falling.seq_length < LENGTH


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


def test_evaluation_keeps_the_full_length(tmp_path):
    warmed, lengths = model(), {True: [], False: []}
    warmed.transformer.wte.register_forward_pre_hook(
        lambda embedding, inputs: lengths[embedding.training].append(inputs[0].shape[1])
    )
    arguments = {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True}
    training = trainer(tmp_path, warmed, [SequenceLengthWarmup(schedule())], **arguments)
    training.train()
    training.evaluate()
    assert lengths == {True: [4, 4, 8, 12, 16, 16, 16, 16], False: [LENGTH] * 6}


@pytest.mark.parametrize("restored_by_trainer", first_fast([False, True]))
@pytest.mark.parametrize("unit", first_fast(["token", "step"]))
def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path, unit, restored_by_trainer):
    arguments = {"optim": "adamw_torch", "learning_rate": 1e-2, "train_sampling_strategy": "random"}
    arguments |= {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2, "num_train_epochs": 2}

    def of_unit():
        return schedule(duration={"step": 5, "token": 60}[unit], unit=unit)

    first = SequenceLengthWarmup(of_unit())
    uninterrupted = trainer(tmp_path, model(dropout=0.1), [first], padded_dataset(), **arguments)
    uninterrupted.train()
    flag = {"restore_callback_states_from_checkpoint": restored_by_trainer}
    fresh = of_unit()
    callback = SequenceLengthWarmup(fresh)
    resumed = trainer(tmp_path / "again", model(dropout=0.1), [callback], padded_dataset(), **arguments, **flag)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert 4 < logged(uninterrupted, "seq_length")[2] < LENGTH
    for name in ("loss", "seq_length", "train_tokens"):
        assert logged(resumed, name) == logged(uninterrupted, name)
    assert_same_weights(resumed.model, uninterrupted.model, rtol=0, atol=0)
    assert fresh.progress == {"step": 8, "token": callback.progress["train_tokens"]}[unit]


@pytest.mark.parametrize("unit", ["token", "sample"])
def test_units_count_the_tokens_and_samples_trained_on(tmp_path, unit):
    counted, by_count = schedule(duration=60 if unit == "token" else 12, unit=unit), []
    training = trainer(tmp_path, model(), [SequenceLengthWarmup(counted)], padded_dataset())
    training.train()
    length = schedule(duration=60 if unit == "token" else 12)
    tokens = 0
    for batch in collated(padded_dataset()):
        by_count.append(length.seq_length)
        kept = int(batch["attention_mask"][:, : length.seq_length].sum())
        tokens += kept
        length.step(kept if unit == "token" else 2)
    assert logged(training, "seq_length") == by_count
    assert logged(training, "train_tokens")[-1] == tokens
    assert counted.progress == length.progress == (tokens if unit == "token" else 16)


def test_a_training_that_does_not_resume_starts_over(tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3 and self.armed:
                raise KeyboardInterrupt

    stop, shared = Stop(), schedule()
    stop.armed = True
    training = trainer(tmp_path, model(), [SequenceLengthWarmup(shared), stop])
    with pytest.raises(KeyboardInterrupt):
        training.train()
    stop.armed = False
    for _ in range(2):
        training.train()
        assert logged(training, "seq_length") == [4, 4, 8, 12, 16, 16, 16, 16]
        assert logged(training, "train_tokens")[-1] == 2 * (4 + 4 + 8 + 12 + 4 * 16)
        assert shared.progress == 8


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
    class OutOfMemory(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.train_batch_size == 4 and state.global_step == 2:
                raise RuntimeError("CUDA out of memory.")

    arguments = {"per_device_train_batch_size": 4, "auto_find_batch_size": True}
    training = trainer(tmp_path, model(), [SequenceLengthWarmup(schedule()), OutOfMemory()], **arguments)
    training.train()
    assert training.state.train_batch_size < 4
    assert logged(training, "seq_length")[:5] == [4, 4, 8, 12, 16]


@pytest.mark.slow
def test_a_compiled_model_is_warmed_up(tmp_path):
    compiled, expected = model(), model()
    flags = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 5}
    training = trainer(tmp_path, compiled, [SequenceLengthWarmup(schedule())], **flags)
    training.train()
    assert logged(training, "seq_length") == [4, 4, 8, 12, 16]
    losses = by_hand(expected, schedule(), dataset(10), divisor(training))
    torch.testing.assert_close(logged(training), losses, rtol=1e-5, atol=1e-5)


def in_parts(folder, batch_size, **arguments):
    """Trains on rows of one length, to compare losses, and on padded rows, which differ in tokens between ranks."""
    for data in (dataset(), padded_dataset()):
        counted = schedule(duration=50, unit="token")
        callbacks = [SequenceLengthWarmup(counted)]
        training = trainer(folder, model(), callbacks, data, per_device_train_batch_size=batch_size, **arguments)
        training.train()
        yield {name: logged(training, name) for name in ("loss", "seq_length", "train_tokens")}, counted.progress


def one_of_two(rank, port, folder):
    set_environment(rank, port)
    (folder / f"{rank}.json").write_text(json.dumps([*in_parts(folder, 2, ddp_backend="gloo")]))
    leave_group()


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


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    run_ranks(one_of_two, tmp_path)
    (losses, _), alone = in_parts(tmp_path, 4)
    for rank in (0, 1):
        (own_losses, _), own = json.loads((tmp_path / f"{rank}.json").read_text())
        torch.testing.assert_close(own_losses, losses, rtol=1e-5, atol=1e-5)
        del own[0]["loss"]
        assert own == [{name: alone[0][name] for name in own[0]}, alone[1]]
        assert len(set(own[0]["seq_length"])) > 2


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
    assert source.progress["scheduler"]["progress"] == 0


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


@pytest.mark.parametrize("again", ["train() twice", "out of memory"])
def test_the_learning_rate_starts_over_with_each_training(tmp_path, again):
    """The first step had the rate of the last one before, 0.7 of the peak, and not that of 0 tokens."""
    warmed, warmup, rates = model(), SequenceLengthWarmup(schedule(duration=100)), []
    optimizer = torch.optim.SGD(warmed.parameters(), lr=1.0)
    rate = TokenLR(optimizer, warmup_tokens=100, decay_tokens=1000, source=warmup.count_tokens)
    optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))

    class OutOfMemory(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if again == "out of memory" and state.train_batch_size == 4 and state.global_step == 3:
                raise RuntimeError("CUDA out of memory.")

    size = {"per_device_train_batch_size": 4, "auto_find_batch_size": again == "out of memory"}
    training = trainer(tmp_path, warmed, [OutOfMemory()], max_steps=4, **size)
    training.optimizer, training.lr_scheduler = optimizer, rate
    warmup.add_to(training)
    training.train()
    if again == "train() twice":
        training.train()
        assert rates == pytest.approx([0, 0.16, 0.32, 0.48] * 2)
    else:
        size = training.state.train_batch_size
        assert rates == pytest.approx([0, 0.16, 0.32] + [size * 0.04 * step for step in range(4)])
