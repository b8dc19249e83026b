"""apply_alibi: one line turns a model's attention into ALiBi on the fused kernels."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..utils.checks import check_bool, check_int
from ..utils.modules import ExampleBatch, is_compiled, unwrapped
from .alibi_layer import AlibiHeads
from .checkpoints import restore_slopes
from .configs import prepare_configs, record_of
from .families import native_alibi as born_with_alibi  # noqa: F401  they register their surgeons
from .families import rotary
from .probe import probe
from .report import SurgeryReport
from .surgery import Surgery, registered_classes, surgeon_for


def apply_alibi(
    model: nn.Module,
    max_seq_length: int,
    *,
    optimizers: Optimizer | Iterable[Optimizer] | None = None,
    learn_slopes: bool = False,
    example_batch: ExampleBatch | None = None,
) -> SurgeryReport:
    """Give the self-attention of `model` ALiBi in place of its position embeddings, in place.

    Learned position embeddings leave the model and the optimizers, rotary ones are switched off; models born with
    ALiBi keep their slopes. Cross-attention stays as it is. A run of the model then proves that ALiBi acts and that no
    other positions are left. On any error the model, its config and the optimizers are as they were.

    Call it before the model is wrapped (DistributedDataParallel, fully_shard) or compiled.

    Args:
        model: a Hugging Face model of a supported family, a model of nn.MultiheadAttention or
            nn.TransformerEncoderLayer, or one whose classes are known by `register_alibi`.
        max_seq_length: tokens that the model must take, more or fewer than it could before.
        optimizers: those that hold the model's parameters. What leaves the model leaves their groups and states;
            learned slopes join the first one, in a group of their own with the options of its first group but no
            weight decay.
        learn_slopes: make the slopes parameters, one for each head and layer.
        example_batch: what the proof calls the model with; by default it is made from the config, or from the first
            layer if that is an embedding.

    Returns:
        What was replaced and removed, and the proof; `print` it.

    Raises:
        TypeError, ValueError: nothing could be replaced, a case is not supported (the message says the way out), the
            model had its surgery already, or the proof fails.

    Source of the method: Press et al., arXiv 2108.12409.
    """
    optimizers = _check(model, max_seq_length, optimizers, learn_slopes)
    parameters_before = dict(model.named_parameters())
    record = record_of(model)
    surgery = Surgery(model, max_seq_length, learn_slopes)
    try:
        _operate(surgery)
        prepare_configs(surgery, record)
        restore_slopes(model, record)
        dropped = _update_optimizers(surgery, optimizers, parameters_before)
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        proof = None if on_meta else probe(model, max_seq_length, example_batch)
    except BaseException:
        surgery.edits.undo()
        raise
    return SurgeryReport(max_seq_length, learn_slopes, tuple(surgery.replaced), tuple(surgery.removed), dropped, proof)


def _check(model: Any, max_seq_length: Any, optimizers: Any, learn_slopes: Any) -> list[Optimizer]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    check_int("max_seq_length", max_seq_length, minimum=2)
    check_bool("learn_slopes", learn_slopes)
    optimizers = () if optimizers is None else optimizers
    optimizers = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizers must be torch optimizers, got {type(optimizer).__name__}")
    if learn_slopes and optimizers and any("initial_lr" in group for group in optimizers[0].param_groups):
        raise ValueError(
            "optimizers must have no learning rate scheduler yet with learn_slopes=True, since they get one more "
            "group: make the scheduler after apply_alibi"
        )
    if unwrapped(model) is not model or is_compiled(model):
        raise ValueError("model is wrapped or compiled: call apply_alibi first, on the model itself")
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError("model is dispatched or offloaded by Accelerate: call apply_alibi first, on one device")
    if any(hasattr(module, "unshard") for module in model.modules()):
        raise ValueError("model is sharded: call apply_alibi before fully_shard")
    done = next((path for path, module in model.named_modules() if isinstance(module, AlibiHeads)), None)
    if done is not None:
        raise ValueError(f"model had its surgery already: there is {done}; make the model anew to change it")
    return optimizers


def _operate(surgery: Surgery) -> None:
    modules = dict(surgery.model.named_modules())
    for path, module in modules.items():
        surgeon = surgeon_for(module) or rotary.surgeon_by_structure(module)
        if surgeon is not None:
            surgery.path = path
            surgeon(module, surgery)
    surgery.finish()
    if not surgery.replaced:
        classes = sorted({type(module).__qualname__ for module in modules.values()})
        raise ValueError(
            f"model must hold attention that apply_alibi knows, got {type(surgery.model).__name__} of "
            f"{', '.join(classes)}. Known are {', '.join(registered_classes())}; register_alibi adds others"
        )
    for module in modules.values():  # layers left alone are told from those of a model that had no surgery
        if "ttention" in type(module).__name__ and not hasattr(module, "alibi"):
            surgery.set(module, "alibi", None)


def _update_optimizers(surgery: Surgery, optimizers: list[Optimizer], before: dict[str, nn.Parameter]) -> int:
    """By identity, so that a weight that is tied to another one which stays, stays."""
    after = dict(surgery.model.named_parameters())
    kept, old = {id(parameter) for parameter in after.values()}, {id(parameter) for parameter in before.values()}
    dropped = sum(surgery.edits.drop_parameters(optimizer, old - kept) for optimizer in optimizers)
    new = {name: parameter for name, parameter in after.items() if id(parameter) not in old}
    if new and optimizers:
        surgery.edits.add_parameters(optimizers[0], new)
    return dropped
