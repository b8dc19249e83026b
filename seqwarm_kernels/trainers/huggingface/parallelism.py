"""Context parallelism of `parallel.ContextParallel` where Accelerate's `ParallelismConfig` asks for its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate import ParallelismConfig
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Trainer

from ..schedule_state import context_mesh_of
from ..shifted_labels import shifts_labels


class _OwnContextParallelism(ParallelismConfig):
    """A configuration whose `cp_size` ranks share rows, but not by Accelerate's context parallelism.

    Accelerate has built its mesh, of which loaders and FSDP2 learn who shares rows and parameters. `cp_enabled` is what
    it and the Trainer ask before they patch `scaled_dot_product_attention`, and refuse every other attention.
    """

    @property
    def cp_enabled(self) -> bool:
        return False

    def __reduce__(self) -> tuple[Any, ...]:  # in training_args.bin, without this package and the processes
        fields = {name: value for name, value in vars(self).items() if name != "device_mesh"}
        return ParallelismConfig.__new__, (ParallelismConfig,), fields


def take_over(trainer: Trainer) -> DeviceMesh | None:
    """Keep Accelerate's context parallelism from a Trainer that has it. Its batches will be parts of rows.

    Returns:
        The mesh of the ranks that share rows, or None if the Trainer's configuration has none.

    Raises:
        ValueError: The configuration is of a class of its own, or has `tp_size`, too, or the first process deals
            batches. Nothing was changed.
    """
    config = trainer.accelerator.parallelism_config
    if config is None or config.cp_size == 1:
        return None
    if type(config) not in (ParallelismConfig, _OwnContextParallelism):
        raise ValueError(
            f"parallelism_config must be an accelerate.ParallelismConfig itself, got its subclass {type(config)}"
        )
    if config.tp_size > 1:
        raise ValueError(
            "parallelism_config must have either cp_size or tp_size of 1, since ranks share either the tokens or the "
            f"heads of a model, got cp_size={config.cp_size} and tp_size={config.tp_size}"
        )
    dataloading = trainer.accelerator.dataloader_config
    if dataloading.dispatch_batches:
        raise ValueError(
            "accelerator_config must have dispatch_batches=False or None with cp_size, got True: the first process "
            "would deal the rows of a batch to ranks that share them"
        )
    dataloading.dispatch_batches = False  # None would be True for an iterable dataset
    config.__class__ = _OwnContextParallelism
    _count_each_batch_once(trainer, config.cp_size)
    mesh: DeviceMesh = config.get_device_mesh()["cp"]
    return mesh


def _count_each_batch_once(trainer: Trainer, cp_size: int) -> None:
    """The Trainer divides its count of labels by `cp_size`, for whole rows. What it counts are parts of them."""
    of_ranks: Callable[..., int] = trainer.get_total_train_batch_size
    trainer.__dict__["get_cp_size"] = lambda: 1
    trainer.__dict__["get_total_train_batch_size"] = lambda *args: of_ranks(*args) // cp_size


def gather_each_batch_once(trainer: Trainer) -> None:
    """In evaluation, neighboring ranks that share tokens or heads have the same whole rows. Keeps those of the first.

    The Trainer gathers predictions, labels and losses of all ranks.
    """
    accelerator = trainer.accelerator
    config = accelerator.parallelism_config
    size = 1 if config is None else config.non_data_parallel_size
    if size == 1:
        return
    gather, gather_for_metrics = accelerator.gather, accelerator.gather_for_metrics
    groups = accelerator.num_processes // size

    def of_first_ranks(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (groups, size, -1))[:, 0].flatten(0, 1)

    def gather_once(rows: Any) -> Any:
        accelerator.__dict__["gather"] = lambda rows: recursively_apply(of_first_ranks, gather(rows))
        try:
            return gather_for_metrics(rows)  # drops what the loader repeats to fill up the last batch
        finally:
            del accelerator.__dict__["gather"]

    accelerator.__dict__["gather_for_metrics"] = trainer.__dict__["gather_function"] = gather_once


def share_tokens(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply `ContextParallel` to a model that has none.

    Raises:
        ValueError: The model has it on another mesh, or has no ALiBi layer.
    """
    from torch.distributed.tensor.parallel import parallelize_module

    from ...parallel.context_parallel import ContextParallel

    own = context_mesh_of(model)
    if own is None:
        parallelize_module(model, mesh, ContextParallel())
    elif own.mesh.tolist() != mesh.mesh.tolist():
        raise ValueError(
            f"ContextParallel must be on the ranks that share rows by parallelism_config, {mesh.mesh.tolist()}, got "
            f"{own.mesh.tolist()}: apply it on parallelism_config.get_device_mesh()['cp'], or leave it to the warmup"
        )


def check_loss_of_parts(trainer: Trainer, model: nn.Module) -> None:
    """Check that the loss of a rank's part is the model's own.

    Raises:
        ValueError: The Trainer computes it of labels, which it shifts.
    """
    smoothing, function = trainer.args.label_smoothing_factor, trainer.compute_loss_func
    if (smoothing or function is not None) and shifts_labels(model):
        raise ValueError(
            "label_smoothing_factor must be 0 and compute_loss_func None for a causal language model with "
            f"ContextParallel, got {smoothing} and {function}: both shift labels within a rank's part, and miss the "
            "first label of the next part; compute the loss in the model's forward, of shift_labels"
        )
