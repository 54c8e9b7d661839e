"""The linear layers of LittleBit-2: packed, and with the float factors that training moves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...core.modules import linear_shape, replace_module
from ...ops.factored_binary_linear import (
    FactoredCpuWeight,
    FactoredWeight,
    dequantize_factored,
    factored_binary_linear,
    pack_signs,
    prepare_factored_cpu,
)
from ...ops.packing import packed_rows
from ..packed_linear import PackedLinear
from .functional import BinaryPath, SmoothSign, StraightThroughSign, binary_linear


if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LatentWeight:
    """The float factors and scales of all paths, stacked along the first axis; see [`BinaryPath`]. float32."""

    U: Tensor
    V: Tensor
    u1: Tensor
    u2: Tensor
    v1: Tensor
    v2: Tensor

    @classmethod
    def from_paths(cls, paths: list[BinaryPath]) -> LatentWeight:
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: torch.stack([getattr(path, name) for path in paths]).float() for name in names})

    def paths(self) -> list[BinaryPath]:
        return [BinaryPath(*parts) for parts in zip(*self.tensors().values(), strict=True)]

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def pack(self) -> FactoredWeight:
        """Keep the signs, merge the two latent scales, and round the scales to bfloat16."""
        return FactoredWeight(
            torch.stack([pack_signs(path) for path in self.U]),
            torch.stack([pack_signs(path) for path in self.V]),
            self.u1.bfloat16(),
            (self.u2 * self.v1).bfloat16(),
            self.v2.bfloat16(),
            in_features=self.V.shape[2],
            rank=self.U.shape[2],
        )


class FactoredBinaryLinear(PackedLinear):
    """`y = x W^T + b` with W a sum of products of two sign matrices with scales, see [`FactoredWeight`].

    Args:
        in_features (`int`), out_features (`int`): columns and rows of the weight.
        rank (`int`): of each product.
        paths (`int`): products, 1 or 2.
        bias (`bool`), device, dtype, source_class: see [`PackedLinear`].

    Buffers:
        u_signs: `uint8` `[paths, ceil(rank / 8), out]`. v_signs: `uint8` `[paths, ceil(in / 8), rank]`.
        out_scale, latent_scale, in_scale: `bfloat16` `[paths, out]`, `[paths, rank]`, `[paths, in]`; stay so when the
            model is cast.
    """

    fixed_dtype_buffers = ("out_scale", "latent_scale", "in_scale")

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        paths: int = 2,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        source_class: type = nn.Linear,
    ):
        super().__init__(in_features, out_features, bias, device, dtype, source_class)
        self.rank = rank
        self.paths = paths
        signs = {"u_signs": (packed_rows(rank, 1), out_features), "v_signs": (packed_rows(in_features, 1), rank)}
        for name, shape in signs.items():
            self.register_buffer(name, torch.zeros(paths, *shape, dtype=torch.uint8, device=device))
        for name, size in (("out_scale", out_features), ("latent_scale", rank), ("in_scale", in_features)):
            self.register_buffer(name, torch.zeros(paths, size, dtype=torch.bfloat16, device=device))
        self._packed: FactoredWeight | None = None
        self._cpu_weight: tuple[FactoredCpuWeight | None] | None = None

    @classmethod
    def skeleton(cls, linear: nn.Module, rank: int, paths: int) -> FactoredBinaryLinear:
        """Return a layer of the shape of `linear`, on its device, for a checkpoint to load into."""
        return cls(rank=rank, paths=paths, **_shared_arguments(linear))

    @classmethod
    def from_packed(cls, linear: nn.Module, packed: FactoredWeight) -> FactoredBinaryLinear:
        """Return a layer with the weight `packed` and the bias of `linear`."""
        layer = cls.skeleton(linear, packed.rank, packed.paths)
        for name in ("u_signs", "v_signs", "out_scale", "latent_scale", "in_scale"):
            setattr(layer, name, getattr(packed, name).to(layer.u_signs.device))
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
        return layer

    @property
    def packed(self) -> FactoredWeight:
        """The buffers as the `FactoredWeight` that `hf_ext.ops` works with."""
        packed = self._packed
        if packed is None or packed.u_signs is not self.u_signs or packed.out_scale is not self.out_scale:
            scales = (self.out_scale, self.latent_scale, self.in_scale)
            packed = self._packed = FactoredWeight(self.u_signs, self.v_signs, *scales, self.in_features, self.rank)
            self._cpu_weight = None
        return packed

    def cpu_weight(self) -> FactoredCpuWeight | None:
        """Return the copy of the weight in the layout of PyTorch's CPU kernel, made at the first call."""
        packed = self.packed
        if self._cpu_weight is None:
            self._cpu_weight = (prepare_factored_cpu(packed),)
        return self._cpu_weight[0]

    def forward(self, hidden_states: Tensor) -> Tensor:
        # The kernel serves bf16 only; without it its copy would be memory for nothing.
        on_kernel = hidden_states.dtype is torch.bfloat16 and hidden_states.device.type == "cpu"
        return factored_binary_linear(hidden_states, self.packed, self.bias, self.cpu_weight() if on_kernel else None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return dequantize_factored(self.packed, dtype)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._packed = self._cpu_weight = None  # the buffers were written in place

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, "
            f"paths={self.paths}, bias={self.bias is not None}"
        )


