"""What the configs of all quantization methods share: their fields, their checks, and what of them is stored."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, ClassVar

from transformers.utils.quantization_config import QuantizationConfigMixin

from .._register import ensure_registered
from ..core.errors import closest


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


FORMAT_VERSION = 1
# Needed to quantize, meaningless once the model is quantized: never written to config.json.
RUN_FIELDS = (
    "dataset",
    "tokenizer",
    "num_samples",
    "sequence_length",
    "batch_size",
    "checkpoint_dir",
    "offload_dir",
    "seed",
    "parameters",
)


def quantization_config(cls: type) -> type:
    """Make `cls` a keyword-only dataclass whose constructor answers a misspelt option with the nearest right one."""
    cls = dataclasses.dataclass(kw_only=True, repr=False)(cls)
    initialise = cls.__init__
    allowed = [field.name for field in dataclasses.fields(cls)]

    @functools.wraps(initialise)
    def __init__(self, **options: Any):
        for name in options:
            if name not in allowed and name not in ("quant_method", "format_version", "library"):
                raise TypeError(f"{cls.__name__} has no option {name!r}.{closest(name, allowed)}")
        check_stored_fields(cls, options)
        initialise(self, **{name: value for name, value in options.items() if name in allowed})

    cls.__init__ = __init__
    return cls


def check_stored_fields(cls: type, options: dict[str, Any]) -> None:
    version = options.get("format_version", FORMAT_VERSION)
    if version > FORMAT_VERSION:
        raise ValueError(
            f"This checkpoint has format version {version} of {cls.quant_method!r}, and this hf_ext reads up to "
            f"{FORMAT_VERSION}. Upgrade: pip install -U hf_ext"
        )


@quantization_config
class LowBitConfig(QuantizationConfigMixin):
    """Fields every low-bit method has. A method's own config subclasses it and sets `quant_method`.

    Args:
        modules_to_not_convert (`list[str]`, *optional*): modules that stay float *beside* the safe defaults
            (everything outside the decoder blocks, such as `lm_head`, and routers). A full name, the end of one, or
            a regular expression that matches up to a module boundary.
        checkpoint_dir (`str`, *optional*): where what is finished is kept, so that a killed run resumes there.
        seed (`int`, defaults to 0): seed of all that is drawn.

    Raises:
        TypeError: for an unknown option. ValueError: for a value out of range, or a newer stored format.
    """

    quant_method: ClassVar[str] = ""

    modules_to_not_convert: list[str] | None = None
    checkpoint_dir: str | None = None
    seed: int = 0

    def __post_init__(self):
        if self.quant_method:
            ensure_registered(self.quant_method)
        for field in dataclasses.fields(self):
            self._check_type(field.name, field.type)
        self._check_range("seed", 0, 2**62)
        if isinstance(self.modules_to_not_convert, str):
            raise TypeError(
                f"{self._name}: modules_to_not_convert={self.modules_to_not_convert!r} is one string; "
                f"write a list: [{self.modules_to_not_convert!r}]."
            )

    @property
    def needs_data(self) -> bool:
        """Whether a run with these options reads a calibration set."""
        return False

    def weight_label(self) -> str:
        """What the weights become, in two words for people: "3-bit", "ternary"."""
        raise NotImplementedError(f"{self._name} must say what its weights are: override weight_label")

    @property
    def warning(self) -> str:
        """What a user of a model with these options must know first; empty if nothing."""
        return ""

    def check_shapes(self, shapes: dict[str, tuple[int, int]]) -> None:
        """Raise `ValueError` for linears, `{name: (out_features, in_features)}`, that the options do not fit."""

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _check_range(self, name: str, least: float, most: float | None, *, open_most: bool = False) -> None:
        value = getattr(self, name)
        too_large = most is not None and (value >= most if open_most else value > most)
        if not isinstance(value, (int, float)) or value != value or value < least or too_large:
            limits = f"at least {least}" if most is None else f"from {least} to {'below ' if open_most else ''}{most}"
            raise ValueError(f"{self._name}: {name}={value!r}; allowed is a number {limits}.")

    def _check_type(self, name: str, kind: str) -> None:
        value = getattr(self, name)
        right = {
            "bool": isinstance(value, bool),
            "int": isinstance(value, int) and not isinstance(value, bool),
            "float": isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value),
        }
        if not right.get(kind, True):
            wanted = {"bool": "True or False", "int": "a whole number", "float": "a finite number"}[kind]
            raise TypeError(f"{self._name}: {name}={value!r} is a {type(value).__name__}; allowed is {wanted}.")

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ValueError(f"{self._name}: {name}={value!r} is unknown.{closest(str(value), list(allowed))}")

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores: the options that shape the weights, none of the calibration run's."""
        from .. import __version__

        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in RUN_FIELDS}
        return {
            "quant_method": self.quant_method,
            "format_version": FORMAT_VERSION,
            "library": f"hf_ext {__version__}: run `import hf_ext` before from_pretrained",
            **fields,
        }

    def changed_options(self) -> dict[str, Any]:
        """Return the stored options that are not at their defaults."""
        stored = [field for field in dataclasses.fields(self) if field.name not in RUN_FIELDS]
        return {f.name: getattr(self, f.name) for f in stored if getattr(self, f.name) != f.default}

    def without_run(self) -> LowBitConfig:
        """Return a copy that has forgotten the calibration run: what a quantized model keeps."""
        defaults = {f.name: f.default for f in dataclasses.fields(self) if f.name in RUN_FIELDS}
        return dataclasses.replace(self, **defaults)

    def __deepcopy__(self, memo: dict) -> LowBitConfig:
        # `from_pretrained` deep-copies the model's config on the way: a data set or a generator must survive that.
        clone = copy.copy(self)
        clone.modules_to_not_convert = copy.copy(self.modules_to_not_convert)
        return clone

    def __iter__(self):
        yield from self.to_dict().items()


