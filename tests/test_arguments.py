"""Each argument of each top-level name replaced by values that make no sense: taken, or refused by its name."""

import importlib
import inspect
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import seqwarm_kernels as sw
from seqwarm_kernels import data, trainers

from .support.arguments import complaints


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, input_ids, labels=None):
        return {"loss": self.embedding(input_ids).square().mean()}


class Pretrained(nn.Module):
    @classmethod
    def from_pretrained(cls, path, **kwargs):
        raise OSError(f"there is no folder {path}")


def batch():
    return {"input_ids": torch.ones(2, 8, dtype=torch.int64), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}


def scheduler():
    return sw.SequenceLengthScheduler(2, 8, duration=10, step_size=2)


def attention(**options):
    tensors = dict(zip(("query", "key", "value"), torch.randn(3, 1, 2, 4, 8).unbind(), strict=True))
    return {**tensors, "slopes": torch.tensor([0.5, 0.25]), "causal": True, "scale": 1.0, "window": 2, **options}


def dense():
    mask = torch.ones(1, 4, dtype=torch.bool)
    return attention(segment_length=2, query_start=None, key_padding_mask=mask, skip_tolerance=0.0, backend="reference")


def varlen():
    tensors = {
        name: tensor[0].transpose(0, 1) for name, tensor in attention().items() if name in ("query", "key", "value")
    }
    bounds = {f"cu_seqlens_{side}": torch.tensor([0, 1, 4], dtype=torch.int32) for side in "qk"}
    lengths = {"max_seqlen_q": 3, "max_seqlen_k": 3}
    return attention(**tensors, **bounds, **lengths, skip_tolerance=0.0, backend="reference")


def constant_rate():
    return torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(Model().parameters(), 0.1))


def token_rates():
    optimizer = torch.optim.SGD(Model().parameters(), 0.1)
    numbers = {"warmup_tokens": 4.0, "decay_tokens": 16.0, "final": 0.1}
    return {"optimizer": optimizer, **numbers, "decay": "cosine", "source": None}


TRAINING = {"dropout_p": 0.0, "return_lse": False}


def resizing(**more):
    return {"batch": batch(), "seq_len": 4, "mode": "truncate", "remainder": "drop", "seq_dim": 1, **more}


def model_with_optimizer(**more):
    model = Model()
    return {"model": model, "max_len": 8, "optimizer": torch.optim.SGD(model.parameters(), 0.1), **more}


def load_alibi_model(model_class, name_or_path, example_batch):
    with suppress(OSError):  # the folder does not exist
        sw.load_alibi_model(model_class, name_or_path, example_batch=example_batch, local_files_only=True)


def register_alibi(module_classes):
    return sw.register_alibi(module_classes)


def warmup_in(trainer):
    def make(scheduler, total_tokens=None, **resize_options):
        warmup = getattr(trainers, trainer).SequenceLengthWarmup
        return warmup(scheduler, total_tokens=total_tokens, **resize_options)

    return make


def monitor_in(trainer):
    def make(outputs, spike_threshold, read_every):
        return getattr(trainers, trainer).Monitor(outputs, spike_threshold=spike_threshold, read_every=read_every)

    return make


def loader_state(loader):
    return trainers.huggingface.LoaderState(loader)


def loader():
    sampler = data.LengthBatchSampler([2] * 8, data.BatchPlanner(4))
    return {"loader": data.ResumableLoader(DataLoader(data.ItemDataset(), batch_sampler=sampler))}


def resize_options():
    names = {"keys": ["input_ids"], "mask_keys": ["attention_mask"], "pad_values": {"input_ids": 0}, "out": None}
    plain = {"mode": "truncate", "remainder": "drop", "seq_dim": 1, "copy": True, "backend": "reference"}
    return {"scheduler": scheduler(), "total_tokens": 8, "keep_last_token": True, **names, **plain}


