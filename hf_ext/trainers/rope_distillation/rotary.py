"""Which positions and attentions can be perturbed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from transformers import PretrainedConfig


LENGTH_DEPENDENT = ("dynamic", "longrope")


def check_positions(config: PretrainedConfig) -> None:
    """Refuse a model whose positions are not rotary, or of which one changes the others.

    Raises:
        ValueError: learned or no positions, dynamic or longrope scaling, or several positions for one token.
    """
    text_config = config.get_text_config(decoder=True)
    name = text_config.model_type
    parameters = getattr(text_config, "rope_parameters", None)
    if getattr(config, "is_encoder_decoder", False) or not parameters:
        raise ValueError(
            f"{name} is no decoder-only model with rotary positions (its config has no rope_parameters): there are no "
            "angles to perturb. Take a model such as Llama, Qwen3 or Mistral, or use SFTTrainer."
        )
    for rotary in _by_layer_type(parameters):
        kind = rotary.get("rope_type", "default")
        if kind in LENGTH_DEPENDENT:
            raise ValueError(
                f"rope_type={kind!r} in {name} takes its frequencies from the largest position of a batch, so that "
                "the perturbed view would change the standard one. Use a model with default, linear, yarn or llama3 "
                "scaling."
            )
        if "mrope_section" in rotary:
            raise ValueError(
                f"{name} has several positions for a token (mrope_section), which are not perturbed here."
            )


def check_attention(config: PretrainedConfig, packed: bool, view_mode: str) -> None:
    """Refuse an attention that cannot be told what each token may look at.

    Args:
        config ([`~transformers.PretrainedConfig`]): of the model.
        packed (`bool`): whether several documents share a row.
        view_mode (`str`): `"concat"` or `"shared_prefix"`.

    Raises:
        ValueError: says which attention would do.
    """
    attention = config._attn_implementation
    wanted = f"psd_view_mode={view_mode!r}" + (" with several documents in a row" if packed else "")
    if view_mode == "concat" and (not packed or "flash" in attention):
        return
    if attention not in ("sdpa", "eager"):
        raise ValueError(
            f"{wanted} needs a mask of its own, which attn_implementation={attention!r} does not take; use 'sdpa' or "
            "'eager', or 'concat' with padded rows or flash attention."
        )
    text_config = config.get_text_config(decoder=True)
    kinds = set(getattr(text_config, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(text_config, "sliding_window", None)
    if window and getattr(text_config, "use_sliding_window", True) and not getattr(text_config, "layer_types", None):
        kinds.add("sliding_attention")
    if kinds:
        raise ValueError(
            f"{wanted} needs a mask of its own, which would replace that of {', '.join(sorted(kinds))} layers in "
            f"{text_config.model_type}; use 'concat' with padded rows."
        )


def _by_layer_type(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    nested = [it for it in parameters.values() if isinstance(it, dict)]
    return nested or [parameters]
