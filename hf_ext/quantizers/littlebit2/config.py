"""The options of LittleBit-2."""

from __future__ import annotations

from typing import ClassVar, Literal

from ..base_config import LowBitConfig, quantization_config
from .functional import bits_per_weight, rank_for


# GQA makes these small, so that their scales are a larger share of their bits.
KEY_VALUE_NAMES = ("k_proj", "v_proj")


@quantization_config
class LittleBit2Config(LowBitConfig):
    """Options of LittleBit-2: every decoder linear becomes one or two products of two sign matrices of low rank with
    scales, at 1 bit a weight down to 0.1 (https://huggingface.co/papers/2603.00042). It looks at no data.

    What this makes is a start: **a model gives no usable text before distillation**. Quantize with `trainable=True`,
    train with [`LittleBit2Trainer`] and the float model as teacher, then call [`pack`]. Without `trainable` the layers
    are packed at once, to look at sizes, speeds and errors.

    Of the paper only the abstract was available; the method and the defaults follow the authors' public code (for the
    rotation, the ranks and the loss) and LittleBit's paper (https://huggingface.co/papers/2506.13771). An exact SVD
    up to 2048 rows or columns is ours.

    Args:
        bits (`float`, defaults to 0.55): bits a weight to keep to, 16-bit scales included; they set the rank of each
            layer. A small layer whose smallest rank takes more says so in the report. Good range: 0.1 to 1.
        residual (`bool`, defaults to `True`): a second product for what the first leaves over, both at half the rank.
            Below 0.55 bits on small models `False` starts with a smaller error.
        rotation (`str`, defaults to `"joint_itq"`): how the factors are rotated before their signs are taken:
            LittleBit-2's Joint-ITQ, its `"random"` start alone, or `"none"`, which is LittleBit.
        itq_iterations (`int`, defaults to 50): of Joint-ITQ. Good range: 20 to 100.
        rank (`int`, *optional*): of each product in every layer, in place of `bits`.
        rank_multiple (`int`, defaults to 8): ranks are rounded down to it.
        min_rank (`int`, defaults to 8): smallest rank.
        kv_factor (`float`, defaults to 1.0): times the rank of `k_proj` and `v_proj`.
        sign_gradient (`str`, defaults to `"smoothsign"`): the gradient of the signs in training: that of
            `tanh(smooth_alpha x)`, or `"ste"`, 1 between -1 and 1.
        smooth_alpha (`float`, defaults to 100.0): its sharpness.
        trainable (`bool`, defaults to `False`): float factors behind the signs, for [`LittleBit2Trainer`].
        trained (`bool`, defaults to `False`): state of a checkpoint, set by [`pack`]; not for users.

    The options that low-bit methods share (`modules_to_not_convert`, `checkpoint_dir`, `seed`) are those of
    [`~hf_ext.quantizers.base_config.LowBitConfig`].

    Example:

    ```python
    config = LittleBit2Config(bits=0.55, trainable=True)
    model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct", quantization_config=config)
    ```
    """

    quant_method: ClassVar[str] = "littlebit2"

    bits: float = 0.55
    residual: bool = True
    rotation: Literal["joint_itq", "random", "none"] = "joint_itq"
    itq_iterations: int = 50
    rank: int | None = None
    rank_multiple: int = 8
    min_rank: int = 8
    kv_factor: float = 1.0
    sign_gradient: Literal["smoothsign", "ste"] = "smoothsign"
    smooth_alpha: float = 100.0
    trainable: bool = False
    trained: bool = False

    def __post_init__(self):
        super().__post_init__()
        self._check_choice("rotation", ("joint_itq", "random", "none"))
        self._check_choice("sign_gradient", ("smoothsign", "ste"))
        self._check_range("bits", 0.01, 2)
        self._check_range("itq_iterations", 0, None)
        self._check_range("rank_multiple", 1, None)
        self._check_range("min_rank", 1, None)
        self._check_range("kv_factor", 0, None)
        self._check_range("smooth_alpha", 1e-3, None)
        if self.rank is not None:
            self._check_type("rank", "int")
            self._check_range("rank", 1, None)

    @property
    def paths(self) -> int:
        return 2 if self.residual else 1

    def rank_of(self, name: str, shape: tuple[int, int]) -> int:
        """Return the rank of each product of the linear `name` of `shape`, `(out_features, in_features)`."""
        if self.rank is not None:
            return self.rank
        factor = self.kv_factor if name.rpartition(".")[2] in KEY_VALUE_NAMES else 1.0
        return rank_for(
            *shape, self.bits, self.paths, factor=factor, multiple=self.rank_multiple, minimum=self.min_rank
        )

    def excess_of(self, name: str, shape: tuple[int, int]) -> float | None:
        """Return the bits a weight that the smallest rank takes, where they are above `bits`; else `None`."""
        if self.rank is not None or self.rank_of(name, shape) > self.min_rank:
            return None
        actual = bits_per_weight(*shape, self.min_rank, self.paths)
        return actual if actual > self.bits else None

    @property
    def warning(self) -> str:
        if self.trained or self.trainable:
            return ""
        return (
            "This LittleBit-2 model is an initialisation: it gives no usable text before distillation. Quantize the "
            "float model with trainable=True, train that with LittleBit2Trainer, and pack it."
        )

    def weight_label(self) -> str:
        return f"{self.bits:g}-bit" if self.rank is None else f"rank-{self.rank} binary"

    def check_shapes(self, shapes: dict[str, tuple[int, int]]) -> None:
        too_small = {name: shape for name, shape in shapes.items() if self.rank is not None and self.rank > min(shape)}
        if too_small:
            shown = ", ".join(f"{name} ({out} x {columns})" for name, (out, columns) in list(too_small.items())[:3])
            raise ValueError(
                f"{self._name}: rank={self.rank} is larger than a side of {len(too_small)} linears: {shown}. Allowed "
                f"are 1 to {min(map(min, shapes.values()))}, or rank=None to set it by bits; or name them in "
                "modules_to_not_convert."
            )
