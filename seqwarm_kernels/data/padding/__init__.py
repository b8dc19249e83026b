"""Compare how much padding different ways of batching cost on a text corpus."""

from .comparison import BatchingResult, BatchingSettings, PaddingReport, compare, table
from .corpus import TOKENIZERS, UNITS, TextCorpus, count_tokens
from .data_set import DataSet
from .figure import draw

__all__ = [
    "TOKENIZERS",
    "UNITS",
    "BatchingResult",
    "BatchingSettings",
    "DataSet",
    "PaddingReport",
    "TextCorpus",
    "compare",
    "count_tokens",
    "draw",
    "table",
]
