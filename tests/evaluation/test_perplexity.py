"""Perplexity against the definition, and what it refuses."""

import math

import pytest
import torch

from hf_ext.evaluation.perplexity import CHUNK_TOKENS, perplexity
from tests import tiny
from tests.numerics import assert_matches


def by_definition(model, input_ids, sequence_length):
    """Sum the negative log-likelihood token by token."""
    total, count = 0.0, 0
    for start in range(0, len(input_ids), sequence_length):
        window = input_ids[start : start + sequence_length]
        with torch.no_grad():
            log_probs = model(input_ids=window[None]).logits[0].double().log_softmax(-1)
        for position in range(len(window) - 1):
            total -= log_probs[position, window[position + 1]].item()
            count += 1
    return math.exp(total / count)


def assert_equal(actual, expected):
    assert_matches(torch.tensor(actual), torch.tensor(expected), "fp32")


@pytest.fixture
def tokens():
    return torch.randint(4, 64, (75,))


@pytest.mark.parametrize("sequence_length", [2, 16, 37, 75, 100])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_equals_the_definition(tiny_llama, tokens, sequence_length, batch_size):
    actual = perplexity(tiny_llama, None, tokens, sequence_length=sequence_length, batch_size=batch_size)
    assert_equal(actual, by_definition(tiny_llama, tokens, sequence_length))


def test_logits_are_taken_in_chunks_without_a_seam():
    model = tiny.llama(max_position_embeddings=1024)
    tokens = torch.randint(4, 64, (2 * CHUNK_TOKENS + 90,))
    assert_equal(perplexity(model, None, tokens, sequence_length=1024), by_definition(model, tokens, 1024))


def test_lone_last_token_is_left_out(tiny_llama, tokens):
    whole = perplexity(tiny_llama, None, tokens[:33], sequence_length=16)
    assert whole == perplexity(tiny_llama, None, tokens[:32], sequence_length=16)


def test_max_windows_takes_the_first(tiny_llama, tokens):
    first = perplexity(tiny_llama, None, tokens, sequence_length=16, max_windows=2)
    assert first == perplexity(tiny_llama, None, tokens[:32], sequence_length=16)


def test_uniform_model_has_the_perplexity_of_its_vocabulary(tiny_llama, tokens):
    torch.nn.init.zeros_(tiny_llama.lm_head.weight)
    assert_equal(perplexity(tiny_llama, None, tokens, sequence_length=32), 64.0)


def test_text_equals_its_tokens(tiny_llama, tiny_tokenizer, tokens):
    text = " ".join(tiny_tokenizer.convert_ids_to_tokens(tokens[tokens > 7]))
    input_ids = tiny_tokenizer(text, return_tensors="pt")["input_ids"]
    expected = perplexity(tiny_llama, None, input_ids, sequence_length=16)
    assert perplexity(tiny_llama, tiny_tokenizer, text, sequence_length=16) == expected


def test_mode_is_restored_and_no_gradient_is_left(tiny_llama, tokens):
    tiny_llama.train()
    perplexity(tiny_llama, None, tokens, sequence_length=16)
    assert tiny_llama.training
    tiny_llama(input_ids=tokens[None, :16], labels=tokens[None, :16]).loss.backward()
    assert all(parameter.grad is not None for parameter in tiny_llama.parameters())


def test_low_precision_is_summed_in_float32(tiny_llama, tokens):
    expected = perplexity(tiny_llama, None, tokens, sequence_length=16)
    actual = perplexity(tiny_llama.to(torch.bfloat16), None, tokens, sequence_length=16)
    assert_equal(actual, by_definition(tiny_llama, tokens, 16))
    assert actual != expected


@pytest.mark.parametrize("family", ["gpt2", "opt", "mixtral", "qwen3"])
def test_other_architectures(tiny_model, tokens, family):
    model = tiny_model(family)
    assert_equal(perplexity(model, None, tokens, sequence_length=16), by_definition(model, tokens, 16))


def test_window_without_finite_likelihood_is_named(tiny_llama, tokens):
    tokens[:32], tokens[32:] = 9, 10
    with torch.no_grad():
        tiny_llama.model.embed_tokens.weight[10] = float("nan")
    with pytest.raises(ValueError, match=r"Window 2 \(16 tokens\).*nan"):
        perplexity(tiny_llama, None, tokens, sequence_length=16, batch_size=2)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "empty"),
        (" \n", {}, "empty"),
        ("w1", {}, "at least two tokens"),
        (torch.tensor([5]), {}, "at least two tokens"),
        (torch.zeros(2, 8, dtype=torch.long), {}, r"shape \[2, 8\]"),
        (torch.zeros(8), {}, "integer tensor"),
        (["w1 w2"], {}, "text is list"),
        (torch.tensor([5, 64]), {}, "64 embeddings"),
        ("w1 w2", {"sequence_length": 129}, "128"),
        ("w1 w2", {"sequence_length": 1}, "sequence_length=1"),
        ("w1 w2", {"max_windows": 0}, "max_windows=0"),
        ("w1 w2", {"batch_size": 0}, "batch_size=0"),
    ],
)
def test_refuses(tiny_llama, tiny_tokenizer, text, options, message):
    with pytest.raises(ValueError, match=message):
        perplexity(tiny_llama, tiny_tokenizer, text, **{"sequence_length": 16, **options})


def test_text_without_tokenizer_is_refused(tiny_llama):
    with pytest.raises(ValueError, match="takes a tokenizer"):
        perplexity(tiny_llama, None, "w1 w2", sequence_length=16)
