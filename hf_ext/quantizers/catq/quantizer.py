"""CAT-Q behind `from_pretrained`."""

from __future__ import annotations

from torch import nn

from ...ops.packed_weight import PackedWeight
from ..base import LowBitQuantizer
from ..low_bit_linear import LowBitLinear
from .config import CatQConfig
from .method import ZERO_POINT, CatQMethod
from .official import OfficialParameters


class CatQQuantizer(LowBitQuantizer):
    """Train and pack the ternary weights of every decoder linear; see [`CatQConfig`]."""

    quantization_config: CatQConfig

    def build_method(self) -> CatQMethod | OfficialParameters:
        config = self.quantization_config
        return CatQMethod(config) if config.parameters is None else OfficialParameters(config)

    def make_layer(self, linear: nn.Module, packed: PackedWeight) -> LowBitLinear:
        return LowBitLinear.from_packed(linear, packed, **self._layer_options())

    def skeleton_layer(self, name: str, linear: nn.Module) -> LowBitLinear:
        config = self.quantization_config
        return LowBitLinear.skeleton(linear, config.bits, config.group_size, **self._layer_options())

    def _layer_options(self) -> dict[str, int]:
        return {"zero_point": ZERO_POINT, "activation_bits": self.quantization_config.activation_bits}
