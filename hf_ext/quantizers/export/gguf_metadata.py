"""What a GGUF file says of a model besides its weights: the architecture and its sizes, under llama.cpp's names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ...core.errors import closest


if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp computes a model type.

    Args:
        name (`str`): the architecture in the file.
        rotates_neighbours (`bool`): the rotation pairs columns 2 i and 2 i + 1 of a head, where Transformers pairs i
            and i + head_dim / 2: the rows of the query and key projections are reordered for it.
        reads_rope_factors (`bool`): a tensor of divisors of the rotation's frequencies is read.
        attention_biases (`bool`): biases of the attention projections are read.
    """

    name: str
    rotates_neighbours: bool
    reads_rope_factors: bool
    attention_biases: bool


LLAMA = Architecture("llama", rotates_neighbours=True, reads_rope_factors=True, attention_biases=True)
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen3": Architecture("qwen3", rotates_neighbours=False, reads_rope_factors=False, attention_biases=False),
}
# Those that only divide each frequency by a constant.
ROPE_TYPES_WITH_FACTORS = ("linear", "llama3")


def find_architecture(config: PreTrainedConfig) -> Architecture:
    """Return how llama.cpp computes the model of `config`.

    Raises:
        ValueError: if it computes another function than Transformers, or is not known to compute the same.
    """
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ValueError(
            f"model_type {config.model_type!r} cannot be written as GGUF.{closest(config.model_type, ARCHITECTURES)} "
            "For GPU servers, export_gptq takes any decoder."
        )
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act={config.hidden_act!r}: llama.cpp computes {architecture.name!r} with 'silu'.")
    if getattr(config, "attention_bias", False) and not architecture.attention_biases:
        raise ValueError(f"attention_bias=True: llama.cpp reads no attention biases for {architecture.name!r}.")
    rope_type = config.rope_parameters["rope_type"]
    allowed = ("default", *(ROPE_TYPES_WITH_FACTORS if architecture.reads_rope_factors else ()))
    if rope_type not in allowed or config.rope_parameters.get("partial_rotary_factor", 1) != 1:
        raise ValueError(
            f"rope_parameters={config.rope_parameters}: for {architecture.name!r} the rotations {', '.join(allowed)} "
            "of whole heads can be written."
        )
    return architecture


def head_dim(config: PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rope_factors(config: PreTrainedConfig) -> Tensor | None:
    """Return the fp32 divisors `[head_dim / 2]` of the rotation's frequencies, or `None` where all are 1."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return None
    exponents = torch.arange(0, head_dim(config), 2, dtype=torch.float32) / head_dim(config)
    frequencies, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return rope["rope_theta"] ** -exponents / frequencies


def add_metadata(writer: GGUFWriter, model: PreTrainedModel, file_type: int) -> None:
    """Write everything but the vocabulary.

    The context length ends where a sliding window would begin to matter: llama.cpp attends to everything.
    """
    import gguf

    config = model.config
    window = getattr(config, "sliding_window", None)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(Path(model.name_or_path).name or type(model).__name__)
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(min(config.max_position_embeddings, window or config.max_position_embeddings))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim(config))
    writer.add_value_length(head_dim(config))
    writer.add_rope_dimension_count(head_dim(config))
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def row_order(rows: int, heads: int) -> Tensor:
    """Return the rows of a query or key projection of `heads` heads in the order of a rotation of neighbours."""
    return torch.arange(rows).view(heads, 2, -1).transpose(1, 2).flatten()
