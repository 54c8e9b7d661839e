"""OSAQ: outlier self-absorption before rounding (https://huggingface.co/papers/2605.04738)."""

from .absorb import absorb_outliers
from .config import OSAQConfig


__all__ = ["OSAQConfig", "absorb_outliers"]