def monitor_options():
    return {"outputs": print, "spike_threshold": 1.2, "read_every": 20}


def attach(model, mode, copy):
    return scheduler().attach(model, mode=mode, copy=copy)


#: What is called, and a function that makes valid arguments.
CALLS = {
    "BatchBuffers": (
        sw.BatchBuffers,
        lambda: (
            {"example_batch": batch(), "max_seq_len": 4, "mode": "truncate", "remainder": "drop", "seq_dim": 1}
            | {"keys": ["input_ids"], "mask_keys": ["attention_mask"], "device": "cpu"}
        ),
    ),
    "SequenceLengthScheduler": (
        sw.SequenceLengthScheduler,
        lambda: (
            {"min_seq_length": 2, "max_seq_length": 8, "duration": 10.0, "step_size": 2}
            | {"pacing": "linear", "unit": "step"}
        ),
    ),
    "SequenceLengthScheduler.step": (lambda n=None: scheduler().step(n), lambda: {"n": 1}),
    "SequenceLengthScheduler.seq_length_at": (
        lambda progress: scheduler().seq_length_at(progress),
        lambda: {"progress": 1.0},
    ),
    "SequenceLengthScheduler.resize": (lambda batch: scheduler().resize(batch), lambda: {"batch": batch()}),
    "SequenceLengthScheduler.attach": (attach, lambda: {"model": Model(), "mode": "truncate", "copy": True}),
    "SequenceLengthScheduler.load_state_dict": (
        lambda state_dict: scheduler().load_state_dict(state_dict),
        lambda: {"state_dict": scheduler().state_dict()},
    ),
    "alibi_attention": (sw.alibi_attention, lambda: dense() | TRAINING | {"key_norm_bound": torch.ones(1, 2)}),
    "alibi_attention_varlen": (sw.alibi_attention_varlen, lambda: varlen() | TRAINING),
    "alibi_bias": (
        sw.alibi_bias,
        lambda: (
            {"slopes": torch.tensor([0.5]), "query_length": 2, "key_length": 3, "causal": True, "query_start": None}
        ),
    ),
    "StepByTokens": (
        sw.StepByTokens,
        lambda: {"scheduler": constant_rate(), "tokens_per_step": 8, "source": None},
    ),
    "StepByTokens.step": (lambda n: sw.StepByTokens(constant_rate(), 8).step(n), lambda: {"n": 1}),
    "StepByTokens.load_state_dict": (
        lambda state_dict: sw.StepByTokens(constant_rate(), 8).load_state_dict(state_dict),
        lambda: {"state_dict": sw.StepByTokens(constant_rate(), 8).state_dict()},
    ),
    "TokenLR": (sw.TokenLR, token_rates),
    "TokenLR.load_state_dict": (
        lambda state_dict: sw.TokenLR(**token_rates()).load_state_dict(state_dict),
        lambda: {"state_dict": sw.TokenLR(**token_rates()).state_dict()},
    ),
    "TokenLR.step": (lambda n: sw.TokenLR(**token_rates()).step(n), lambda: {"n": 1}),
    "alibi_slopes": (sw.alibi_slopes, lambda: {"num_heads": 2, "device": "cpu"}),
    "apply_alibi": (
        sw.apply_alibi,
        lambda: {
            "model": nn.MultiheadAttention(8, 2),
            "max_seq_length": 8,
            "optimizers": [],
            "learn_slopes": False,
            "slopes": [0.5, 0.25],
            "example_batch": None,
        },
    ),
    "attended_share": (sw.attended_share, dense),
    "attended_share_varlen": (sw.attended_share_varlen, varlen),
    "compilations": (sw.compilations, dict),
    "cyclic": (sw.cyclic, lambda: {"pacing": "linear", "cycles": 2}),
    "doubling": (sw.doubling, lambda: {"times": 3}),
    "exponential": (sw.exponential, lambda: {"ratio": 8.0}),
    "grow_p2": (sw.grow_p2, lambda: {"times": 2, "cycles": 2, "draws": 3, "seed": 1}),
    "discrete": (sw.discrete, lambda: {"stages": [(2, 4), (2, 8)]}),
    "load_alibi_model": (
        load_alibi_model,
        lambda: {"model_class": Pretrained, "name_or_path": "no such folder", "example_batch": None},
    ),
    "no_compilation": (sw.no_compilation, dict),
    "register_alibi": (register_alibi, lambda: {"module_classes": "package.Attention"}),
    "resize_batch": (
        sw.resize_batch,
        lambda: resizing(
            pad_values={"input_ids": 0},
            keep_last_token=False,
            keys=["input_ids", "attention_mask"],
            mask_keys=["attention_mask"],
            copy=True,
            out=None,
            return_info=False,
            backend="reference",
        ),
    ),
    "root": (sw.root, lambda: {"degree": 2.0}),
    "trainers.huggingface.LoaderState": (loader_state, loader),
    "trainers.huggingface.SequenceLengthWarmup": (warmup_in("huggingface"), resize_options),
    "trainers.huggingface.Monitor": (monitor_in("huggingface"), monitor_options),
    "trainers.lightning.SequenceLengthWarmup": (warmup_in("lightning"), resize_options),
    "trainers.lightning.Monitor": (monitor_in("lightning"), monitor_options),
    "trainers.composer.apply_alibi": (
        trainers.composer.apply_alibi,
        lambda: {"model": nn.MultiheadAttention(8, 2), "max_sequence_length": 8, "optimizers": []},
    ),
    "trainers.composer.set_batch_sequence_length": (
        trainers.composer.set_batch_sequence_length,
        lambda: {"batch": batch(), "curr_seq_len": 4, "truncate": True, "preserve_end_of_sequence": False},
    ),
    "warmup_allocator": (
        sw.warmup_allocator,
        lambda: model_with_optimizer(
            batch_size=1,
            example_batch=batch(),
            loss_fn=lambda output, batch: output["loss"],
            autocast_dtype=None,
            grad_scaler=None,
            max_grad_norm=1.0,
            accumulation_steps=1,
            scheduler=scheduler(),
            resize_options={"mode": "truncate"},
            shard_batch=None,
            find_batch_size=False,
            raise_out_of_memory=False,
        ),
    ),
}

