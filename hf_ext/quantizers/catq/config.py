"""The options of CAT-Q."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

from ..base_config import GroupedConfig, quantization_config


# What `None` means under each preset.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "num_samples": 512,
        "sequence_length": 2048,
        "batch_size": 3,
        "epochs": 60,
        "num_layers": 4,
        "stride": 2,
        "fill": 4,
        "lora_rank": 64,
        "lora_alpha": 1.0,
    },
    # A few hundred steps with the released scale of the LoRA would hardly move the weights.
    "fast": {
        "num_samples": 32,
        "sequence_length": 512,
        "batch_size": 2,
        "epochs": 5,
        "num_layers": 2,
        "stride": 1,
        "fill": 1,
        "lora_rank": 64,
        "lora_alpha": 512.0,
    },
}


@quantization_config
class CatQConfig(GroupedConfig):
    """Options of CAT-Q, ternary post-training quantization: every weight becomes -1, 0 or 1 times a scale of its
    group, trained window by window of decoder blocks to give the float blocks' outputs
    (https://huggingface.co/papers/2606.26650).

    Confirmed by the paper and the released code and configurations: the quantizer, the softening, the windows, the
    merged LoRA. The training code is not released: `hard_stage`, the learning rates (read from the products of rate
    and batch size in the released configurations) and `huber_delta_max` are reconstructions. Options marked *ours*
    are not the paper's.

    Args:
        group_size (`int`, defaults to 128): columns that share a scale; must divide the columns of every linear.
        preset (`str`, defaults to `"paper"`): what the options marked *by preset* are where they are not given.
            `"paper"`: 512 rows of 2048 tokens, 60 epochs, windows of 4 blocks; `"fast"` (*ours*): minutes for a small
            model on a CPU.
        epochs (`int`, *by preset*): over the calibration set, for each window. 0 leaves centred absmean ternarization.
        num_layers (`int`, *by preset*): decoder blocks in a sliding window.
        stride (`int`, *by preset*): blocks from one window to the next.
        fill (`int`, *by preset*): blocks to which the first windows grow, and from which the last ones shrink.
        lora_rank (`int`, *by preset*): rank of the LoRA that is trained and merged before the weights are made
            ternary, as the released recipe does; 0 for none. Good range: 8 (experts) to 256.
        lora_alpha (`float`, *by preset*): the LoRA is scaled by `lora_alpha / lora_rank`; 1 in the released recipe.
        factor_lr (`float`, defaults to 0.015): learning rate of the three factors of a group.
        lora_lr (`float`, defaults to 0.003): learning rate of the LoRA.
        max_grad_norm (`float`, defaults to 1.0): where gradients are clipped.
        initial_threshold (`float`, defaults to 0.5): where 0 ends, in units of the scale, before training.
        scale_from_raw (`bool`, defaults to `False`): scales from the weights before they are centred.
        final_sharpness (`float`, defaults to 30.0): sharpness of the softened weights at the end of the soft stage.
        soft_ratio (`float`, defaults to 0.8): share of the epochs in the soft stage; 0 trains ternary weights
            throughout.
        hard_stage (`str`, defaults to `"surrogate"`): the gradient of the ternary weights in the last epochs: that of
            the softened weights at their sharpest (`"surrogate"`), `"straight_through"`, or `"none"`, which ends with
            the soft stage (the last two *ours*). Whichever end, soft or hard, gives the smaller loss with ternary
            weights is kept (*ours*).
        loss (`str`, defaults to `"huber"`): as the released configurations, or `"mse"`, the paper's equation.
        huber_delta_min, huber_delta_max (`float`, default to 0.1 and 1.0): where the Huber loss turns linear, at the
            first window and towards the last.
        activation_bits (`int`, defaults to 16): 8 rounds the inputs of the linears to 256 values a token, in training
            and after. (The released code rounds queries, keys and values as well; this does not.)
        parameters (`str`, *optional*): a parameters file of the released code (`parameters.pth`, or its manifest): its
            factors and LoRA are taken as they are, and nothing is trained.

    The options that low-bit methods share (`modules_to_not_convert`, `dataset`, `tokenizer`, `num_samples`,
    `sequence_length`, `batch_size`, `checkpoint_dir`, `offload_dir`, `seed`) are those of
    [`~hf_ext.quantizers.base_config.CalibratedConfig`] and its base; `num_samples`, `sequence_length` and `batch_size`
    are *by preset*. The paper calibrates on C4.

    Example:

    ```python
    model_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config = CatQConfig(preset="fast", group_size=64, dataset="wikitext2", tokenizer=model_id)
    model = AutoModelForCausalLM.from_pretrained(model_id, quantization_config=config)
    ```
    """

    quant_method: ClassVar[str] = "catq"
    bits: ClassVar[int] = 2  # of a stored code

    group_size: int = 128
    preset: Literal["paper", "fast"] = "paper"
    num_samples: int = None
    sequence_length: int = None
    batch_size: int = None
    epochs: int = None
    num_layers: int = None
    stride: int = None
    fill: int = None
    lora_rank: int = None
    lora_alpha: float = None
    factor_lr: float = 0.015
    lora_lr: float = 0.003
    max_grad_norm: float = 1.0
    initial_threshold: float = 0.5
    scale_from_raw: bool = False
    final_sharpness: float = 30.0
    soft_ratio: float = 0.8
    hard_stage: Literal["surrogate", "straight_through", "none"] = "surrogate"
    loss: Literal["huber", "mse"] = "huber"
    huber_delta_min: float = 0.1
    huber_delta_max: float = 1.0
    activation_bits: int = 16
    parameters: str | None = None

    def __post_init__(self):
        self._check_choice("preset", tuple(PRESETS))
        for name, value in PRESETS[self.preset].items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        super().__post_init__()
        for name, allowed in (
            ("hard_stage", ("surrogate", "straight_through", "none")),
            ("loss", ("huber", "mse")),
        ):
            self._check_choice(name, allowed)
        if self.activation_bits not in (8, 16):
            raise ValueError(f"{self._name}: activation_bits={self.activation_bits!r}; allowed are 8, 16.")
        for name, least, most in (
            ("epochs", 0, None),
            ("num_layers", 1, None),
            ("stride", 1, self.num_layers),
            ("fill", 1, None),
            ("lora_rank", 0, None),
            ("lora_alpha", 0, None),
            ("factor_lr", 0, None),
            ("lora_lr", 0, None),
            ("max_grad_norm", 1e-9, None),
            ("initial_threshold", 1e-6, None),
            ("final_sharpness", 1e-3, None),
            ("soft_ratio", 0, 1),
            ("huber_delta_min", 1e-9, None),
            ("huber_delta_max", self.huber_delta_min, None),
        ):
            self._check_range(name, least, most)

    @property
    def needs_data(self) -> bool:
        return self.parameters is None

    def weight_label(self) -> str:
        return "ternary"

    def check_shapes(self, shapes: dict[str, tuple[int, int]]) -> None:
        super().check_shapes(shapes)
        ragged = {
            name: width for name, (_, width) in shapes.items() if self.group_size > 0 and width % self.group_size
        }
        if ragged:
            shown = ", ".join(f"{name} ({width} columns)" for name, width in list(ragged.items())[:3])
            shared = math.gcd(*(width for _, width in shapes.values()))
            fitting = [size for size in range(16, min(shared, 512) + 1) if shared % size == 0] or [shared]
            raise ValueError(
                f"CatQConfig: group_size={self.group_size} does not divide the columns of {len(ragged)} linears: "
                f"{shown}. Sizes that divide all of them: {', '.join(map(str, fitting))}, and -1 for whole rows."
            )
