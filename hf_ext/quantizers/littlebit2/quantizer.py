"""LittleBit-2 behind `from_pretrained`."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from ...core.modules import linear_shape
from ...ops.factored_binary_linear import FactoredWeight
from ..base import LowBitQuantizer
from ..packed_linear import PackedLinear
from .config import LittleBit2Config
from .layer import FactoredBinaryLinear, LatentBinaryLinear, LatentWeight
from .method import LittleBit2Method


if TYPE_CHECKING:
    from transformers import PreTrainedModel


class LittleBit2Quantizer(LowBitQuantizer):
    """Factorize every decoder linear, packed or ready to train; see [`LittleBit2Config`]."""

    quantization_config: LittleBit2Config

    def build_method(self) -> LittleBit2Method:
        return LittleBit2Method(self.quantization_config)

    def make_layer(self, linear: nn.Module, packed: FactoredWeight | LatentWeight) -> PackedLinear:
        if isinstance(packed, LatentWeight):
            return LatentBinaryLinear.from_latent(linear, packed, **self._training_options())
        return FactoredBinaryLinear.from_packed(linear, packed)

    def skeleton_layer(self, name: str, linear: nn.Module) -> PackedLinear:
        config = self.quantization_config
        rank = config.rank_of(name, linear_shape(linear))
        if config.trainable:
            return LatentBinaryLinear.skeleton(linear, rank, config.paths, **self._training_options())
        return FactoredBinaryLinear.skeleton(linear, rank, config.paths)

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        if self.quantization_config.trained and not self.pre_quantized:
            raise ValueError(
                "LittleBit2Config: trained=True is the state of a checkpoint that `pack` made; a model that is "
                "quantized now is not trained yet. Leave it out."
            )
        super()._process_model_before_weight_loading(model, **kwargs)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        model = super()._process_model_after_weight_loading(model, **kwargs)
        if self.quantization_config.trainable:
            freeze_embeddings(model)
        elif self.quantization_config.warning:
            warnings.warn(self.quantization_config.warning, stacklevel=2)
        return model

    def _training_options(self) -> dict[str, Any]:
        config = self.quantization_config
        return {"sign_gradient": config.sign_gradient, "smooth_alpha": config.smooth_alpha}

    @property
    def is_qat_trainable(self) -> bool:
        """Trainer trains the float factors, if the layers have them."""
        return self.quantization_config.trainable


def freeze_embeddings(model: PreTrainedModel) -> None:
    """Leave all but the token embeddings and the output layer to train, as the authors do."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" not in name and "lm_head" not in name)
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):
        if module is not None:
            module.requires_grad_(False)
