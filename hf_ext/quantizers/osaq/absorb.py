"""OSAQ in front of any other quantizer: the model stays float, its outliers are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import run_on_float_model
from ..report import QuantizationReport
from .config import OSAQConfig
from .method import OSAQMethod


if TYPE_CHECKING:
    from transformers import PreTrainedModel


def absorb_outliers(model: PreTrainedModel, config: OSAQConfig) -> QuantizationReport:
    """Absorb the outliers of every decoder linear in place: `model` stays a plain float model of its class.

    Save it and quantize it with any method (`GPTQConfig`, `HqqConfig`, `TorchAoConfig`, ...), whose min-max grids then
    start from a narrower range. The model's outputs hardly change: each linear moves only along directions that hold
    at most a share `gamma` of its inputs' energy. Statistics come from the unchanged model, as in the paper
    (https://huggingface.co/papers/2605.04738).

    Args:
        model ([`~transformers.PreTrainedModel`]): a decoder-only model with float weights.
        config ([`OSAQConfig`]): needs `dataset` and, for text, `tokenizer`. Of `bits` and `rounding` nothing is used;
            `group_size` counts only with `scope="group"`.

    Returns:
        [`QuantizationReport`]: for every linear the null rank, the ratio of ranges and the drift.

    Raises:
        ValueError: what cannot be done is refused before any weight changes.

    Example:

    ```python
    report = absorb_outliers(model, OSAQConfig(dataset=texts, tokenizer=tokenizer))
    model.save_pretrained("smollm2-absorbed")
    AutoModelForCausalLM.from_pretrained("smollm2-absorbed", quantization_config=HqqConfig(nbits=3, group_size=64))
    ```
    """
    return run_on_float_model(model, config, OSAQMethod(config, packs=False))
