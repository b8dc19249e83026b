"""Experiments with examples/train_gpt2: do the claims of the literature about sequence-length warmup hold?"""
