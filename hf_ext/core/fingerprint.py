"""A short identity of a model's weights, to tell a resumed run or an artefact that it met another model."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import torch
from torch import Tensor


if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Differs between two loads of one model, and changes nothing of what it computes.
BOOKKEEPING = ("_name_or_path", "architectures", "dtype", "quantization_config", "transformers_version")


def tensor_digest(tensors: list[Tensor]) -> str:
    """Return a hex digest of the full contents of `tensors`."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()[:16]


def model_fingerprint(model: PreTrainedModel) -> str:
    """Return a hex digest of the config and of every parameter's name and full contents; about a second a gigabyte."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in BOOKKEEPING}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(_bytes(parameter))
    return digest.hexdigest()[:16]


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
