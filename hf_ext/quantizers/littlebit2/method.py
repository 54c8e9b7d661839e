"""LittleBit-2 as the block-wise engine runs it: the start of every linear from its weight alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...core.modules import weight_of
from ...ops.factored_binary_linear import FactoredWeight, dequantize_factored
from ..blockwise import LayerResult
from .config import LittleBit2Config
from .functional import bits_per_weight, factorize, row_efficiency
from .layer import LatentWeight


class LittleBit2Method:
    """Factorizes every linear; the result is packed, or float factors where the config is `trainable`."""

    name = "LittleBit-2"
    needs_inputs = False
    propagate_error = False
    packed_types = (FactoredWeight, LatentWeight)

    def __init__(self, config: LittleBit2Config):
        self.config = config

    def observe(self, group: str, hidden_states: Tensor) -> None:
        """Nothing is learned from data."""

    def solve(self, group: str, linears: dict[str, nn.Module]) -> dict[str, LayerResult]:
        return {name: self._solve_linear(name, weight_of(linear)) for name, linear in linears.items()}

    def _solve_linear(self, name: str, weight: Tensor) -> LayerResult:
        config, shape = self.config, tuple(weight.shape)
        paths = factorize(
            weight,
            config.rank_of(name, shape),
            paths=config.paths,
            rotation=config.rotation,
            iterations=config.itq_iterations,
            # One for each linear, so that a resumed run draws what the whole run would have drawn.
            generator=torch.Generator().manual_seed(config.seed),
        )
        latent = LatentWeight.from_paths(paths)
        packed = latent.pack()
        energy = weight.norm()
        error = (weight - dequantize_factored(packed)).norm() / energy if energy > 0 else energy
        metrics = {
            "bits_per_weight": bits_per_weight(*shape, packed.rank, packed.paths),
            "stored_bits_per_weight": packed.bits_per_weight,
            "weight_error": error.item(),
            "row_efficiency": row_efficiency(torch.cat([paths[0].U, paths[0].V.T])).mean().item(),
        }
        excess = config.excess_of(name, shape)
        note = (
            f"the smallest rank, {config.min_rank}, takes {excess:.3g} bits a weight, above bits={config.bits:g}"
            if excess
            else ""
        )
        return LayerResult(packed=latent if config.trainable else packed, note=note, metrics=metrics)
