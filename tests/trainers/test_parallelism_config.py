"""The Trainer's parallelism_config trains a converted model on ranks that share rows or heads as on one."""

import json
import pickle
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.fsdp import FSDPModule

from seqwarm_kernels import SequenceLengthScheduler, apply_alibi, load_alibi_model
from seqwarm_kernels.parallel import ContextParallel
from seqwarm_kernels.trainers.huggingface import SequenceLengthWarmup
from seqwarm_kernels.trainers.huggingface.parallelism import check_loss_of_parts, take_over

from ..models.zoo import make
from ..support.huggingface import logged
from ..support.ranks import leave_group, run_ranks, set_environment
from .test_huggingface import LENGTH, WORDS, model, trainer

EVEN = {"evaluated": 4}  #: rows of evaluation. Of 5, two groups would repeat one for the loss, as in DDP.
ROWS, ROWS_OF_STEP = 12, 6  #: ranks that cannot share 3 rows share their tokens


def rows():
    """Rows with different numbers of tokens, most of them on rank 0."""
    torch.manual_seed(2)
    mask = (torch.arange(LENGTH) < (torch.arange(ROWS)[:, None] * 5) % LENGTH + 3).long()
    ids = torch.randint(WORDS, (ROWS, LENGTH))
    labels = ids.masked_fill(mask == 0, -100)
    return [{"input_ids": i, "attention_mask": m, "labels": k} for i, m, k in zip(ids, mask, labels, strict=True)]


def schedule(unit):
    return SequenceLengthScheduler(4, LENGTH, duration={"token": 60, "sample": 9}[unit], step_size=4, unit=unit)


def converted(made=None):
    made = (made or model()).double()
    apply_alibi(made, LENGTH)
    return made


def digest(prediction):
    """Which rows a metric gets, and in which order."""
    logits, labels = prediction.predictions, prediction.label_ids
    weights = np.arange(1, labels.size + 1).reshape(labels.shape)
    sums = {"labels": float((weights * labels).sum()), "logits": float((weights[..., None] * np.abs(logits)).sum())}
    return {"rows": len(labels), **sums}


def report(
    folder, groups=1, config=None, unit="token", build=converted, prepare=None, resume=None, evaluated=5, **changes
):
    """Losses of training and evaluation, metrics, and counts."""
    arguments = {"eval_strategy": "epoch", "parallelism_config": config, "ddp_backend": "gloo" if config else None}
    arguments |= {"per_device_train_batch_size": ROWS_OF_STEP // groups, "per_device_eval_batch_size": 2 // groups}
    given = {"eval_dataset": rows()[:evaluated], "compute_metrics": digest}
    warmup = SequenceLengthWarmup(schedule(unit))
    training = trainer(folder, build(), [warmup], rows(), given=given, **arguments | changes)
    if prepare is not None:
        prepare(training)
    training.train(resume_from_checkpoint=resume)
    names = [f"eval_{name}" for name in ("loss", "rows", "labels", "logits")]
    found = [record[name] for record in training.state.log_history for name in names if name in record]
    predicted = digest(training.predict(rows()[:3])).values()
    counts = [logged(training, "seq_length"), logged(training, "train_tokens"), warmup.state_dict()]
    counts += [training.get_total_train_batch_size(training.args), training.state.num_input_tokens_seen]
    return [[*logged(training), *found, *predicted], counts]


def allow_cpus(rank, port, world_size):
    """Accelerate refuses each configuration on CPUs, where it has no FSDP2. All else works there."""
    set_environment(rank, port, world_size)
    ParallelismConfig._validate_accelerator = lambda self, accelerator: None


def apply_by_hand(training):
    mesh = training.args.parallelism_config.get_device_mesh()["cp"]
    parallelize_module(training.model, mesh, ContextParallel(halo=LENGTH))


def apply_elsewhere(training):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("context", "data"))["context"]
    parallelize_module(training.model, mesh, ContextParallel())


