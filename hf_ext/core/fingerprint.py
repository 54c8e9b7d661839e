"""A short identity of a model's weights, to tell a resumed run or an artefact that it met another model."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn


SAMPLED_VALUES = 256


def tensor_digest(tensors: list[Tensor]) -> str:
    """Return a hex digest of the full contents of `tensors`."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()[:16]


def model_fingerprint(model: nn.Module) -> str:
    """Return a hex digest of every parameter's name, shape, dtype and an evenly spaced sample of its values.

    Reads a few hundred values a parameter, so it takes milliseconds for a large model; two fine-tunes of one base
    differ in it.
    """
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        flat = parameter.detach().reshape(-1)
        digest.update(_bytes(flat[:: max(1, flat.numel() // SAMPLED_VALUES)]))
    return digest.hexdigest()[:16]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
