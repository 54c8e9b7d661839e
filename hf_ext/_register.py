"""Makes hf_ext's methods known to Transformers and PEFT without importing either.

A checkpoint whose `quant_method` is unknown to Transformers loads with random weights and only a warning, so
`import hf_ext` must be enough. The functions below run at once where the library is already imported, and otherwise
right after its first import. At that moment `transformers.modeling_utils` may be only half imported: the modules named
in `_public.QUANTIZERS` must not import it at top level.

Everything above this layer is reached by name, never by an import statement.
"""

import warnings
from importlib import import_module
from types import ModuleType

from wrapt import when_imported

from hf_ext._public import QUANTIZERS


LORA_DISPATCH = "hf_ext.quantizers.peft:register_lora_dispatch"


def register_quantizers(auto: ModuleType) -> None:
    """Enter every quantizer of `_public.QUANTIZERS` into Transformers' tables; calling it again changes nothing.

    A name that another package holds is left alone, with one warning: `ensure_registered` raises when it is used.
    """
    for quant_method, (config_path, quantizer_path) in QUANTIZERS.items():
        holder = _foreign_holder(auto, quant_method)
        if holder is not None:
            warnings.warn(_taken_message(quant_method, holder), stacklevel=2)
            continue
        if quant_method not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
            auto.register_quantization_config(quant_method)(_load(config_path))
        if quant_method not in auto.AUTO_QUANTIZER_MAPPING:
            auto.register_quantizer(quant_method)(_load(quantizer_path))


def register_lora(lora_model: ModuleType) -> None:
    """Let PEFT put LoRA adapters on hf_ext's low-bit linears."""
    _load(LORA_DISPATCH)(lora_model)


def ensure_registered(quant_method: str) -> None:
    """Raise unless Transformers' tables give hf_ext's own classes for `quant_method`; enter absent ones.

    Every quantization config of hf_ext calls this when it is built, so that a model is never quantized under a name
    that another package would load.
    """
    from transformers.quantizers import auto

    if quant_method not in QUANTIZERS:
        known = ", ".join(QUANTIZERS)
        raise ValueError(
            f"quant_method={quant_method!r} has no line in hf_ext._public.QUANTIZERS. Available: {known}."
        )
    holder = _foreign_holder(auto, quant_method)
    if holder is not None:
        raise RuntimeError(_taken_message(quant_method, holder))
    register_quantizers(auto)


def _foreign_holder(auto: ModuleType, quant_method: str) -> str | None:
    """The class, as "module:name", of another package that stands under `quant_method` in Transformers' tables."""
    tables = (auto.AUTO_QUANTIZATION_CONFIG_MAPPING, auto.AUTO_QUANTIZER_MAPPING)
    for table, own_path in zip(tables, QUANTIZERS[quant_method], strict=True):
        if quant_method in table:
            # By name and not by identity: a reloaded module has a new class object that is still ours.
            held = f"{table[quant_method].__module__}:{table[quant_method].__qualname__}"
            if held != own_path:
                return held
    return None


def _taken_message(quant_method: str, holder: str) -> str:
    module, _, name = holder.partition(":")
    return (
        f"The quantization method {quant_method!r} is already registered with Transformers by {name} of {module!r}, "
        f"and hf_ext's {quant_method!r} models need the name: they can be neither made nor loaded in this process. "
        f"Use a process that does not import {module.partition('.')[0]!r}."
    )


def _load(path: str):
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


# Last, because they run at once where the module is already imported.
when_imported("transformers.quantizers.auto")(register_quantizers)
when_imported("peft.tuners.lora.model")(register_lora)
