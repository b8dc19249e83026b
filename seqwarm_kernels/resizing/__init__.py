"""Cuts a batch to the sequence length that the schedule asks for."""
