"""Helpers without a topic of this package: checks of arguments, files, the user's model."""
