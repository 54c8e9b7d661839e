"""What linear layers over packed weights share: dtypes, shapes, and gradients that keep no float weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def frozen_linear(
    hidden_states: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None,
    runtime: Any,
    forward: Callable[..., torch.Tensor],
    input_gradient: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Apply a packed weight, differentiably in `hidden_states` and `bias`, in the dtype of the former or of autocast.

    Args:
        hidden_states (`torch.Tensor` of shape `(..., in_features)`): any leading axes, also empty ones.
        weight: has `in_features` and `out_features`.
        bias (`torch.Tensor` of shape `(out_features,)`, *optional*): added to the result.
        runtime: passed on to `forward`.
        forward: `forward(rows, weight, bias, runtime)` gives the product for rows `(n, in_features)`.
        input_gradient: `input_gradient(rows, weight)` gives `rows @ weight` for rows `(n, out_features)`.

    Raises:
        ValueError: the last axis of `hidden_states` is not `in_features`.
    """
    device_type = hidden_states.device.type
    if torch.is_autocast_enabled(device_type):
        hidden_states = hidden_states.to(torch.get_autocast_dtype(device_type))
    if bias is not None and bias.dtype != hidden_states.dtype:
        bias = bias.to(hidden_states.dtype)
    if torch.is_grad_enabled() and (hidden_states.requires_grad or (bias is not None and bias.requires_grad)):
        return _FrozenLinear.apply(hidden_states, bias, weight, runtime, forward, input_gradient)
    return _by_rows(hidden_states, weight, bias, runtime, forward)


def _by_rows(hidden_states, weight, bias, runtime, forward) -> torch.Tensor:
    shape = hidden_states.shape
    if shape[-1] != weight.in_features:
        raise ValueError(f"hidden_states have shape {tuple(shape)}; this weight takes (..., {weight.in_features}).")
    rows = hidden_states.reshape(-1, weight.in_features)
    if rows.shape[0] == 0:
        return hidden_states.new_empty(*shape[:-1], weight.out_features)
    return forward(rows, weight, bias, runtime).view(*shape[:-1], weight.out_features)


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states, bias, weight, runtime, forward, input_gradient):
        ctx.weight, ctx.input_gradient = weight, input_gradient
        return _by_rows(hidden_states, weight, bias, runtime, forward)

    @staticmethod
    def backward(ctx, grad_output):
        weight = ctx.weight
        grad_hidden_states = grad_bias = None
        rows = grad_output.reshape(-1, weight.out_features)
        if ctx.needs_input_grad[0]:
            gradient = ctx.input_gradient(rows, weight)
            grad_hidden_states = gradient.reshape(*grad_output.shape[:-1], weight.in_features)
        if ctx.needs_input_grad[1]:
            grad_bias = rows.sum(0)
        return grad_hidden_states, grad_bias, None, None, None, None
