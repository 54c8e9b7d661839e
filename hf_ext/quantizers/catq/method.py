"""CAT-Q as the window engine runs it: trainable stand-ins of the linears, their training, and the packed result."""

from __future__ import annotations

import math
import zlib
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.modules import linear_shape, weight_of
from ...ops.activations import fake_quantize_activations
from ...ops.packed_weight import PackedWeight, dequantize
from ...ops.packing import pack_codes
from ..blockwise import LayerResult
from ..windows import Window, shuffled
from .config import CatQConfig
from .functional import huber_delta, modulate, sharpness, ternarize, ternary_weight, windows


ZERO_POINT = 1  # the code that stands for 0: codes are T + 1


class TernaryStandIn(nn.Module):
    """A linear whose weight becomes ternary while it is trained.

    Args:
        linear (`nn.Module`): the float linear; kept as it is.
        config ([`CatQConfig`]): the options.
        generator (`torch.Generator`): draws the LoRA's `A`.

    Attributes:
        sharpness (`float`, *optional*): of the softened weight; `None` for the ternary one.
        bypassed (`bool`): compute what the float linear does.
    """

    def __init__(self, linear: nn.Module, config: CatQConfig, generator: torch.Generator):
        super().__init__()
        self._linear = [linear]  # out of sight of the state: it is the model's, not ours
        self.config = config
        self.out_features, self.in_features = linear_shape(linear)
        self.group_size = self.in_features if config.group_size == -1 else config.group_size
        self.sharpness: float | None = None
        self.bypassed = False
        device = linear.weight.device
        shape = (self.out_features, self.in_features // self.group_size, 1)
        self.mean_factor, self.scale_factor, self.threshold_factor = (
            nn.Parameter(torch.zeros(shape, device=device)) for _ in range(3)
        )
        rank = min(config.lora_rank, self.out_features, self.in_features)
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features).uniform_(generator=generator).to(device))
        with torch.no_grad():  # kaiming_uniform_ with a = sqrt(5), from a generator of its own
            self.lora_A.mul_(2).sub_(1).div_(math.sqrt(self.in_features))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, device=device))
        self.register_buffer("reached", torch.zeros((), dtype=torch.bool))  # by a token

    @property
    def linear(self) -> nn.Module:
        """The float linear."""
        return self._linear[0]

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.bypassed:
            return self.linear(hidden_states)
        if hidden_states.numel() and torch.is_grad_enabled():
            self.reached.fill_(True)
        hidden_states = fake_quantize_activations(hidden_states, self.config.activation_bits)
        with torch.autocast(hidden_states.device.type, enabled=False):  # codes depend on the last bits of the weight
            weight = self.ternary_weight()
        return F.linear(hidden_states, weight.to(hidden_states.dtype), self.linear.bias)

    def ternary_weight(self) -> Tensor:
        """The fp32 weight `[out, in]` of the current stage; in the hard stage with the gradient of `hard_stage`."""
        surrogate = self.config.final_sharpness if self.config.hard_stage == "surrogate" else None
        return ternary_weight(
            self.merged_weight(),
            *self._factors(),
            sharpness=self.sharpness,
            gradient_sharpness=surrogate,
            **self._grid(),
        )

    def merged_weight(self) -> Tensor:
        """The float weight with the LoRA added, fp32."""
        weight, rank = weight_of(self.linear), self.lora_A.shape[0]
        if rank == 0:
            return weight
        return torch.addmm(weight, self.lora_B, self.lora_A, alpha=self.config.lora_alpha / rank)

    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.mean_factor, self.scale_factor, self.threshold_factor

    def _grid(self) -> dict[str, int | float | bool]:
        return {
            "group_size": self.group_size,
            "initial_threshold": self.config.initial_threshold,
            "scale_from_raw": self.config.scale_from_raw,
        }

    def pack(self) -> PackedWeight:
        """The ternary weight as codes and scales."""
        grid = modulate(self.merged_weight(), *self._factors(), **self._grid())
        codes = (ternarize(grid.normalized, grid.threshold) + ZERO_POINT).flatten(1).to(torch.uint8)
        scale = grid.scale.squeeze(-1)
        zero = torch.full_like(scale, ZERO_POINT, dtype=torch.uint8)
        return PackedWeight(pack_codes(codes, 2), scale, zero, 2, self.in_features, self.config.group_size)


def ternary_result(stand_in: TernaryStandIn) -> LayerResult:
    """The packed weight of `stand_in`, with how far it is from the float one."""
    packed = stand_in.pack()
    weight, ternary = weight_of(stand_in.linear), dequantize(packed)
    metrics = {
        "nonzero": (ternary != 0).float().mean().item(),
        "weight_error": ((ternary - weight).norm() / weight.norm().clamp(min=1e-30)).item(),
    }
    return LayerResult(packed=packed, metrics=metrics)


