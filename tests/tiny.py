"""Real model classes at toy size with seeded random weights, and a tokenizer for them; nothing is downloaded."""

from collections.abc import Callable

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast


VOCAB_SIZE, HIDDEN_SIZE, INTERMEDIATE_SIZE = 64, 32, 64
PAD, BOS, EOS, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
SPECIAL_TOKENS = [PAD, BOS, EOS, UNKNOWN, "<user>", "<assistant>", "<system>", "\n"]
WORDS = [f"w{index}" for index in range(VOCAB_SIZE - len(SPECIAL_TOKENS))]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<' + message['role'] + '> ' + message['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)

_COMMON = {"vocab_size": VOCAB_SIZE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LLAMA_LIKE = {
    **_COMMON,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


def build(model_type: str, seed: int = 0, **settings) -> PreTrainedModel:
    """A model of `model_type` in evaluation mode and fp32, its weights drawn from `seed`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(model_type, **settings)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def llama(**settings) -> PreTrainedModel:
    return build("llama", **{**_LLAMA_LIKE, **settings})


def qwen3(**settings) -> PreTrainedModel:
    """Tied word embeddings, and norms on queries and keys."""
    return build("qwen3", **{**_LLAMA_LIKE, "tie_word_embeddings": True, **settings})


def mistral(**settings) -> PreTrainedModel:
    """A sliding window of 8 positions."""
    return build("mistral", **{**_LLAMA_LIKE, "sliding_window": 8, **settings})


def gpt2(**settings) -> PreTrainedModel:
    """`Conv1D` layers, whose weights lie transposed, and tied word embeddings."""
    shape = {"n_embd": HIDDEN_SIZE, "n_inner": INTERMEDIATE_SIZE, "n_layer": 2, "n_head": 4, "n_positions": 128}
    return build("gpt2", **{**_COMMON, **shape, "initializer_range": 0.2, **settings})


def opt(**settings) -> PreTrainedModel:
    """Biases, ReLU, learned positions, and tied word embeddings."""
    shape = {
        "hidden_size": HIDDEN_SIZE,
        "word_embed_proj_dim": HIDDEN_SIZE,
        "ffn_dim": INTERMEDIATE_SIZE,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "init_std": 0.2,
    }
    return build("opt", **{**_COMMON, **shape, **settings})


def gpt_neox(**settings) -> PreTrainedModel:
    """Queries, keys and values in one fused linear, and a parallel residual."""
    shape = {name: value for name, value in _LLAMA_LIKE.items() if name not in ("num_key_value_heads", "head_dim")}
    return build("gpt_neox", **{**shape, **settings})


def mixtral(**settings) -> PreTrainedModel:
    """Four experts, two for each token."""
    return build("mixtral", **{**_LLAMA_LIKE, "num_local_experts": 4, "num_experts_per_tok": 2, **settings})


def qwen3_moe(**settings) -> PreTrainedModel:
    """A dense block, then a block of four experts, two for each token."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]}
    return build("qwen3_moe", **{**_LLAMA_LIKE, **experts, **settings})


MODELS: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": llama,
    "qwen3": qwen3,
    "mistral": mistral,
    "gpt2": gpt2,
    "opt": opt,
    "gpt_neox": gpt_neox,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: `w0` to `w55`, special tokens, and a chat template. Padding is on the left."""
    vocabulary = {word: index for index, word in enumerate(SPECIAL_TOKENS + WORDS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=128,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
