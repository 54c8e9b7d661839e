"""OSAQ behind `from_pretrained`."""

from __future__ import annotations

from ..base import LowBitQuantizer
from .config import OSAQConfig
from .method import OSAQMethod


class OSAQQuantizer(LowBitQuantizer):
    """Absorb, round and pack every decoder linear; see [`OSAQConfig`]."""

    quantization_config: OSAQConfig

    def build_method(self) -> OSAQMethod:
        return OSAQMethod(self.quantization_config, packs=True)