@quantization_config
class CalibratedConfig(LowBitConfig):
    """Fields of the methods that look at calibration data, beside those of [`LowBitConfig`].

    Args:
        dataset (*optional*): calibration data: a list of `str`, of chat message lists or of token rows, a token
            tensor `[rows, length]`, a `datasets.Dataset`, an iterable of batches, a text or JSON-lines file, or the
            name of a set (`"wikitext2"`, `"c4"`, or any Hub data set with a text or messages column).
        tokenizer (*optional*): a tokenizer or its name; needed unless `dataset` holds tokens.
        num_samples (`int`, defaults to 128): calibration rows used at most.
        sequence_length (`int`, defaults to 2048): tokens per calibration row at most.
        batch_size (`int`, defaults to 8): calibration rows in one forward.
        offload_dir (`str`, *optional*): where the activations of the calibration set lie instead of in memory.

    Raises:
        TypeError: for an unknown option. ValueError: for a value out of range.
    """

    dataset: Any = None
    tokenizer: PreTrainedTokenizerBase | str | None = None
    num_samples: int = 128
    sequence_length: int = 2048
    batch_size: int = 8
    offload_dir: str | None = None

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("num_samples", 1), ("sequence_length", 2), ("batch_size", 1)):
            self._check_range(name, least, None)

    @property
    def needs_data(self) -> bool:
        return True


@quantization_config
class GroupedConfig(CalibratedConfig):
    """Fields of the methods whose scales belong to groups of columns, beside those of [`CalibratedConfig`].

    Args:
        group_size (`int`, defaults to -1): input columns that share one scale; -1 is the whole row. 64 or 128 are
            usual below 4 bits.

    Raises:
        ValueError: for a value out of range, or a group larger than a row.
    """

    group_size: int = -1

    def __post_init__(self):
        super().__post_init__()
        if self.group_size < 1 and self.group_size != -1:
            raise ValueError(
                f"{self._name}: group_size={self.group_size!r}; allowed are positive numbers of columns (64, 128), "
                "or -1 for one group a row."
            )

    @property
    def warning(self) -> str:
        """What a user of a model with these options must know first; empty if nothing."""
        return ""

    def check_shapes(self, shapes: dict[str, tuple[int, int]]) -> None:
        too_narrow = {name: width for name, (_, width) in shapes.items() if self.group_size > width}
        if too_narrow:
            shown = ", ".join(f"{name} ({width} columns)" for name, width in list(too_narrow.items())[:5])
            raise ValueError(
                f"group_size={self.group_size} is larger than a row of {len(too_narrow)} linears: {shown}. Allowed "
                f"are 1 to {min(width for _, width in shapes.values())}, or -1 for one group a row; or name them in "
                "modules_to_not_convert."
            )
