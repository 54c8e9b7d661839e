"""Perturbed positions, and the attention of two views in one sequence.

"Shuffle the Context: RoPE-Perturbed Self-Distillation for Long-Context Adaptation"
(https://huggingface.co/papers/2604.14339). Of the paper only the abstract and secondary accounts were available: the
kind of perturbation, the direction of the divergence, its stop-gradient and its restriction to the suffix come from
those; the ranges of both draws are ours. Symbols: `s` split, `D` skip, `k` shift, `L` length of a document.
"""

import math
from dataclasses import dataclass

import torch


PERTURBATIONS = ("suffix_skip", "cyclic_shift", "chunk_permutation", "nope")
# These leave the tokens before the suffix as they are to each other, so that both views can share them.
WITH_SHARED_PREFIX = ("suffix_skip", "cyclic_shift")
NUM_CHUNKS = 8


@dataclass(frozen=True)
class Draw:
    """How the positions of one document are perturbed: tokens from `split` on, by `amount`.

    Args:
        split (`int`): index of the first token of the suffix.
        amount (`int`): skip of `"suffix_skip"`, shift of `"cyclic_shift"`, seed of `"chunk_permutation"`.
    """

    split: int
    amount: int


def draw(
    length: int,
    perturbation: str,
    generator: torch.Generator,
    *,
    min_split: float,
    max_split: float,
    max_skip_ratio: float,
    max_position: int | None,
) -> Draw:
    """Draw split and amount for a document: `s ~ U{ceil(min_split L) .. floor(max_split L)}`,
    `D ~ U{1 .. floor(max_skip_ratio L)}`, cut so that `L - 1 + D < max_position` (ours).

    A document too short for the range, or for a skip, comes out with the amount 0 and no suffix.

    Args:
        length (`int`): L.
        perturbation (`str`): one of `PERTURBATIONS`.
        generator (`torch.Generator`): on the CPU.
        min_split (`float`), max_split (`float`), max_skip_ratio (`float`), max_position (`int`, *optional*): see
            [`RopeDistillationConfig`].
    """
    low, high = max(1, math.ceil(min_split * length)), min(length - 1, math.floor(max_split * length))
    # Both numbers are drawn in any case, so that one setting changes nothing but its own effect.
    first, second = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
    if low > high:
        return Draw(length, 0)
    split = low + int(first * (high - low + 1))
    if perturbation == "suffix_skip":
        largest = math.floor(max_skip_ratio * length)
        if max_position is not None:
            largest = min(largest, max_position - length)
        return Draw(split, 1 + int(second * largest)) if largest > 0 else Draw(length, 0)
    if perturbation == "cyclic_shift":
        return Draw(split, length - split)
    return Draw(0, int(second * 2**31))


