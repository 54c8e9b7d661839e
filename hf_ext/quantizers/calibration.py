"""Calibration data: from whatever a user has to rows of token ids without padding."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from ..core.errors import MissingExtraError, closest


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .base_config import LowBitConfig


FILE_LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
TEXT_SUFFIXES = (".txt", ".text", ".md")
MESSAGE_KEYS = ("messages", "conversations", "prompt")


def load_calibration(config: LowBitConfig, model: PreTrainedModel) -> list[Tensor]:
    """Return the calibration rows `config` asks for: 1-D `int64` tensors of 2 to `sequence_length` token ids.

    Plain texts are joined, with the tokenizer's end-of-text token between them, and cut into rows of
    `sequence_length`; chat messages and token rows stay a row each and are cut at `sequence_length`. Padding, told by
    an attention mask, is taken out here, before the model can see it. More rows than `num_samples` are thinned by a
    seeded draw. A row is never longer than the positions `model` has.

    Raises:
        ValueError: no data, no usable row, or token ids beyond the vocabulary. TypeError: data of an unknown kind.
        ImportError: a named set without the `quant` extra.
    """
    name = type(config).__name__
    vocab_size = model.get_input_embeddings().weight.shape[0]
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and positions < config.sequence_length:
        config = dataclasses.replace(config, sequence_length=positions)
    if config.dataset is None:
        raise ValueError(
            f"{name} needs calibration data to quantize: pass {name}(dataset=[...texts...], tokenizer=tokenizer), "
            'token tensors, a datasets.Dataset, a file, or a name such as "wikitext2".'
        )
    tokenizer = _load_tokenizer(config.tokenizer)
    rows = list(_rows(config.dataset, tokenizer, config))
    usable = [row[: config.sequence_length] for row in rows if row.numel() >= 2]
    if not usable:
        raise ValueError(
            f"{name}: the calibration data has no row of at least 2 tokens ({len(rows)} rows were empty or shorter). "
            "Pass real text; 128 rows of 2048 tokens are usual."
        )
    smallest, largest = min(int(row.min()) for row in usable), max(int(row.max()) for row in usable)
    if smallest < 0 or largest >= vocab_size:
        raise ValueError(
            f"{name}: the calibration data has token ids from {smallest} to {largest}, but the "
            f"model's vocabulary has {vocab_size} entries. Was it tokenized with another model's tokenizer?"
        )
    return _draw(usable, config.num_samples, config.seed)


def batches(rows: list[Tensor], batch_size: int) -> Iterator[Tensor]:
    """Yield `[rows, length]` batches of rows of one length, longest first, so that no batch needs padding."""
    for _, same_length in groupby(sorted(rows, key=len, reverse=True), key=len):
        yield from torch.stack(list(same_length)).split(batch_size)


def _draw(rows: list[Tensor], num_samples: int, seed: int) -> list[Tensor]:
    if len(rows) <= num_samples:
        return rows
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:num_samples]
    return [rows[i] for i in chosen.sort().values.tolist()]


def _load_tokenizer(tokenizer: Any) -> PreTrainedTokenizerBase | None:
    if isinstance(tokenizer, str):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(tokenizer)
    return tokenizer


def _rows(dataset: Any, tokenizer: PreTrainedTokenizerBase | None, config: LowBitConfig) -> Iterator[Tensor]:
    if isinstance(dataset, (str, os.PathLike)):
        dataset = _load_named(str(dataset), tokenizer, config)
    if isinstance(dataset, Tensor):
        dataset = [dataset]
    if isinstance(dataset, Mapping) and "input_ids" in dataset:
        dataset = [dataset]
    if not isinstance(dataset, Iterable) or isinstance(dataset, Mapping):
        raise TypeError(
            f"dataset is a {type(dataset).__name__}; allowed are a list of str, of chat message lists or of token "
            "rows, a token tensor, a datasets.Dataset, an iterable of batches, a file or a data set's name."
        )
    # Enough to choose from, however long the source is: a streamed data set never ends.
    wanted_rows, wanted_tokens = 4 * config.num_samples, 4 * config.num_samples * config.sequence_length
    texts: list[Tensor] = []
    found_rows = found_tokens = 0
    for item in dataset:
        kind, rows = _item_rows(item, tokenizer)
        if kind == "text":
            texts.extend(rows)
            found_tokens += sum(map(len, rows))
        else:
            found_rows += len(rows)
            yield from rows
        if found_rows >= wanted_rows or found_tokens >= wanted_tokens:
            break
    if texts:
        yield from _pack(texts, tokenizer, config.sequence_length)


def _pack(texts: list[Tensor], tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> Iterable[Tensor]:
    separator = torch.tensor([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id], dtype=torch.long)
    joined = torch.cat([part for text in texts if len(text) for part in (text, separator)] or [separator])
    if len(joined) < sequence_length:
        return [joined[: len(joined) - len(separator)]]
    return [row for row in joined.split(sequence_length) if len(row) == sequence_length]


def _item_rows(item: Any, tokenizer: PreTrainedTokenizerBase | None) -> tuple[str, list[Tensor]]:
    if isinstance(item, str):
        return "text", [_tokenize(item, tokenizer)]
    if isinstance(item, Tensor):
        return "tokens", _token_rows(item, None)
    if isinstance(item, Mapping):
        if "input_ids" in item:
            return "tokens", _token_rows(item["input_ids"], item.get("attention_mask"))
        if isinstance(item.get("text"), str):
            return "text", [_tokenize(item["text"], tokenizer)]
        for key in MESSAGE_KEYS:
            if isinstance(item.get(key), list):
                messages = item[key] + (item["completion"] if isinstance(item.get("completion"), list) else [])
                return "messages", [_tokenize_messages(messages, tokenizer)]
        raise TypeError(
            f"a calibration row has the fields {', '.join(map(str, item))}; expected input_ids, text or messages."
        )
    if isinstance(item, (list, tuple)):
        if not item:
            return "tokens", [torch.empty(0, dtype=torch.long)]
        if isinstance(item[0], Mapping):
            return "messages", [_tokenize_messages(list(item), tokenizer)]
        if isinstance(item[0], int):
            return "tokens", [torch.tensor(item, dtype=torch.long)]
    raise TypeError(
        f"a calibration row is a {type(item).__name__}; allowed are str, a list of chat messages, token ids, "
        "a tensor, or a dict with input_ids, text or messages."
    )


def _token_rows(input_ids: Any, attention_mask: Any) -> list[Tensor]:
    input_ids = torch.as_tensor(input_ids)
    if input_ids.is_floating_point():
        raise TypeError(f"calibration tokens have dtype {input_ids.dtype}; token ids are whole numbers.")
    input_ids = torch.atleast_2d(input_ids.long())
    if attention_mask is None:
        return list(input_ids)
    keep = torch.atleast_2d(torch.as_tensor(attention_mask).bool())
    return [row[mask] for row, mask in zip(input_ids, keep, strict=True)]


def _tokenize(text: str, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    if tokenizer is None:
        raise ValueError(
            "the calibration data is text, so a tokenizer is needed: pass tokenizer=... beside dataset=..."
        )
    if not text.strip():
        return torch.empty(0, dtype=torch.long)
    return torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)


def _tokenize_messages(messages: list[Mapping], tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the calibration data is chat messages, so a tokenizer with a chat template is needed: pass "
            "tokenizer=..., or set tokenizer.chat_template, or pass plain text."
        )
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    return torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.long)


def _load_named(name: str, tokenizer: PreTrainedTokenizerBase | None, config: LowBitConfig) -> Any:
    suffix = os.path.splitext(name)[1].lower()
    if os.path.isfile(name):
        if suffix in TEXT_SUFFIXES:
            with open(name, encoding="utf-8") as file:
                return [file.read()]
        if suffix not in FILE_LOADERS:
            raise ValueError(
                f"calibration file {name!r}: suffix {suffix!r} is unknown."
                f"{closest(suffix, [*TEXT_SUFFIXES, *FILE_LOADERS])}"
            )
        return _import_datasets().load_dataset(FILE_LOADERS[suffix], data_files=name, split="train")
    if suffix in (*TEXT_SUFFIXES, *FILE_LOADERS):
        raise FileNotFoundError(f"calibration file {name!r} does not exist.")
    if name in ("wikitext2", "c4", "c4-new"):
        return _load_from_optimum(name, tokenizer, config)
    return _import_datasets().load_dataset(name, split="train", streaming=True)


def _load_from_optimum(name: str, tokenizer: PreTrainedTokenizerBase | None, config: LowBitConfig) -> Any:
    _import_datasets()
    try:
        from optimum.gptq.data import get_dataset
    except ImportError as error:
        raise MissingExtraError("optimum", "quant", f"the calibration set {name!r}") from error
    if tokenizer is None:
        raise ValueError(f"the calibration set {name!r} is text, so a tokenizer is needed: pass tokenizer=...")
    states = random.getstate(), numpy.random.get_state(), torch.random.get_rng_state()
    try:  # it seeds the global generators
        return get_dataset(
            name, tokenizer, nsamples=config.num_samples, seqlen=config.sequence_length, seed=config.seed
        )
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.random.set_rng_state(states[2])


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "quant", "loading a calibration set") from error
    return datasets
