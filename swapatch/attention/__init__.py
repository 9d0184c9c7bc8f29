"""The attention of a sliding layer: it asks a rule who sees whom, and does not know where the keys are stored."""

from .operator import BLOCK, KERNELS, window_attention

__all__ = ["BLOCK", "KERNELS", "window_attention"]
