"""Attention whose heads or tokens are sharded over several devices. Built on torch.distributed."""

__all__: list[str] = []
