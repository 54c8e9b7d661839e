"""LittleBit-2: below one bit a weight, by binary factors and distillation (https://huggingface.co/papers/2603.00042)."""

from .config import LittleBit2Config
from .layer import pack


__all__ = ["LittleBit2Config", "pack"]
