"""Sums over calibration tokens that closed-form methods need of a linear's inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


class SecondMoment:
    """The second moment `X^T X / tokens` of a linear's inputs, summed in fp32 batch by batch: GPTQ's Hessian.

    Args:
        in_features (`int`): columns of `X`.
        device (`torch.device`): where the sum lies.
        token_normalize (`bool`): scale every token to unit length first, so that a few huge ones do not decide.
    """

    def __init__(self, in_features: int, device: torch.device, token_normalize: bool = False):
        self.tokens = 0
        self.token_normalize = token_normalize
        self._sum = torch.zeros(in_features, in_features, dtype=torch.float32, device=device)

    def update(self, hidden_states: Tensor) -> None:
        """Add `hidden_states`, `[tokens, in_features]`."""
        hidden_states = hidden_states.float()
        if self.token_normalize:
            peak = hidden_states.abs().amax(dim=1, keepdim=True)  # first, so that no square overflows
            hidden_states = F.normalize(hidden_states / peak.clamp(min=torch.finfo(torch.float32).tiny), dim=1)
        self._sum.addmm_(hidden_states.T, hidden_states)
        self.tokens += hidden_states.shape[0]

    def mean(self) -> Tensor:
        """Return `[in_features, in_features]`; at least one token must have been added."""
        return self._sum / self.tokens
