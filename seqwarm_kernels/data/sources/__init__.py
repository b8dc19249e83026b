"""Resumable sources of items: sequences, streams and chunk files."""
