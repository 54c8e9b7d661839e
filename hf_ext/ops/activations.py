"""Activations rounded to integers a token, and back: what low-bit activations cost, in float arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor


def fake_quantize_activations(hidden_states: Tensor, bits: int) -> Tensor:
    """Round every token to `2**bits` evenly spaced values from its smallest to its largest, and restore floats.

    The range includes 0. The gradient passes straight through.

    Args:
        hidden_states (`torch.Tensor` `[..., features]`): the inputs of a linear.
        bits (`int`): 8; 16 leaves them as they are.
    """
    if bits >= 16:
        return hidden_states
    with torch.no_grad():
        values = hidden_states.float()
        low = values.amin(-1, keepdim=True).clamp(max=0)
        high = values.amax(-1, keepdim=True).clamp(min=0)
        step = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(torch.float32).tiny)
        zero = torch.round(-low / step)
        rounded = ((torch.round(values / step) + zero).clamp(0, 2**bits - 1) - zero) * step
        rounded = rounded.to(hidden_states.dtype)
    if hidden_states.requires_grad:
        return hidden_states + (rounded - hidden_states).detach()
    return rounded
