"""SAFT: supervised fine-tuning with every token weighted between NLL and DFT (ICML 2026)."""

from .functional import saft_loss, saft_weight


__all__ = ["saft_loss", "saft_weight"]
