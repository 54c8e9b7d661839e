"""CAT-Q: ternary weights by learnable modulation and softened ternarization."""

from .config import CatQConfig


__all__ = ["CatQConfig"]
