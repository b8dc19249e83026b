"""What all figures need."""

from __future__ import annotations


def check_matplotlib() -> None:
    """
    Raises:
        ImportError: matplotlib is missing; says how to install it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "seqwarm_kernels[demo]"') from error
