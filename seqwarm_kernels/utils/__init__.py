"""Helpers that know nothing of this package's topics: checks of arguments, files, modules."""
