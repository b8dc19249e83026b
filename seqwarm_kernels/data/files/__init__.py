"""Chunk files on disk: write, read, manifest, compression."""
