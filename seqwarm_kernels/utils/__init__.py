"""Helpers that several folders use: checks of arguments, atomic writes, calls of the user's model."""
