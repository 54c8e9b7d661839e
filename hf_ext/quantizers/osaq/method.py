"""OSAQ as the block-wise engine runs it: statistics, absorption, and rounding where the result is packed."""

from __future__ import annotations

from torch import Tensor, nn

from ...core.modules import weight_of
from ...ops.low_bit_linear import PackedWeight, dequantize
from ...ops.packing import pack_codes
from ..blockwise import LayerResult
from ..rounding import (
    HessianFactorizationError,
    coordinate_descent,
    gptq,
    min_max_grid,
    output_error,
    round_to_grid,
)
from ..statistics import SecondMoment
from .config import OSAQConfig
from .functional import absorb, null_space


UNSEEN = "no calibration token reached it"
SILENT = "its inputs were all zero on the calibration data"
FEW_TOKENS = "fewer calibration tokens than columns: directions no token happened to use look free to change"
SINGULAR = "its Hessian did not factor, so its weight was rounded to the nearest"


class OSAQMethod:
    """Absorbs the outliers of every linear and, with `packs`, rounds and packs the result."""

    def __init__(self, config: OSAQConfig, *, packs: bool):
        self.name = "OSAQ" if packs else "OSAQ absorption"
        self.needs_inputs = True
        self.packed_types = (PackedWeight,)
        self.config = config
        self.packs = packs
        # GPTQ lets later layers make up for earlier errors, which they must see for that. Absorption alone keeps the
        # outputs, and what comes out of blocks rounded to the nearest is a poor sample of what the model computes.
        self.propagate_error = packs and config.rounding == "gptq"
        self._moments: dict[str, SecondMoment] = {}

    def observe(self, group: str, hidden_states: Tensor) -> None:
        if group not in self._moments:
            self._moments[group] = SecondMoment(
                hidden_states.shape[1], hidden_states.device, self.config.token_normalize
            )
        self._moments[group].update(hidden_states)

    def solve(self, group: str, linears: dict[str, nn.Module]) -> dict[str, LayerResult]:
        moment = self._moments.pop(group, None)
        if moment is None or moment.tokens == 0:
            return {name: self._unseen(weight_of(linear), UNSEEN) for name, linear in linears.items()}
        hessian = moment.mean()
        if not hessian.diagonal().any():
            return {name: self._unseen(weight_of(linear), SILENT) for name, linear in linears.items()}
        space = null_space(hessian, self.config.gamma, max_null_ratio=self.config.max_null_ratio)
        note = FEW_TOKENS if moment.tokens < hessian.shape[0] else ""
        return {name: self._solve_linear(weight_of(linear), hessian, space, note) for name, linear in linears.items()}

    def _solve_linear(self, weight: Tensor, hessian: Tensor, space, note: str) -> LayerResult:
        config = self.config
        absorbed = absorb(
            weight,
            hessian,
            space,
            tau=config.tau,
            mu1=config.mu1,
            mu2=config.mu2,
            group_size=config.group_size if config.scope == "group" else -1,
            drift_tol=config.drift_tol,
        )
        metrics = {
            "null_rank": float(absorbed.null_rank),
            "range_ratio": absorbed.range_ratio,
            "drift": absorbed.drift.mean().item(),
        }
        if not self.packs:
            return LayerResult(weight=absorbed.weight, note=note, metrics=metrics)
        packed, failure = self._round(absorbed.weight, hessian)
        metrics["output_error"] = output_error(dequantize(packed), weight, hessian)
        return LayerResult(packed=packed, note="; ".join(filter(None, (note, failure))), metrics=metrics)

    def _round(self, weight: Tensor, hessian: Tensor) -> tuple[PackedWeight, str]:
        config, failure = self.config, ""
        bits, group_size = config.bits, config.group_size
        scale, zero = min_max_grid(weight, bits, group_size)
        codes = round_to_grid(weight, scale, zero, bits, group_size)
        if config.rounding == "gptq":
            try:
                result = gptq(
                    weight, hessian, bits, group_size, damp_percent=config.damp_percent, desc_act=config.desc_act
                )
                codes, scale, zero = result.codes, result.scale, result.zero
            except HessianFactorizationError:
                failure = SINGULAR
        if config.refine_sweeps:
            codes = coordinate_descent(
                weight, codes, scale, zero, hessian, bits, group_size, sweeps=config.refine_sweeps
            )
        return PackedWeight(pack_codes(codes, bits), scale, zero, bits, weight.shape[1], group_size), failure

    def _unseen(self, weight: Tensor, reason: str) -> LayerResult:
        if not self.packs:
            return LayerResult(weight=weight, note=f"{reason}: left as it is")
        bits, group_size = self.config.bits, self.config.group_size
        scale, zero = min_max_grid(weight, bits, group_size)
        codes = round_to_grid(weight, scale, zero, bits, group_size)
        packed = PackedWeight(pack_codes(codes, bits), scale, zero, bits, weight.shape[1], group_size)
        return LayerResult(packed=packed, note=f"{reason}: rounded to the nearest, nothing absorbed")
