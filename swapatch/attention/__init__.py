"""The attention of a sliding layer: it asks a rule who sees whom, and does not know where the keys are stored."""

from .operator import KERNELS, is_traced, window_attention

__all__ = ["KERNELS", "is_traced", "window_attention"]
