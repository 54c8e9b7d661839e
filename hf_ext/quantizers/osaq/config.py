"""The options of OSAQ."""

from __future__ import annotations

from typing import ClassVar, Literal

from ..base_config import GroupedConfig, quantization_config


BITS = (2, 3, 4, 8)


@quantization_config
class OSAQConfig(GroupedConfig):
    """Options of OSAQ, Outlier Self-Absorption: before rounding, each weight is moved along directions its inputs
    hardly use, so that its largest entries shrink and the grid gets finer (https://huggingface.co/papers/2605.04738).

    The equations follow two independent accounts of the paper's method section, which agree; the paper does not print
    its constants in either, so the defaults of `gamma`, `tau`, `mu1` and `mu2` are ours. Options marked *ours* are not
    the paper's.

    Args:
        bits (`int`, defaults to 3): bits per weight: 2, 3, 4 or 8.
        rounding (`str`, defaults to `"gptq"`): `"gptq"`, or `"rtn"` to round to the nearest.
        gamma (`float`, defaults to 0.02): share of the inputs' energy that the null directions may hold; 0 keeps only
            directions that were never used. Good range: 1e-3 to 3e-2.
        tau (`float`, defaults to 0.1): temperature of the peak weights as a share of the row's largest weight (the
            relative form is ours). Good range: 0.05 to 0.3.
        mu1 (`float`, defaults to 0.3): ridge on the change; larger is safer and does less. Below 0.03 it makes new
            outliers. Good range: 0.05 to 1.
        mu2 (`float`, defaults to 1.0): keeps the sum of a row's change near zero; any value from 1e-2 on does.
        max_null_ratio (`float`, defaults to 0.5): *ours*: the null directions are at most this share of the columns; 0
            turns the absorption off, and what is left is plain rounding.
        scope (`str`, defaults to `"row"`): `"row"`, or `"group"` to look at the peaks of every group (*ours*).
        drift_tol (`float`, *optional*): *ours*: a row whose relative squared output error from the absorption would
            exceed it takes a smaller step, or none.
        token_normalize (`bool`, defaults to `True`): *ours*: every token enters the statistics with unit length.
            Without it a few tokens with huge activations, the first of each row among them, own most of the energy,
            and beside them every other direction looks unused. `False` gives GPTQ's own statistics.
        damp_percent (`float`, defaults to 0.01): GPTQ's damping, as a share of the mean diagonal; grows by itself
            where the Hessian does not factor.
        desc_act (`bool`, defaults to `False`): GPTQ rounds the most active columns first.
        refine_sweeps (`int`, defaults to 0): sweeps of coordinate descent over the codes after rounding: the paper's
            2-bit variant (a reconstruction). 10 is plenty.

    The options that low-bit methods share (`group_size`, `modules_to_not_convert`, `dataset`, `tokenizer`,
    `num_samples`, `sequence_length`, `batch_size`, `checkpoint_dir`, `offload_dir`, `seed`) are those of
    [`~hf_ext.quantizers.base_config.GroupedConfig`] and its bases. The last group of a row may be shorter.

    Example:

    ```python
    config = OSAQConfig(bits=3, dataset="wikitext2", tokenizer="HuggingFaceTB/SmolLM2-135M-Instruct")
    model = AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M-Instruct", quantization_config=config)
    ```
    """

    quant_method: ClassVar[str] = "osaq"

    bits: int = 3
    rounding: Literal["rtn", "gptq"] = "gptq"
    gamma: float = 0.02
    tau: float = 0.1
    mu1: float = 0.3
    mu2: float = 1.0
    max_null_ratio: float = 0.5
    scope: Literal["row", "group"] = "row"
    drift_tol: float | None = None
    token_normalize: bool = True
    damp_percent: float = 0.01
    desc_act: bool = False
    refine_sweeps: int = 0

    def __post_init__(self):
        super().__post_init__()
        if self.bits not in BITS:
            raise ValueError(f"{self._name}: bits={self.bits!r}; allowed are {', '.join(map(str, BITS))}.")
        self._check_choice("rounding", ("rtn", "gptq"))
        self._check_choice("scope", ("row", "group"))
        self._check_range("gamma", 0, 1)
        self._check_range("tau", 1e-6, None)
        self._check_range("mu1", 1e-9, None)
        self._check_range("mu2", 0, None)
        self._check_range("max_null_ratio", 0, 1, open_most=True)
        self._check_range("damp_percent", 0, 1)
        self._check_range("refine_sweeps", 0, None)
        if self.drift_tol is not None:
            self._check_range("drift_tol", 0, None)

    def weight_label(self) -> str:
        return f"{self.bits}-bit"
