"""MagR, the direct rival of OSAQ: weight magnitude reduction before rounding (https://huggingface.co/papers/2406.00800).

Our implementation of the paper's proximal gradient method, for comparison only.
"""

import torch
from torch import Tensor, nn

from hf_ext import OSAQConfig
from hf_ext.core.modules import weight_of
from hf_ext.ops.low_bit_linear import dequantize
from hf_ext.quantizers.blockwise import LayerResult
from hf_ext.quantizers.osaq.method import OSAQMethod
from hf_ext.quantizers.rounding import output_error


ALPHA = {False: 1e-3, True: 1e-4}  # penalty for whole rows and for groups, on a Hessian of largest eigenvalue 1
ITERATIONS = 40  # accelerated, where the paper takes 150 plain steps
NEWTON_STEPS = 8


def l1_projection(vectors: Tensor, radius: float) -> Tensor:
    """The nearest points of the l1 ball of `radius` to each vector along the last axis: shrink by one threshold.

    The threshold is the root of a convex, piecewise linear function, which Newton's method climbs from below.
    """
    magnitude = vectors.abs()
    threshold = ((magnitude.sum(-1, keepdim=True) - radius) / vectors.shape[-1]).clamp(min=0)
    for _ in range(NEWTON_STEPS):
        excess = (magnitude - threshold).clamp_(min=0)
        count = (excess > 0).sum(-1, keepdim=True).clamp(min=1)
        threshold = threshold + (excess.sum(-1, keepdim=True) - radius).clamp(min=0) / count
    return vectors.sign() * (magnitude - threshold).clamp(min=0)


def magr(weight: Tensor, hessian: Tensor, group_size: int) -> Tensor:
    """Minimise `1/2 |X (W' - W)|^2 + alpha |W'|_inf` per group by accelerated proximal gradient steps."""
    columns = weight.shape[1]
    width = columns if group_size == -1 else group_size
    alpha = ALPHA[group_size != -1]
    hessian = hessian / torch.linalg.eigvalsh(hessian.double()).max().float()
    changed = ahead = weight
    momentum = 1.0
    for _ in range(ITERATIONS):
        step = (ahead - (ahead - weight) @ hessian).view(len(weight), -1, width)
        previous, changed = changed, (step - l1_projection(step, alpha)).view_as(weight)  # prox of |.|_inf, by Moreau
        following = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead = changed + (momentum - 1) / following * (changed - previous)
        momentum = following
    return changed


class MagRMethod(OSAQMethod):
    """MagR, then the same rounding as OSAQ's; weights stay float."""

    name = "MagR"

    def __init__(self, config: OSAQConfig):
        super().__init__(config, packs=False)
        self.propagate_error = True

    def solve(self, group: str, linears: dict[str, nn.Module]) -> dict[str, LayerResult]:
        hessian = self._moments.pop(group).mean()
        results = {}
        for name, linear in linears.items():
            weight = weight_of(linear)
            packed, note = self._round(magr(weight, hessian, self.config.group_size), hessian)
            rounded = dequantize(packed)
            error = output_error(rounded, weight, hessian)
            results[name] = LayerResult(weight=rounded, note=note, metrics={"output_error": error})
        return results
