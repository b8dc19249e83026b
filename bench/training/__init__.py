"""The claims of the literature about sequence-length warmup, measured with examples/train_gpt2.py."""
