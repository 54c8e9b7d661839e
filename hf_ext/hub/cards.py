"""The model card that a quantized checkpoint carries."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard, ModelCardData


if TYPE_CHECKING:
    from ..quantizers.base_config import LowBitConfig


@dataclass(frozen=True)
class QuantizedSizes:
    """Bytes of the float weights and of the checkpoint's weights on disk."""

    float_bytes: int
    quantized_bytes: int


def quantized_card(
    name: str, source: str, base_model: str | None, config: LowBitConfig, sizes: QuantizedSizes, summary: str
) -> ModelCard:
    """Return the card of a quantized checkpoint.

    Args:
        name: the checkpoint's name.
        source: what was quantized, as the user named it: a Hub id or a folder.
        base_model: its id on the Hub, if it has one; goes into the metadata with the licence of its own card.
        config: the stored quantization config.
        sizes: weights before and after.
        summary: one line on the run.
    """
    data = ModelCardData(
        base_model=base_model,
        base_model_relation="quantized" if base_model else None,
        license=_licence(source),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["hf_ext", config.quant_method, config.weight_label()],
    )
    hidden = ("quant_method", "format_version", "library")
    options = "\n".join(f"| `{key}` | {value} |" for key, value in config.to_dict().items() if key not in hidden)
    warning = f"\n**{config.warning}**\n" if config.warning else ""
    base = f"[{base_model}](https://huggingface.co/{base_model})" if base_model else f"`{Path(source).name}`"
    return ModelCard(
        f"""---
{data.to_yaml()}
---

# {name}

{base} with its decoder linears {config.weight_label()}, quantized by the method `{config.quant_method}` of hf_ext.
Weights: {_megabytes(sizes.quantized_bytes)}, {_megabytes(sizes.float_bytes)} before.
{warning}
```python
import hf_ext  # teaches Transformers to load the checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

| option | value |
|---|---|
{options}

{summary}. What was done to each layer is in `quantization_report.json`.
"""
    )


def _licence(source: str) -> str | None:
    """Return the licence that the card of `source`, a folder or a Hub id, names."""
    try:
        card = ModelCard.load(Path(source) / "README.md" if Path(source).is_dir() else source)
    except Exception:  # no card, a broken one, or no network: the licence is left to the owner of the model
        return None
    return card.data.license


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
