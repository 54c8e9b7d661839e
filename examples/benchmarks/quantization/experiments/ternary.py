"""Ternary weights without any training: the baselines of CAT-Q."""

import torch
from torch import Tensor


def absmean(weight: Tensor, group_size: int) -> Tensor:
    """Round to -1, 0, 1 in units of the group's mean absolute weight, as BitNet b1.58 does."""
    grouped = weight.unflatten(1, (-1, group_size))
    scale = grouped.abs().mean(-1, keepdim=True).clamp(min=1e-8)
    return (torch.clamp(torch.round(grouped / scale), -1, 1) * scale).flatten(1)


def twn(weight: Tensor, group_size: int) -> Tensor:
    """Ternary weight networks (https://huggingface.co/papers/1605.04711): 0 below 0.7 of the mean absolute weight, and
    the mean of the others as scale."""
    grouped = weight.unflatten(1, (-1, group_size))
    kept = grouped.abs() > 0.7 * grouped.abs().mean(-1, keepdim=True)
    scale = (grouped.abs() * kept).sum(-1, keepdim=True) / kept.sum(-1, keepdim=True).clamp(min=1)
    return (grouped.sign() * kept * scale).flatten(1)