def shard_parameters(training):
    """FSDP2 by Accelerate, which has it on GPUs only: tells it that this is one."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["GPT2Block"]
    )
    training.accelerator.state.fsdp_plugin = plugin
    training.accelerator.state.distributed_type = DistributedType.FSDP
    training.is_fsdp_enabled = True
    training.add_callback(OfShardedParameters)


class OfShardedParameters(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, model, **kwargs):
        assert isinstance(model, FSDPModule)


class Stream(torch.utils.data.IterableDataset):
    """Rows whose length two ranks do not divide."""

    def __iter__(self):
        return iter({name: values[:13] for name, values in row.items()} for row in rows())


def stream(training):
    training.train_dataset = Stream()


#: Each is trained on two ranks and on one.
SETTINGS = {
    "evaluated before": {"prepare": transformers.Trainer.evaluate, "save_strategy": "steps", "save_steps": 2},
    "steps of 3 batches and 1": {"gradient_accumulation_steps": 3, "activation_checkpointing": True, "unit": "sample"},
    "applied by hand": {"per_device_train_batch_size": ROWS_OF_STEP, "include_num_input_tokens_seen": "all"},
    "stream": {"prepare": stream, "max_steps": 5, "unit": "sample"},
}
SOME_ROWS = {"per_device_train_batch_size": 3}


def two(rank, port, folder):
    allow_cpus(rank, port, 2)
    config = ParallelismConfig(cp_size=2)
    by_hand = {"applied by hand": {"prepare": apply_by_hand}}
    reports = [
        report(folder / name, config=config, **SOME_ROWS | settings | by_hand.get(name, {}))
        for name, settings in SETTINGS.items()
    ]
    checkpoint = folder / "evaluated before" / "checkpoint-2"
    reports.append(report(folder, config=config, resume=str(checkpoint), **SOME_ROWS))
    with pytest.raises(ValueError, match="ALiBi"):
        report(folder, config=config, build=model)
    with pytest.raises(ValueError, match="average_tokens_across_devices"):
        report(folder, config=config, average_tokens_across_devices=False)
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        report(folder, config=config, label_smoothing_factor=0.1)
    assert type(pickle.loads(pickle.dumps(config))) is ParallelismConfig
    (folder / f"{rank}.json").write_text(json.dumps(reports))
    leave_group()


def four(rank, port, folder):
    allow_cpus(rank, port, 4)
    config = ParallelismConfig(dp_shard_size=2, cp_size=2)
    reports = [report(folder, 2, config, **EVEN), report(folder, 2, config, prepare=shard_parameters, **EVEN)]
    with pytest.raises(ValueError, match="parallelism_config"):
        report(folder, 2, config, prepare=apply_elsewhere)
    (folder / f"{rank}.json").write_text(json.dumps(reports))
    leave_group()


def two_of_heads(rank, port, folder):
    """The Trainer makes the configuration itself if none is given."""
    from transformers.distributed import DistributedConfig

    allow_cpus(rank, port, 2)
    reports = []
    for config in (ParallelismConfig(tp_size=2), None):
        heads = DistributedConfig(tp_size=2)
        llama = transformers.LlamaForCausalLM
        build = partial(load_alibi_model, llama, folder / "llama", distributed_config=heads)
        reports.append(report(folder, config=config, build=build, ddp_backend="gloo"))
    (folder / f"{rank}.json").write_text(json.dumps(reports))
    leave_group()


def assert_trained_as_one(folder, world_size, alone):
    reports = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    for of_ranks, (losses, counts) in zip(zip(*reports, strict=True), alone, strict=True):
        assert all(own == json.loads(json.dumps(counts)) for _, own in of_ranks)
        for own, _ in of_ranks:  # the Trainer logs the mean of the ranks
            torch.testing.assert_close(torch.tensor(own), torch.tensor(losses), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("sizes", "dispatches", "name"),
    [({"cp_size": 2, "tp_size": 2}, None, "cp_size"), ({"cp_size": 2}, True, "dispatch_batches")],
)
def test_configurations_that_are_not_supported(sizes, dispatches, name):
    loading = SimpleNamespace(dispatch_batches=dispatches)
    accelerator = SimpleNamespace(parallelism_config=ParallelismConfig(**sizes), dataloader_config=loading)
    with pytest.raises(ValueError, match=name):
        take_over(SimpleNamespace(accelerator=accelerator))


@pytest.mark.parametrize(("smoothing", "function"), [(0.1, None), (0.0, max)])
def test_the_loss_of_parts_is_the_models_own(smoothing, function):
    arguments = SimpleNamespace(label_smoothing_factor=smoothing)
    with pytest.raises(ValueError, match="label_smoothing_factor"):
        check_loss_of_parts(SimpleNamespace(model=model(), args=arguments, compute_loss_func=function))


@pytest.mark.slow
def test_two_ranks_that_share_rows_train_as_one(tmp_path):
    run_ranks(two, tmp_path)
    alone = [report(tmp_path, **SOME_ROWS | settings) for settings in SETTINGS.values()]
    assert_trained_as_one(tmp_path, 2, [*alone, alone[0]])
    assert len(set(alone[0][1][0])) > 1


@pytest.mark.slow
def test_two_groups_of_two_ranks_train_as_one(tmp_path):
    run_ranks(four, tmp_path, world_size=4)
    assert_trained_as_one(tmp_path, 4, [report(tmp_path, **EVEN)] * 2)


@pytest.mark.slow
def test_two_ranks_that_share_heads_train_as_one(tmp_path):
    converted(make("llama", vocab_size=WORDS)).save_pretrained(tmp_path / "llama")
    run_ranks(two_of_heads, tmp_path)
    alone = report(tmp_path, build=partial(load_alibi_model, transformers.LlamaForCausalLM, tmp_path / "llama"))
    assert_trained_as_one(tmp_path, 2, [alone] * 2)