def suffix_skip_position_ids(position_ids: torch.Tensor, split: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    """`i` before `s`, `i + D` from there on: distances within prefix and suffix stay, between them they grow by `D`.

    Args:
        position_ids (`torch.Tensor`): `i`, counted from 0 in each document, any shape.
        split (`torch.Tensor`), skip (`torch.Tensor`): `s` and `D` of each token's document; broadcast to the shape.
    """
    return position_ids + skip * (position_ids >= split)


def cyclic_shift_position_ids(position_ids: torch.Tensor, shift: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """`(i + k) mod L`: nothing changes before the wrap at `L - k`, as a shift of all is none (the formula is ours).

    Args:
        position_ids (`torch.Tensor`): `i`, counted from 0 in each document, any shape.
        shift (`torch.Tensor`), length (`torch.Tensor`): `k` and `L` of each token's document; broadcast to the shape.
    """
    return (position_ids + shift) % length


def chunk_permutation_position_ids(length: int, seed: int) -> torch.Tensor:
    """Eight chunks of positions in another order: an ablation of the paper, which makes models worse. `[length]`."""
    order = torch.randperm(NUM_CHUNKS, generator=torch.Generator().manual_seed(seed)).tolist()
    chunks = torch.arange(length).tensor_split(NUM_CHUNKS)
    return torch.cat([chunks[index] for index in order])


def perturbed_position_ids(
    position_ids: torch.Tensor, documents: torch.Tensor, draws: list[Draw], perturbation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position ids of the perturbed view, and which tokens its predictions may differ on.

    Args:
        position_ids (`torch.Tensor`): `[batch, length]`, counted from 0 in each document.
        documents (`torch.Tensor`): `[batch, length]`, the index of each token's document, -1 at padding.
        draws (`list[Draw]`): of each document.
        perturbation (`str`): one of `PERTURBATIONS`.

    Returns:
        The ids and a boolean mask of the suffixes, `[batch, length]` both.
    """
    real = documents >= 0
    split, amount = (
        torch.tensor([*values, 0], device=position_ids.device)[documents]
        for values in zip(*((it.split, it.amount) for it in draws), strict=True)
    )
    suffix = real & (position_ids >= split)
    if perturbation == "suffix_skip":
        return suffix_skip_position_ids(position_ids, split, amount), suffix
    if perturbation == "cyclic_shift":
        lengths = torch.bincount(documents[real], minlength=len(draws))
        return cyclic_shift_position_ids(
            position_ids, amount, torch.cat([lengths, lengths.new_ones(1)])[documents]
        ), suffix
    if perturbation == "nope":
        return torch.zeros_like(position_ids), suffix
    perturbed = position_ids.clone()
    for index, it in enumerate(draws):
        own = documents == index
        perturbed[own] = chunk_permutation_position_ids(int(own.sum()), it.amount).to(position_ids.device)
    return perturbed, suffix


def attention_of_documents(documents: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Causal attention within each document, as `[batch, length, length]`, true where a query may look.

    Args:
        documents (`torch.Tensor`): `[batch, length]`, -1 at padding, which sees itself alone.
        order (`torch.Tensor`): `[batch, length]`, the place of each token in its document.
    """
    same = (documents[:, :, None] == documents[:, None, :]) & (documents[:, None, :] >= 0)
    return same & (order[:, None, :] <= order[:, :, None]) | _itself(documents)


def attention_of_shared_prefix(
    documents: torch.Tensor, order: torch.Tensor, suffix: torch.Tensor, copied: torch.Tensor
) -> torch.Tensor:
    """Attention of a sequence followed by copies of its suffixes: a copy sees its prefix and the copies before it,
    never the suffix that it repeats; the rest sees no copy (ours).

    Args:
        documents (`torch.Tensor`), order (`torch.Tensor`): as in [`attention_of_documents`], the copies' included.
        suffix (`torch.Tensor`): `[batch, length]`, whether a token is in the suffix of its document.
        copied (`torch.Tensor`): `[batch, length]`, whether a token is a copy.
    """
    visible = ~suffix | copied
    of_query, of_key = copied[:, :, None], copied[:, None, :]
    allowed = (of_query == of_key) | (of_query & visible[:, None, :])
    return attention_of_documents(documents, order) & allowed | _itself(documents)


def _itself(documents: torch.Tensor) -> torch.Tensor:
    return torch.eye(documents.shape[1], dtype=torch.bool, device=documents.device)


def documents_of(
    shape: tuple[int, int],
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions counted from 0 in each document, and the index of each token's document.

    A document is a row, without its padding, or in a padding-free batch what `position_ids` count from 0.

    Args:
        shape (`tuple[int, int]`): batch and length.
        position_ids (`torch.Tensor`, *optional*): `[batch, length]`, of a padding-free batch.
        attention_mask (`torch.Tensor`, *optional*): `[batch, length]`.
        device (`torch.device`): where the result goes without either.

    Returns:
        Both `[batch, length]`; the index is -1 at padding.
    """
    if position_ids is not None and attention_mask is None:
        starts = position_ids == 0
        starts[:, 0] = True
        return position_ids, (starts.flatten().cumsum(0) - 1).view(shape)
    real = torch.ones(shape, dtype=torch.bool, device=device) if attention_mask is None else attention_mask.bool()
    rows = torch.arange(shape[0], device=real.device)[:, None].expand(shape)
    return (real.long().cumsum(1) - 1).clamp(min=0), rows.where(real, -1)
