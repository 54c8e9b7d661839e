"""Positions, draws and masks of both views, by the numbers of the oracles."""

import pytest
import torch

from hf_ext.trainers.rope_distillation.functional import (
    PERTURBATIONS,
    Draw,
    attention_of_documents,
    attention_of_shared_prefix,
    cyclic_shift_position_ids,
    documents_of,
    draw,
    perturbed_position_ids,
    suffix_skip_position_ids,
)


RANGES = {"min_split": 0.1, "max_split": 0.9, "max_skip_ratio": 0.5, "max_position": None}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_oracle_6_positions_by_hand():
    ids = torch.arange(6)[None]
    skipped = suffix_skip_position_ids(ids, torch.tensor(2), torch.tensor(3))
    assert skipped.tolist() == [[0, 1, 5, 6, 7, 8]]
    assert skipped.diff().tolist() == [[1, 4, 1, 1, 1]]
    shifted = cyclic_shift_position_ids(ids, torch.tensor(2), torch.tensor(6))
    assert shifted.tolist() == [[2, 3, 4, 5, 0, 1]]


def test_each_document_of_a_row_is_perturbed_by_itself():
    ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    positions, documents = documents_of((1, 9), ids, None, ids.device)
    assert documents.tolist() == [[0, 0, 0, 0, 1, 1, 1, 2, 2]]
    draws = [Draw(1, 10), Draw(2, 20), Draw(2, 0)]
    perturbed, suffix = perturbed_position_ids(positions, documents, draws, "suffix_skip")
    assert perturbed.tolist() == [[0, 11, 12, 13, 0, 1, 22, 0, 1]]
    assert suffix.int().tolist() == [[0, 1, 1, 1, 0, 0, 1, 0, 0]]
    draws = [Draw(1, 3), Draw(2, 1), Draw(2, 0)]
    perturbed, suffix = perturbed_position_ids(positions, documents, draws, "cyclic_shift")
    assert perturbed.tolist() == [[3, 0, 1, 2, 1, 2, 0, 0, 1]]
    assert suffix.int().tolist() == [[0, 1, 1, 1, 0, 0, 1, 0, 0]]


def test_padding_is_of_no_document():
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    positions, documents = documents_of((2, 4), None, mask, mask.device)
    assert documents.tolist() == [[0, 0, 0, -1], [-1, 1, 1, 1]]
    assert positions.tolist() == [[0, 1, 2, 2], [0, 0, 1, 2]]
    perturbed, suffix = perturbed_position_ids(positions, documents, [Draw(1, 5), Draw(2, 7)], "suffix_skip")
    assert perturbed[documents >= 0].tolist() == [0, 6, 7, 0, 1, 9]
    assert not suffix[documents < 0].any()


def test_ablations():
    ids = torch.arange(16)[None]
    documents = torch.zeros_like(ids)
    none, everywhere = perturbed_position_ids(ids, documents, [Draw(0, 5)], "nope")
    assert (none == 0).all() and everywhere.all()
    chunks, everywhere = perturbed_position_ids(ids, documents, [Draw(0, 5)], "chunk_permutation")
    assert sorted(chunks[0].tolist()) == list(range(16)) and not torch.equal(chunks, ids) and everywhere.all()
    assert (chunks.view(8, 2).diff() == 1).all()


@pytest.mark.parametrize("length", [2, 3, 10, 100])
def test_draws_stay_in_their_ranges_and_reach_their_ends(length):
    found = [draw(length, "suffix_skip", generator(seed), **RANGES) for seed in range(600)]
    splits, skips = zip(*((it.split, it.amount) for it in found), strict=True)
    low, high = max(1, -(-length // 10)), min(length - 1, int(0.9 * length))
    assert min(splits) == low and max(splits) == high
    assert min(skips) == 1 and length // 2 - length // 50 <= max(skips) <= length // 2
    cyclic = draw(length, "cyclic_shift", generator(), **RANGES)
    assert cyclic.amount == length - cyclic.split


def test_draws_are_even():
    found = [draw(12, "suffix_skip", generator(seed), **RANGES) for seed in range(6000)]
    for values, options in (([it.split for it in found], range(2, 11)), ([it.amount for it in found], range(1, 7))):
        counts = torch.bincount(torch.tensor(values), minlength=max(options) + 1)[min(options) :].double()
        expected = len(found) / len(options)
        # chi-square, 8 degrees of freedom or fewer: 26.1 is its 99.9 % point
        assert ((counts - expected) ** 2 / expected).sum() < 26.1


def test_oracle_10_no_position_reaches_the_cap():
    for seed in range(200):
        capped = draw(10, "suffix_skip", generator(seed), **{**RANGES, "max_skip_ratio": 5.0, "max_position": 14})
        assert 9 + capped.amount < 14 and capped.amount >= 1
    for cap in (10, 7):
        assert draw(10, "suffix_skip", generator(), **{**RANGES, "max_position": cap}) == Draw(10, 0)


@pytest.mark.parametrize("perturbation", PERTURBATIONS)
def test_oracle_9_the_same_seed_draws_the_same(perturbation):
    assert draw(50, perturbation, generator(3), **RANGES) == draw(50, perturbation, generator(3), **RANGES)
    assert draw(1, perturbation, generator(), **RANGES) == Draw(1, 0)


def test_attention_of_documents_by_hand():
    documents, order = torch.tensor([[0, 0, 1, -1]]), torch.tensor([[0, 1, 0, 0]])
    assert attention_of_documents(documents, order)[0].int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 0, 1],
    ]


def test_attention_of_a_shared_prefix_by_hand():
    """Two tokens, of which the second is copied, and a document of its own, of which both are."""
    documents = torch.tensor([[0, 0, 1, 1, 0, 1, 1]])
    order = torch.tensor([[0, 1, 0, 1, 1, 0, 1]])
    suffix = torch.tensor([[0, 1, 1, 1, 1, 1, 1]]).bool()
    copied = torch.tensor([[0, 0, 0, 0, 1, 1, 1]]).bool()
    assert attention_of_shared_prefix(documents, order, suffix, copied)[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [1, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]
