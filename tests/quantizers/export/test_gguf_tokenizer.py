"""The vocabulary in a GGUF file gives the tokens of the tokenizer it was written from."""

import json
import re

import gguf
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from hf_ext.quantizers.export import export_gguf
from hf_ext.quantizers.export.gguf_tokenizer import SPLITS, read_vocabulary
from tests import tiny
from tests.quantizers.export.packed_models import SIZES, pack


CORPUS = ["the quick brown fox, it's 12 of 345: naïve café", "def f(x):\n    return x + 1\n", "the then there these"]
TEXTS = [*CORPUS, "<bos>user\nhi<end> <think>ok</think>", "漢字 🙂 a  b\t\tc\r\n", "THE 1234567", ""]
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def byte_level(split: str | None = None, digits: bool = False, ignore_merges: bool = False, adds_bos: bool = False):
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)]
    if split is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(split), "isolated"))
    if digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else steps[0]
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<bos>", "<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<end>", pad_token="<end>")
    fast.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    fast.chat_template = CHAT_TEMPLATE
    return with_bos(fast) if adds_bos else fast


def sentencepiece():
    """What the tokenizer of Llama 2 and Mistral is: pieces with a mark for a space, and bytes for the rest."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    specials = ["<unk>", "<bos>", "<end>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [word for text in CORPUS for word in text.split()]
    backend.train_from_iterator(words, trainers.BpeTrainer(vocab_size=320, special_tokens=specials))
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    backend = Tokenizer.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<end>", unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )
    return with_bos(fast)


def with_bos(fast):
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", fast.bos_token_id)]
    )
    return fast


TOKENIZERS = {
    "gpt-2": byte_level,
    "smollm": lambda: byte_level(digits=True),
    "qwen2": lambda: byte_level(GGUF_PRE_TOKENIZER_SPLITS["qwen2"]),
    "llama-bpe": lambda: byte_level(GGUF_PRE_TOKENIZER_SPLITS["llama-bpe"], ignore_merges=True, adds_bos=True),
    "tekken": lambda: byte_level(GGUF_PRE_TOKENIZER_SPLITS["tekken"], ignore_merges=True),
    "default": sentencepiece,
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


def written(tokenizer, path) -> dict:
    model = pack(tiny.llama(**SIZES, vocab_size=len(tokenizer) + 3, num_hidden_layers=1))
    export_gguf(model, path, tokenizer=tokenizer)
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def test_every_known_split_is_tested():
    assert {*SPLITS.values(), "default"} == set(TOKENIZERS)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_transformers_reads_the_same_tokenizer(name, path):
    tokenizer = TOKENIZERS[name]()
    found = written(tokenizer, path)
    assert found["tokenizer.ggml.pre"] == name
    assert found["tokenizer.ggml.add_bos_token"] == (name in ("llama-bpe", "default"))
    assert found["tokenizer.ggml.add_eos_token"] is False
    loaded = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for token in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "chat_template"):
        assert getattr(loaded, token) == getattr(tokenizer, token)
    for text in TEXTS:
        # What Transformers' reader does its own way: digits of "smollm", spaces after special tokens of SentencePiece.
        if not (name == "smollm" and re.search(r"\d", text)) and not (name == "default" and "<bos>" in text):
            assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"], text


def test_types_of_tokens(path):
    tokenizer = byte_level()
    types = written(tokenizer, path)["tokenizer.ggml.token_type"]
    kinds = {kind.name: [index for index, found in enumerate(types) if found == kind] for kind in gguf.TokenType}
    size = len(tokenizer)
    assert kinds["CONTROL"] == [tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert kinds["USER_DEFINED"] == [tokenizer.convert_tokens_to_ids("<think>")]
    assert kinds["UNUSED"] == [size, size + 1, size + 2]
    assert len(kinds["NORMAL"]) == size - 3


def test_sentencepiece_types_and_scores(path):
    tokenizer = sentencepiece()
    found = written(tokenizer, path)
    types, scores = found["tokenizer.ggml.token_type"], found["tokenizer.ggml.scores"]
    assert found["tokenizer.ggml.add_space_prefix"] is True
    assert types[tokenizer.unk_token_id] == gguf.TokenType.UNKNOWN
    assert types[tokenizer.convert_tokens_to_ids("<0x41>")] == gguf.TokenType.BYTE
    merged = ["".join(merge) for merge in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    by_rank = [scores[tokenizer.convert_tokens_to_ids(piece)] for piece in dict.fromkeys(merged)]
    assert by_rank == sorted(by_rank, reverse=True) and by_rank[0] == 0


@pytest.mark.parametrize(
    ("tokenizer", "vocab_size", "message"),
    [
        (tiny.tokenizer, 64, "is a WordLevel tokenizer"),
        (byte_level, 100, r"has \d+ tokens and the model 100"),
        (lambda: byte_level(r"\w+"), 400, "has no name in llama.cpp"),
        (lambda: byte_level(GGUF_PRE_TOKENIZER_SPLITS["qwen2"], ignore_merges=True), 400, "ignore_merges=True"),
    ],
    ids=["word-level", "too-large", "split", "merges"],
)
def test_what_llama_cpp_would_read_otherwise_is_refused(tokenizer, vocab_size, message):
    with pytest.raises(ValueError, match=message):
        read_vocabulary(tokenizer(), vocab_size)


def test_refused_tokenizer_writes_nothing(path):
    with pytest.raises(ValueError, match="Pass tokenizer=None"):
        export_gguf(pack(tiny.llama(**SIZES)), path, tokenizer=tiny.tokenizer())
    assert list(path.parent.iterdir()) == []
