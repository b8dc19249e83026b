"""apply_alibi converts a model's self-attention to ALiBi; load_alibi_model loads a converted checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..utils.modules import ExampleBatch, is_compiled, unwrapped
from .alibi_layer import AlibiHeads, check_slopes
from .checkpoints import read_config, read_slopes, restore_slopes
from .configs import part_with_config, prepare_configs
from .families import converter_by_structure
from .probe import probe
from .report import SurgeryReport
from .surgery import Surgery, converter_for
from .untrained_slopes import check_second_step


def apply_alibi(
    model: nn.Module,
    max_seq_length: int,
    *,
    optimizers: Optimizer | Iterable[Optimizer] | None = None,
    learn_slopes: bool = False,
    slopes: Iterable[float] | Iterable[Iterable[float]] | Tensor | None = None,
    example_batch: ExampleBatch | None = None,
) -> SurgeryReport:
    """Replace the position embeddings of `model` by ALiBi in its self-attention, in place.

    Learned position embeddings are removed from the model and the optimizers. Rotary embeddings are switched off.
    Models pretrained with ALiBi keep their slopes by default. Cross-attention is not changed. Forward passes then
    verify that ALiBi acts, that no other positions are left (if the model takes `position_ids`, also near
    `max_seq_length`), and that the model uses its cache, if it keeps one. After any error the model, its config and the
    optimizers are as before.

    A model that was pretrained without ALiBi must be trained on, because the positions it has learned are gone.

    `nn.MultiheadAttention` keeps its mask convention: True in its `key_padding_mask` marks padding. In the
    `key_padding_mask` of `alibi_attention` True marks a key to attend.

    Call this function before the model is wrapped (DistributedDataParallel, fully_shard) or compiled. A model that
    `from_pretrained` sharded by a plan of tensor parallelism gets the slopes of this rank's heads. For torch's
    `parallelize_module`, which comes after this function, see `parallel.ShardSlopes`.

    A second call with the same `learn_slopes` changes `max_seq_length`. It keeps the slopes, unless it is given others.

    Args:
        model: A Hugging Face model of a supported family, a model of nn.MultiheadAttention or
            nn.TransformerEncoderLayer, or a model whose classes are registered by `register_alibi`.
        max_seq_length: Longest sequence that the model must take. It may be larger or smaller than before. It is no
            limit at run time: most decoders also run on longer sequences.
        optimizers: Optimizers of the model's parameters. Removed parameters are removed from their groups and states.
            An optimizer that was made earlier must be passed: otherwise it keeps the removed parameters, and does not
            train learned slopes, of which its second step warns.
            Learned slopes are added to the first optimizer, in a group of their own without weight decay; its other
            options are those of the optimizer's first group.
        learn_slopes: Make the slopes parameters, one for each head and layer. They begin at `slopes`.
        slopes: (H,) for all layers, or (L, H) for the layers in the order of `model.named_modules()`, which is that of
            `report.replaced`: numbers, lists, an array or a tensor, finite in float32 and not negative. A slope is what
            the score loses for each token of distance, after the score is scaled. Default: the slopes of the model's
            own pretraining with ALiBi, or `alibi_slopes(H)`.
        example_batch: Input of the model for the verification. By default it is made from the config, or from the
            first layer if that layer is an embedding.

    Returns:
        Report of the replaced and removed modules and of the verification. `print` shows it.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Nothing can be replaced, `slopes` do not fit the layers and heads, a case is not supported (the
            message names a way out), the model is already converted with another `learn_slopes`, or the verification
            fails.

    Source of the method: Press et al., arXiv 2108.12409.
    """
    surgery = Surgery(model, max_seq_length, learn_slopes)
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers or ())
    _check(model, optimizers, learn_slopes)
    rows = None if slopes is None else check_slopes(slopes)
    parameters_before = dict(model.named_parameters())
    try:
        _convert(surgery)
        if rows is not None:
            surgery.set_slopes(rows)
        prepare_configs(surgery)
        dropped = surgery.update_optimizers(optimizers, parameters_before)
        on_meta = any(parameter.is_meta for parameter in model.parameters())
        verification = None if on_meta else probe(model, surgery.max_seq_length, example_batch)
    except BaseException:
        surgery.edits.undo()
        raise
    if learn_slopes:
        check_second_step(model)
    replaced, removed = tuple(surgery.replaced), tuple(surgery.removed)
    return SurgeryReport(surgery.max_seq_length, learn_slopes, replaced, removed, dropped, verification)


def load_alibi_model(
    model_class: Any,
    name_or_path: str | os.PathLike[str],
    *,
    learn_slopes: bool | None = None,
    example_batch: ExampleBatch | None = None,
    **kwargs: Any,
) -> Any:
    """Load a checkpoint that `save_pretrained` wrote after `apply_alibi`, with its slopes.

    A plain `from_pretrained` refuses such a checkpoint, because its model would have no ALiBi.

    Calls `from_pretrained`, then `apply_alibi` with the saved arguments, on the part of the model that had been
    converted. transformers warns of missing position embeddings and of unknown slopes. Both warnings are expected.

    Args:
        model_class: A Hugging Face model class, or an Auto class.
        name_or_path: Folder or name of the checkpoint.
        learn_slopes: Make the slopes parameters, or not. Default: as saved.
        example_batch: See `apply_alibi`.
        kwargs: Keyword arguments of `from_pretrained`. Not `config`.

    Returns:
        What `from_pretrained` returns.

    Raises:
        ValueError: The config has no arguments of `apply_alibi`. The checkpoint does not have the slopes of a layer, or
            they do not fit.
    """
    config, records, options = read_config(name_or_path, kwargs)
    loaded = model_class.from_pretrained(name_or_path, config=config, **options)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # with `output_loading_info`
    saved = read_slopes(name_or_path, kwargs)
    for path, record in records.items():
        name, part = part_with_config(model, path)
        learned = record["learn_slopes"] if learn_slopes is None else learn_slopes
        apply_alibi(part, record["max_seq_length"], learn_slopes=learned, example_batch=example_batch)
        restore_slopes(part, saved, name)
    return loaded


def _check(model: nn.Module, optimizers: list[Optimizer], learn_slopes: bool) -> None:
    if learn_slopes and optimizers and any("initial_lr" in group for group in optimizers[0].param_groups):
        raise ValueError(
            "optimizers must have no learning rate scheduler yet with learn_slopes=True, which adds a parameter group"
        )
    if torch.get_default_device().type == "meta":  # as in `from_pretrained`, which empties what it does not load
        raise ValueError("apply_alibi must be called outside of torch.device('meta')")
    if unwrapped(model) is not model or is_compiled(model):
        raise ValueError("model is wrapped or compiled: call apply_alibi first, on the model itself")
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError("model is dispatched or offloaded by Accelerate: call apply_alibi first, on one device")
    if any(hasattr(module, "unshard") for module in model.modules()):
        raise ValueError("model is sharded: call apply_alibi before fully_shard")
    heads = next((module for module in model.modules() if isinstance(module, AlibiHeads)), None)
    if heads is not None and heads.context is not None:
        raise ValueError("model has ContextParallel: call apply_alibi before parallelize_module")
    if heads is not None and heads.learned != learn_slopes:
        raise ValueError(
            f"learn_slopes must be {heads.learned}, with which the model was converted, got {learn_slopes}"
        )


def _convert(surgery: Surgery) -> None:
    modules = dict(surgery.model.named_modules())
    for path, module in modules.items():
        converter = converter_for(module) or converter_by_structure(module)
        if converter is not None:
            surgery.path = path
            converter(module, surgery)
    surgery.finish()
    if not surgery.replaced:
        raise ValueError(
            f"model must hold attention that apply_alibi knows, got {type(surgery.model).__name__}; see register_alibi"
        )
    for module in modules.values():  # alibi=None: not converted on purpose, in a converted model
        if "ttention" in type(module).__name__ and not hasattr(module, "alibi"):
            surgery.set(module, "alibi", None)
