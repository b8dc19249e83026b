"""Sequence-length warmup and ALiBi in Hugging Face's Trainer: `python examples/train_huggingface.py --steps 60`.

A tiny GPT-2, built here without a download, learns the source of Python's argparse module as bytes.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

import seqwarm_kernels as sw
from seqwarm_kernels.trainers.huggingface import SequenceLengthWarmup

FULL_LENGTH = 128


def rows() -> list[dict[str, torch.Tensor]]:
    """Rows of the full length."""
    text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
    return [{"input_ids": row, "labels": row} for row in text.unfold(0, FULL_LENGTH, FULL_LENGTH // 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    set_seed(0)
    config = GPT2Config(vocab_size=256, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)

    # 1. ALiBi in place of the position embeddings. The report says what changed.
    print(sw.apply_alibi(model, max_seq_length=FULL_LENGTH))

    # 2. Grow from 16 tokens to the full length over the first 30 % of the steps.
    warmup = SequenceLengthWarmup(sw.SequenceLengthScheduler(16, FULL_LENGTH, duration=0.3 * steps))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=3e-3,
            logging_steps=max(1, steps // 6),
            save_strategy="no",
            report_to="none",
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows())
        warmup.add_to(trainer)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    for record in trainer.state.log_history:
        if "loss" in record:
            print(f"step {record['step']:>4}  length {record['seq_length']:>4}  loss {float(record['loss']):.3f}")


if __name__ == "__main__":
    main()
