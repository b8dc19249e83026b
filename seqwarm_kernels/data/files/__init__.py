"""Chunk files on disk: writer, reader, manifest and compression."""
