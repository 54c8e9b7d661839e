"""The vocabulary of a tokenizer as the metadata of a GGUF file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS


if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedTokenizerBase


# llama.cpp's names for how text is split before byte-level merges are applied, by what the tokenizer does: the steps
# before the bytes, and whether a word that is itself a token skips the merges.
SPLITS = {
    ((), False): "gpt-2",
    (("Digits",), False): "smollm",
    ((GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"],), True): "llama-bpe",
    ((GGUF_PRE_TOKENIZER_SPLITS["qwen2"],), False): "qwen2",
    ((GGUF_PRE_TOKENIZER_SPLITS["tekken"],), True): "tekken",
}
SPECIAL_TOKENS = ("bos", "eos", "unk", "pad")


@dataclass
class Vocabulary:
    """A vocabulary under GGUF's terms; `scores` only where llama.cpp merges by score (SentencePiece)."""

    kind: str
    split: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float] = field(default_factory=list)
    special_ids: dict[str, int] = field(default_factory=dict)
    adds: dict[str, bool] = field(default_factory=dict)
    chat_template: str | None = None


def read_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Vocabulary:
    """Return the vocabulary of `tokenizer`, with unused tokens up to `vocab_size`.

    Raises:
        ValueError: if it is not byte-pair encoding of a kind that llama.cpp is known to compute alike, or has more
            tokens than the model.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"model": {"type": "slow"}}
    model = state["model"]
    if model["type"] != "BPE":
        raise ValueError(
            f"{type(tokenizer).__name__} is a {model['type']} tokenizer; GGUF takes byte-pair encoding (BPE). "
            "Pass tokenizer=None to write the weights without a vocabulary."
        )
    if len(tokenizer) > vocab_size:
        raise ValueError(f"The tokenizer has {len(tokenizer)} tokens and the model {vocab_size}: not the model's own.")
    sentencepiece = model.get("byte_fallback", False)
    split = "default" if sentencepiece else _split_name(state["pre_tokenizer"], model.get("ignore_merges", False))
    tokens, types = _tokens(tokenizer, vocab_size, sentencepiece)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    vocabulary = Vocabulary("llama" if sentencepiece else "gpt2", split, tokens, types, merges)
    if sentencepiece:
        vocabulary.scores = _scores(tokens, merges)
        vocabulary.adds["space_prefix"] = _prepends_space(state)
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in SPECIAL_TOKENS}
    vocabulary.special_ids = {name: index for name, index in ids.items() if index is not None}
    around_nothing = tokenizer("")["input_ids"]
    vocabulary.adds["bos_token"] = ids["bos"] is not None and around_nothing[:1] == [ids["bos"]]
    vocabulary.adds["eos_token"] = ids["eos"] is not None and around_nothing[-1:] == [ids["eos"]]
    vocabulary.chat_template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
    return vocabulary


def add_vocabulary(writer: GGUFWriter, vocabulary: Vocabulary | None) -> None:
    """Write `vocabulary`; `None` says that the file has none, and llama.cpp then takes token ids only."""
    if vocabulary is None:
        writer.add_tokenizer_model("none")
        return
    writer.add_tokenizer_model(vocabulary.kind)
    writer.add_tokenizer_pre(vocabulary.split)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        writer.add_token_scores(vocabulary.scores)
    for name, index in vocabulary.special_ids.items():
        getattr(writer, f"add_{name}_token_id")(index)
    for name, value in vocabulary.adds.items():
        getattr(writer, f"add_add_{name}")(value)
    if vocabulary.chat_template is not None:
        writer.add_chat_template(vocabulary.chat_template)


def _tokens(tokenizer: PreTrainedTokenizerBase, vocab_size: int, sentencepiece: bool) -> tuple[list[str], list[int]]:
    """The text and GGUF's type of every id."""
    from gguf import TokenType

    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    for token, index in tokenizer.get_vocab().items():
        tokens[index] = token
        types[index] = TokenType.BYTE if sentencepiece and _is_byte(token) else TokenType.NORMAL
    for index, added in tokenizer.added_tokens_decoder.items():
        types[index] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    if sentencepiece and tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = TokenType.UNKNOWN
    return tokens, types


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """SentencePiece's scores of merged pieces: the earlier the merge, the higher."""
    rank: dict[str, int] = {}
    for index, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", ""), index)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _split_name(pre_tokenizer: dict[str, Any] | None, ignore_merges: bool) -> str:
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    before = tuple(_step_name(step) for step in steps[:-1])
    last = steps[-1] if steps else {"type": None}
    # A regular expression of its own comes in place of the one of ByteLevel.
    plain = last["type"] == "ByteLevel" and not last["add_prefix_space"]
    expected_regex = not any(step["type"] == "Split" for step in steps[:-1])
    name = SPLITS.get((before, ignore_merges)) if plain and last["use_regex"] == expected_regex else None
    if name is None:
        raise ValueError(
            f"How this tokenizer splits text ({json.dumps(pre_tokenizer)}, ignore_merges={ignore_merges}) has no name "
            f"in llama.cpp that is known here; known are {', '.join(SPLITS.values())}. Pass tokenizer=None to write "
            "the weights without a vocabulary."
        )
    return name


def _step_name(step: dict[str, Any]) -> str:
    if step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return step["pattern"].get("Regex", "")
    return step["type"] if step["type"] != "Digits" or step["individual_digits"] else "grouped Digits"


def _prepends_space(state: dict[str, Any]) -> bool:
    normalizer, pre_tokenizer = state["normalizer"] or {}, state["pre_tokenizer"] or {}
    steps = normalizer.get("normalizers", [normalizer])
    return any(step.get("type") == "Prepend" for step in steps) or (
        pre_tokenizer.get("type") == "Metaspace" and pre_tokenizer["prepend_scheme"] != "never"
    )