#: Plain records that the package makes.
RECORDS = {"AllocatorReport", "Milestone", "ResizeInfo", "SurgeryReport"}

TRAINER_PACKAGES = {"trainers.huggingface": "transformers", "trainers.lightning": "lightning"}

ARGUMENTS = [
    pytest.param(name, argument, id=f"{name}-{argument}") for name, (_, make) in CALLS.items() for argument in make()
]


def test_every_public_name_is_called():
    assert {name.partition(".")[0] for name in CALLS} - {"trainers"} == set(sw.__all__) - RECORDS


@pytest.mark.parametrize("package", TRAINER_PACKAGES)
def test_every_name_of_a_trainer_is_called(package):
    names = {name.rpartition(".")[2] for name in CALLS if name.startswith(f"{package}.")}
    pytest.importorskip(TRAINER_PACKAGES[package])
    assert names == set(importlib.import_module(f"seqwarm_kernels.{package}").__all__)


def test_every_parameter_of_a_public_name_is_replaced():
    for name, (call, make) in CALLS.items():
        if getattr(sw, name, None) is call:
            parameters = inspect.signature(call).parameters.values()
            assert {p.name for p in parameters if p.kind != inspect.Parameter.VAR_KEYWORD} == make().keys(), name


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_junk(name, argument):
    package = TRAINER_PACKAGES.get(name.rpartition(".")[0])
    if package is not None:
        pytest.importorskip(package)
    call, make = CALLS[name]
    call(**make())
    found = complaints(call, make, argument)
    assert not found, "\n".join(found)
