"""Context parallelism of `parallel.ContextParallel` where Accelerate's `ParallelismConfig` asks for its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate import Accelerator, ParallelismConfig
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Trainer

from ...utils.modules import shifts_labels
from ..schedule_state import context_mesh_of
from .derived import give_methods


class _OwnContextParallelism(ParallelismConfig if TYPE_CHECKING else object):  # type: ignore[misc]
    """A configuration whose `cp_size` ranks share rows, but not by Accelerate's context parallelism.

    Accelerate has built its mesh, of which loaders and FSDP2 learn who shares rows and parameters. `cp_enabled` is what
    it and the Trainer ask before they patch `scaled_dot_product_attention`, and refuse every other attention.
    """

    @property
    def cp_enabled(self) -> bool:
        return False

    def __reduce__(self) -> tuple[Any, ...]:  # in training_args.bin, without this package and the processes
        fields = {name: value for name, value in vars(self).items() if name != "device_mesh"}
        kind = type(self).__mro__[2]  # the one that was given
        return kind.__new__, (kind,), fields


def take_over(trainer: Trainer) -> DeviceMesh | None:
    """Keep Accelerate's context parallelism from a Trainer that has it. Its batches will be parts of rows.

    Returns:
        The mesh of the ranks that share rows, or None if the Trainer's configuration has none.
    """
    config = trainer.accelerator.parallelism_config
    if config is None or config.cp_size == 1:
        return None
    if config.tp_size > 1:
        raise ValueError(
            f"parallelism_config must have cp_size or tp_size of 1, got cp_size={config.cp_size} and "
            f"tp_size={config.tp_size}"
        )
    dataloading = trainer.accelerator.dataloader_config
    if dataloading.dispatch_batches:  # the first process would deal the rows of a batch to ranks that share them
        raise ValueError("accelerator_config must have dispatch_batches=False or None with cp_size, got True")
    dataloading.dispatch_batches = False  # None would be True for an iterable dataset
    give_methods(config, _OwnContextParallelism)
    mesh: DeviceMesh = config.get_device_mesh()["cp"]
    return mesh


def ranks_of_rows(trainer: Trainer) -> int:
    """The number of ranks that share rows by a configuration that was taken over, or 1."""
    config: Any = trainer.accelerator.parallelism_config
    return config.cp_size if isinstance(config, _OwnContextParallelism) else 1


class _GathersRowsOnce(Accelerator if TYPE_CHECKING else object):  # type: ignore[misc]
    """In evaluation, neighboring ranks that share tokens or heads have the same whole rows. Keeps those of the first.

    The Trainer gathers predictions, labels and losses of all ranks by `gather_for_metrics`.
    """

    _is_for_metrics = False

    def gather_for_metrics(self, *args: Any, **kwargs: Any) -> Any:
        """Drops what the loader repeats to fill up the last batch, too."""
        self._is_for_metrics = True
        try:
            return super().gather_for_metrics(*args, **kwargs)
        finally:
            self._is_for_metrics = False

    def gather(self, tensor: Any) -> Any:
        gathered = super().gather(tensor)
        return recursively_apply(self._of_first_ranks, gathered) if self._is_for_metrics else gathered

    def _of_first_ranks(self, rows: Tensor) -> Tensor:
        size = self.parallelism_config.non_data_parallel_size
        return rows.unflatten(0, (self.num_processes // size, size, -1))[:, 0].flatten(0, 1)


def gather_each_row_once(trainer: Trainer) -> None:
    """Lets the Trainer's metrics get each row once, where ranks share tokens or heads."""
    accelerator: Any = trainer.accelerator
    config = accelerator.parallelism_config
    if config is not None and config.non_data_parallel_size > 1:
        give_methods(accelerator, _GathersRowsOnce)
        trainer.gather_function = accelerator.gather_for_metrics  # as the Trainer sets it after each evaluation


def share_tokens(model: nn.Module, mesh: DeviceMesh) -> None:
    """Apply `ContextParallel` to a model that has none."""
    from torch.distributed.tensor.parallel import parallelize_module

    from ...parallel.context_parallel import ContextParallel

    own = context_mesh_of(model)
    if own is None:
        parallelize_module(model, mesh, ContextParallel())
    elif own.mesh.tolist() != mesh.mesh.tolist():
        raise ValueError(
            f"ContextParallel must be on the ranks that share rows by parallelism_config, {mesh.mesh.tolist()}, got "
            f"{own.mesh.tolist()}"
        )


def check_loss_of_parts(trainer: Trainer) -> None:
    """Check that the loss of a rank's part is the model's own: the Trainer would shift the part's labels."""
    model: Any = trainer.model
    smoothing, function = trainer.args.label_smoothing_factor, trainer.compute_loss_func
    if (smoothing or function is not None) and shifts_labels(model):
        raise ValueError(
            "label_smoothing_factor must be 0 and compute_loss_func None for a causal language model with "
            f"ContextParallel, got {smoothing} and {function}"
        )
