"""Research methods for Transformers, TRL and PEFT, used through the doors these libraries already have.

`import hf_ext` is light: it loads no torch, and each public name is imported when it is first used. It is also enough:
checkpoints that were quantized with hf_ext load with `AutoModelForCausalLM.from_pretrained` after it, whether it was
imported before or after Transformers.
"""

from importlib import import_module

from hf_ext._public import EXTRAS, PUBLIC


__all__ = sorted(PUBLIC)


def __getattr__(name: str):
    if name == "__version__":
        from importlib.metadata import version

        value = version("hf_ext")
    elif name in PUBLIC:
        try:
            value = getattr(import_module(PUBLIC[name]), name)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in EXTRAS:
                raise
            from hf_ext.core.errors import MissingExtraError

            raise MissingExtraError(package, EXTRAS[package], name) from error
    else:
        from hf_ext.core.errors import closest

        raise AttributeError(f"module 'hf_ext' has no attribute {name!r}.{closest(name, PUBLIC)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


from hf_ext import _register  # noqa: E402, F401  (needs the lazy names above when Transformers is already imported)