class CatQMethod:
    """Trains the ternary weights of every window."""

    name = "CAT-Q"
    needs_inputs = True
    packed_types = (PackedWeight,)

    def __init__(self, config: CatQConfig):
        self.config = config

    def windows(self, blocks: int) -> list[range]:
        return windows(blocks, self.config.num_layers, self.config.stride, self.config.fill)

    def wrap(self, name: str, linear: nn.Module) -> TernaryStandIn:
        # One generator for each linear, so that a resumed run draws what the whole run would have drawn.
        generator = torch.Generator().manual_seed(self.config.seed + zlib.crc32(name.encode()))
        return TernaryStandIn(linear, self.config, generator)

    def bypass(self, linears: dict[str, nn.Module], bypassed: bool) -> None:
        for linear in linears.values():
            linear.bypassed = bypassed

    def steps(self, batches: int) -> int:
        return self.config.epochs * batches

    def solve(self, stand_in: TernaryStandIn) -> LayerResult:
        result = ternary_result(stand_in)
        if self.config.epochs and not stand_in.reached:
            result.note = "no calibration token reached it: made ternary without training"
        return result

    def fit(self, window: Window) -> None:
        """Soft epochs, hard epochs, and the better of the two ends."""
        if self.config.epochs == 0:
            return
        training = _Training(window, self.config)
        soft_end: tuple[float, list[Tensor]] | None = None
        for epoch in range(self.config.epochs):
            stage = sharpness(epoch, self.config.epochs, self.config.final_sharpness, self.config.soft_ratio)
            if stage is None and epoch > 0 and soft_end is None:
                soft_end = training.hard_loss(), training.state()
                if self.config.hard_stage == "none":
                    break
            window.curve.append(training.epoch(epoch, stage))
        hard_loss = training.hard_loss()
        if soft_end is not None and soft_end[0] <= hard_loss:
            training.restore(soft_end[1])
            hard_loss = soft_end[0]
        window.curve.append(hard_loss)


class _Training:
    """The optimizer, schedule and loss of one window."""

    def __init__(self, window: Window, config: CatQConfig):
        self.window = window
        self.config = config
        self.delta = huber_delta(window.index, window.count, config.huber_delta_min, config.huber_delta_max)
        linears = window.linears.values()
        factors = [p for linear in linears for p in (linear.mean_factor, linear.scale_factor, linear.threshold_factor)]
        loras = [p for linear in linears for p in (linear.lora_A, linear.lora_B) if p.numel()]
        self.parameters = factors + loras
        groups = [{"params": factors, "lr": config.factor_lr}, {"params": loras, "lr": config.lora_lr}]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        total = config.epochs * len(window)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 - step / total)
        self.order = torch.Generator().manual_seed(config.seed + window.index)

    def epoch(self, epoch: int, stage: float | None) -> float:
        """Train on every batch once; return the mean loss."""
        for linear in self.window.linears.values():
            linear.sharpness = stage
        total = 0.0
        for number in shuffled(len(self.window), self.order):
            with torch.enable_grad():
                loss = self.loss(number)
                loss.backward()
            value = loss.item()
            if not math.isfinite(value):
                raise ValueError(
                    f"CAT-Q: the loss of window {self.window.index} is {value} in epoch {epoch}. Lower factor_lr "
                    f"({self.config.factor_lr}) and lora_lr ({self.config.lora_lr}), or load the model in float32."
                )
            nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.window.progress.update()
            self.window.progress.set_postfix_str(f"loss {value:.3g}", refresh=False)
            total += value
        return total / len(self.window)

    def loss(self, number: int) -> Tensor:
        target = self.window.targets[number]
        with _autocast(target.device):
            output = self.window.forward(number)
        if self.config.loss == "mse":
            return F.mse_loss(output.float(), target.float())
        return F.huber_loss(output.float(), target.float(), delta=self.delta)

    def hard_loss(self) -> float:
        """The mean loss with the ternary weights."""
        for linear in self.window.linears.values():
            linear.sharpness = None
        return sum(self.loss(number).item() for number in range(len(self.window))) / len(self.window)

    def state(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def restore(self, state: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters, state, strict=True):
            parameter.copy_(value)


def _autocast(device: torch.device) -> AbstractContextManager:
    """bfloat16 products where they are fast, as the released trainer has them on GPUs; the weights stay fp32."""
    if device.type == "cpu" and not torch.cpu._is_amx_tile_supported():
        return nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
