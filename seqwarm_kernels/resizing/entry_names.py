"""What the entries of a batch are by their names."""

from __future__ import annotations

from collections.abc import Collection

from ..ops.resize_batch.schema import LOSS_MASKS

_LABEL_NAMES = ("labels", "label", "label_ids", "targets", "target", "target_ids", "y")
#: Of these, the names that may have a prefix, as in "decoder_labels". "is_target" and "segment_label" are other things.
_LABEL_ENDINGS = ("_labels", "_label_ids", "_targets", "_target_ids")

#: Boundaries of packed sequences, (N + 1,) from 0 to the number of tokens, in several libraries.
BOUNDARIES = frozenset(
    {"cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"}
    | {"cu_seq_q", "cu_seq_k", "cu_doc_lens"}
)
#: The number of tokens of the longest packed sequence.
LONGEST = frozenset(
    {"max_length_q", "max_length_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_q", "max_k", "max_doc_len"}
)
POSITIONS = frozenset({"position_ids", "decoder_position_ids"})
#: The number of each token's packed sequence.
INDICES = frozenset({"seq_idx", "sequence_id", "document_id", "document_ids", "doc_ids"})
#: Names that tell where the sequences of a packed batch begin.
PACKED_NAMES = BOUNDARIES | POSITIONS | INDICES


def own_name(path: object) -> str:
    """The last part of a path: "input_ids" of "encoder.input_ids"."""
    return str(path).rpartition(".")[2]


def is_label(name: object) -> bool:
    """Whether the loss compares predictions with the entry, by its name alone."""
    own = own_name(name)
    return own in _LABEL_NAMES or own.endswith(_LABEL_ENDINGS)


def is_shifted_label(name: object) -> bool:
    """Whether a label stands at the token that predicts it, by its name: "labels" do not, "targets" do."""
    own = own_name(name)
    return is_label(own) and (own == "y" or own.startswith("shift") or "target" in own)


def is_loss_mask(name: object) -> bool:
    return own_name(name) in LOSS_MASKS


def is_mask(name: object, mask_keys: Collection[str] | None) -> bool:
    """Whether the entry is a mask or a bias, which may be over pairs of tokens."""
    return f"_{own_name(name)}".endswith(("_mask", "_bias")) if mask_keys is None else name in mask_keys
