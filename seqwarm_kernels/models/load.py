"""A model with ALiBi from its checkpoint, in one call."""

from __future__ import annotations

from typing import Any

from ..utils.modules import ExampleBatch
from .apply import apply_alibi
from .configs import RECORD, record_of


def load_alibi_model(
    model_class: Any, name_or_path: str, *, example_batch: ExampleBatch | None = None, **kwargs: Any
) -> Any:
    """`model_class.from_pretrained`, then `apply_alibi` as the checkpoint's config says.

    The warnings of transformers about position embeddings that are missing and slopes that it does not know are to be
    expected: the surgery takes away the first and restores the second.

    Args:
        model_class: a Hugging Face model class, or an Auto class.
        name_or_path: of a checkpoint that `save_pretrained` wrote after `apply_alibi`.
        example_batch: as for `apply_alibi`.
        kwargs: for `from_pretrained`.

    Raises:
        ValueError: the config tells of no surgery.
    """
    model = model_class.from_pretrained(name_or_path, **kwargs)
    record = record_of(model)
    if record is None:
        raise ValueError(
            f"name_or_path must be a checkpoint of a model with ALiBi, got {name_or_path!r}, whose config has no "
            f"{RECORD}: use from_pretrained and apply_alibi(model, max_seq_length)"
        )
    learn_slopes = record["learn_slopes"]
    apply_alibi(model, record["max_seq_length"], learn_slopes=learn_slopes, example_batch=example_batch)
    return model
