"""Perplexity of a causal language model on a text, in windows, as papers on quantization report it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


CHUNK_TOKENS = 256  # rows of the logits that are float32 at one time


def perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    text: str | Tensor,
    *,
    sequence_length: int = 1024,
    max_windows: int | None = None,
    batch_size: int = 1,
) -> float:
    """Return the perplexity of `model` on `text`, which is tokenized once and cut into windows that do not overlap.

    In each window every token but the first is predicted from the window's tokens before it. The last window may be
    shorter. The mean is taken over tokens, not over windows, so it does not depend on `batch_size`.

    Args:
        model: a causal language model, quantized or not, in any dtype and on any devices. Its mode (train or eval) is
            restored.
        tokenizer: the model's tokenizer, or `None` where `text` holds tokens.
        text: one text, or token ids `[tokens]` or `[1, tokens]`.
        sequence_length (`int`, defaults to 1024): tokens in a window. Papers take 2048; compare only equal values.
        max_windows (`int`, *optional*): windows taken from the start of the text; all by default.
        batch_size (`int`, defaults to 1): windows in one forward.

    Returns:
        `float`: `exp` of the mean negative log-likelihood of a predicted token.

    Raises:
        ValueError: for an empty text, tokens outside the vocabulary, windows longer than the model's positions, or a
            window whose likelihood is not finite.
    """
    _check_options(model, sequence_length, max_windows, batch_size)
    input_ids = _token_ids(model, tokenizer, text)
    if max_windows is not None:
        input_ids = input_ids[: max_windows * sequence_length]
    batches = _batches(input_ids, sequence_length, batch_size)

    was_training = model.training
    model.eval()
    total, predicted, window = 0.0, 0, 0
    try:
        # The bar appears only where the whole takes longer than five seconds.
        with tqdm(total=sum(map(len, batches)), desc="perplexity", unit="window", delay=5) as progress:
            for batch in batches:
                window_nll = _window_nll(model, batch)
                _check_finite(window_nll, window, batch.shape[1])
                total += window_nll.sum().item()
                predicted += batch.shape[0] * (batch.shape[1] - 1)
                window += len(batch)
                progress.update(len(batch))
    finally:
        model.train(was_training)
    return torch.tensor(total / predicted, dtype=torch.float64).exp().item()


@torch.no_grad()
def _window_nll(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Return the negative log-likelihood of each window of `input_ids` `[batch, length]`, float64 `[batch]`."""
    logits = model(input_ids=input_ids.to(model.device), use_cache=False).logits[:, :-1]
    labels = input_ids[:, 1:].to(logits.device)
    total = torch.zeros(len(input_ids), dtype=torch.float64)
    for start in range(0, labels.shape[1], CHUNK_TOKENS):
        chunk = slice(start, start + CHUNK_TOKENS)
        token_nll = F.cross_entropy(logits[:, chunk].float().transpose(1, 2), labels[:, chunk], reduction="none")
        total += token_nll.double().sum(dim=1).cpu()
    return total


def _batches(input_ids: Tensor, sequence_length: int, batch_size: int) -> list[Tensor]:
    """Cut `[tokens]` into batches `[<= batch_size, sequence_length]` and one of the shorter last window."""
    full = len(input_ids) // sequence_length
    batches = list(input_ids[: full * sequence_length].view(full, sequence_length).split(batch_size)) if full else []
    rest = input_ids[full * sequence_length :]
    if len(rest) > 1:  # a lone token has nothing to predict it from
        batches.append(rest[None])
    return batches


def _token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, text: str | Tensor) -> Tensor:
    """Return the token ids of `text`, `[tokens]` on the CPU, checked against the vocabulary of `model`."""
    if isinstance(text, str):
        if tokenizer is None:
            raise ValueError("perplexity of a str takes a tokenizer; without one, pass a tensor of token ids.")
        if not text.strip():
            raise ValueError("The text is empty; perplexity takes at least two tokens.")
        text = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    elif not isinstance(text, Tensor) or text.is_floating_point():
        kind = text.dtype if isinstance(text, Tensor) else type(text).__name__
        raise ValueError(f"text is {kind}; perplexity takes one str or an integer tensor of token ids.")
    if text.dim() == 2 and text.shape[0] == 1:
        text = text[0]
    if text.dim() != 1 or len(text) < 2:
        raise ValueError(f"Token ids of shape {list(text.shape)}; perplexity takes at least two tokens in one row.")
    vocab_size = model.get_input_embeddings().num_embeddings
    if text.max() >= vocab_size or text.min() < 0:
        raise ValueError(
            f"Token ids from {text.min().item()} to {text.max().item()}, and the model has {vocab_size} embeddings; "
            "use the model's own tokenizer."
        )
    return text.long().cpu()


def _check_options(model: PreTrainedModel, sequence_length: int, max_windows: int | None, batch_size: int) -> None:
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if sequence_length < 2 or (limit and sequence_length > limit):
        allowed = f"from 2 to {limit} (the model's max_position_embeddings)" if limit else "at least 2"
        raise ValueError(f"sequence_length={sequence_length}; allowed is {allowed}.")
    for name, value in (("max_windows", max_windows), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value}; allowed is at least 1.")


def _check_finite(window_nll: Tensor, first_window: int, length: int) -> None:
    for offset, value in enumerate(window_nll.tolist()):
        if not math.isfinite(value):
            raise ValueError(
                f"Window {first_window + offset} ({length} tokens) has a negative log-likelihood of {value}: the "
                "model's logits there are not finite. Load it with dtype=torch.float32 or torch.bfloat16 to tell an "
                "overflow of float16 from broken weights."
            )