class LatentBinaryLinear(PackedLinear):
    """The layer that training sees: float factors, of which the forward pass uses the signs.

    Args:
        in_features (`int`), out_features (`int`), rank (`int`), paths (`int`): see [`FactoredBinaryLinear`].
        sign_gradient (`str`): "smoothsign" or "ste".
        smooth_alpha (`float`): sharpness of the first.
        bias (`bool`), device, dtype, source_class: see [`PackedLinear`].

    Parameters:
        U, V, u1, u2, v1, v2: `float32`, see [`LatentWeight`]; stay so when the model is cast, as a step of training
            would be lost in a coarser dtype.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        paths: int = 2,
        sign_gradient: str = "smoothsign",
        smooth_alpha: float = 100.0,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        source_class: type = nn.Linear,
    ):
        super().__init__(in_features, out_features, bias, device, dtype, source_class)
        self.rank = rank
        self.paths = paths
        self.sign = partial(_smooth_sign, alpha=smooth_alpha) if sign_gradient == "smoothsign" else _straight_sign
        shapes = {
            "U": (out_features, rank),
            "V": (rank, in_features),
            "u1": (out_features,),
            "u2": (rank,),
            "v1": (rank,),
            "v2": (in_features,),
        }
        for name, shape in shapes.items():
            empty = torch.zeros(paths, *shape, dtype=torch.float32, device=device)
            self.register_parameter(name, nn.Parameter(empty))
        if self.bias is not None:
            self.bias.requires_grad_(True)

    @classmethod
    def skeleton(cls, linear: nn.Module, rank: int, paths: int, **options: Any) -> LatentBinaryLinear:
        """Return a layer of the shape of `linear`, on its device, for a checkpoint to load into."""
        return cls(rank=rank, paths=paths, **options, **_shared_arguments(linear))

    @classmethod
    def from_latent(cls, linear: nn.Module, latent: LatentWeight, **options: Any) -> LatentBinaryLinear:
        """Return a layer with the factors `latent` and the bias of `linear`."""
        layer = cls.skeleton(linear, latent.U.shape[2], latent.U.shape[0], **options)
        for name, tensor in latent.tensors().items():
            setattr(layer, name, nn.Parameter(tensor.to(layer.U.device)))
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach())
        return layer

    @property
    def qweight(self) -> Tensor:
        return self.U

    @property
    def latent(self) -> LatentWeight:
        return LatentWeight(self.U, self.V, self.u1, self.u2, self.v1, self.v2)

    def forward(self, hidden_states: Tensor) -> Tensor:
        device_type = hidden_states.device.type
        if torch.is_autocast_enabled(device_type):
            hidden_states = hidden_states.to(torch.get_autocast_dtype(device_type))
        output = sum(binary_linear(hidden_states, path, self.sign) for path in self.latent.paths())
        return output if self.bias is None else output + self.bias.to(output.dtype)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        with torch.no_grad():
            return sum(path.to_dense() for path in self.latent.paths()).to(dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LatentBinaryLinear:
        masters = {id(part) for tensor in self.latent.tensors().values() for part in (tensor, tensor.grad)}

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if id(tensor) not in masters or moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, rank={self.rank}, "
            f"paths={self.paths}, bias={self.bias is not None}"
        )


def pack(model: PreTrainedModel) -> PreTrainedModel:
    """Turn a trained model into the one to use: signs and 16-bit scales in place of the float factors.

    The outputs are those of the trained model up to the rounding of the scales to bfloat16. The model no longer
    trains, but adapters do on top of it. After a training loop of your own set
    `model.config.quantization_config.trained = True` first, as `LittleBit2Trainer` does: without it the checkpoint
    says that it is an initialisation.

    Args:
        model ([`~transformers.PreTrainedModel`]): quantized with `LittleBit2Config(trainable=True)`; changed in place.

    Returns:
        [`~transformers.PreTrainedModel`]: `model`, ready for `save_pretrained`.

    Raises:
        ValueError: `model` has no trainable LittleBit-2 layers.
    """
    latents = {name: module for name, module in model.named_modules() if isinstance(module, LatentBinaryLinear)}
    if not latents:
        raise ValueError(
            f"{type(model).__name__} has no trainable LittleBit-2 layers to pack: quantize it with "
            "LittleBit2Config(trainable=True), and train it with LittleBit2Trainer first."
        )
    if getattr(model, "hf_quantizer", None) is None:
        raise ValueError(
            f"{type(model).__name__} is half quantized: the run on it was stopped. Load the float model again, and "
            "quantize it whole."
        )
    with torch.no_grad():
        for name, latent in latents.items():
            replace_module(model, name, FactoredBinaryLinear.from_packed(latent, latent.latent.pack()))
    quantizer = model.hf_quantizer
    quantizer.quantization_config = dataclasses.replace(quantizer.quantization_config, trainable=False)
    model.config.quantization_config = quantizer.quantization_config
    return model


def _smooth_sign(values: Tensor, alpha: float) -> Tensor:
    return SmoothSign.apply(values, alpha)


def _straight_sign(values: Tensor) -> Tensor:
    return StraightThroughSign.apply(values)


def _shared_arguments(linear: nn.Module) -> dict[str, Any]:
    out_features, in_features = linear_shape(linear)
    return {
        "in_features": in_features,
        "out_features": out_features,
        "bias": linear.bias is not None,
        "device": next(linear.parameters()).device,
        "dtype": None if linear.bias is None else linear.bias.dtype,
        "source_class": getattr(linear, "source_class", type(linear)),
    }
