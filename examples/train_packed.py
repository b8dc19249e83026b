"""Packed batches without padding, with ALiBi: `python examples/train_packed.py --steps 60`.

The paragraphs of Python's own documentation become rows without padding, each of almost 1,024 tokens. A model of one
layer learns them as bytes. Paragraphs do not attend to each other.
"""

import argparse
import itertools
import pydoc_data.topics
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seqwarm_kernels as sw
from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler, PackedCollator, PieceDataset

BUDGET, WIDTH, HEADS = 1024, 64, 4


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, input_ids: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        hidden = self.embedding(input_ids[0])  # (T, WIDTH): one row holds all sequences
        query, key, value = self.query_key_value(hidden).unflatten(-1, (3, HEADS, -1)).unbind(1)  # each (T, H, D)
        slopes = sw.alibi_slopes(HEADS, device=hidden.device)
        attended = sw.alibi_attention_varlen(query, key, value, cu_seqlens, cu_seqlens, longest, longest, slopes)
        return self.head(hidden + attended.flatten(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    paragraphs = Path(pydoc_data.topics.__file__).read_bytes().split(b"\n")
    items = [torch.tensor(list(paragraph)) for paragraph in paragraphs if len(paragraph) > 1]
    lengths = [len(item) for item in items]

    # 1. Plan batches of whole paragraphs that fill the budget. Longer paragraphs are cut.
    sampler = LengthBatchSampler(lengths, BatchPlanner(BUDGET, packed=True, too_long="truncate"))
    dataset, collate = PieceDataset(items), PackedCollator(max_tokens=BUDGET)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, indices in enumerate(itertools.islice(sampler, steps)):
        batch = collate([dataset[index] for index in indices])
        # 2. Attend inside of each sequence only.
        logits = model(batch["input_ids"], batch["cu_seq_lens_q"], batch["max_length_q"])
        # 3. The label of a token is the next one. PackedCollator ignores the first label of each sequence.
        loss = F.cross_entropy(logits[:-1], batch["labels"][0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, steps // 6) == 0:
            tokens = batch["input_ids"].numel()
            print(f"step {step:>4}  {len(indices):>3} paragraphs  {tokens:>4} tokens  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
