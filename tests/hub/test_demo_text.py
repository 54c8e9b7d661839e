"""The demo's text: found where it is, sampled from the model where it is not."""

import random

import torch

from hf_ext.hub.demo_text import CALIBRATION_ROWS, ROW_TOKENS, demo_text, sample_text
from tests.numerics import assert_matches


def test_sampled_text_is_seeded_and_leaves_the_global_generator_alone(tiny_llama):
    state = torch.random.get_rng_state()
    rows = sample_text(tiny_llama, num_samples=3, sequence_length=20, seed=1)
    assert_matches(torch.random.get_rng_state(), state, "exact")
    assert rows.shape == (3, 20)
    assert_matches(sample_text(tiny_llama, num_samples=3, sequence_length=20, seed=1), rows, "exact")
    assert not torch.equal(sample_text(tiny_llama, num_samples=3, sequence_length=20, seed=2), rows)


def test_sampled_text_follows_the_model(tiny_llama):
    """The model finds what it wrote likelier than what it did not."""
    own = sample_text(tiny_llama, num_samples=8, sequence_length=40)
    foreign = torch.randint(tiny_llama.config.vocab_size, own.shape)
    with torch.no_grad():
        losses = [tiny_llama(input_ids=rows, labels=rows).loss for rows in (own, foreign)]
    assert losses[0] < losses[1]


def test_without_data_and_hub_the_model_writes_it(tiny_model, tiny_tokenizer, monkeypatch):
    monkeypatch.delenv("HF_EXT_DATA", raising=False)
    monkeypatch.setattr("hf_ext.hub.demo_text.ROW_TOKENS", 16)
    text = demo_text(tiny_model("llama"), tiny_tokenizer)
    assert text.calibration.shape == (CALIBRATION_ROWS, 16)
    assert "sampled" in text.source
    rows = {tuple(row.tolist()) for row in text.calibration}
    assert rows.isdisjoint(tuple(row.tolist()) for row in text.held_out.view(-1, 16))


def test_the_data_folder_comes_first(tiny_llama, tiny_tokenizer, tmp_path, monkeypatch):
    generator = random.Random(0)
    for name in ("wikitext-2-valid.txt", "wikitext-2-test.txt"):
        words = " ".join(f"w{generator.randrange(56)}" for _ in range(CALIBRATION_ROWS * ROW_TOKENS))
        (tmp_path / name).write_text(words)
    monkeypatch.setenv("HF_EXT_DATA", str(tmp_path))
    text = demo_text(tiny_llama, tiny_tokenizer)
    first = (tmp_path / "wikitext-2-valid.txt").read_text().split()[:5]
    assert tiny_tokenizer.convert_ids_to_tokens(text.calibration[0, :5]) == first
    assert text.source == "WikiText-2"
