"""The parts of error messages that every surface words the same way."""

from collections.abc import Iterable
from difflib import get_close_matches


class MissingExtraError(ImportError):
    """An optional package is needed and absent; the message says which extra of hf_ext brings it.

    Args:
        package (`str`): The package that is missing, as it is imported.
        extra (`str`): The extra of hf_ext that installs it, such as `"quant"`.
        needed_for (`str`): What needs it, as the user knows it, such as `"QuantizationReport.plot"`.

    Example:

    ```python
    try:
        import matplotlib
    except ImportError as error:
        raise MissingExtraError("matplotlib", "viz", "QuantizationReport.plot") from error
    ```
    """

    def __init__(self, package: str, extra: str, needed_for: str):
        super().__init__(
            f'{needed_for} needs {package}, which is not installed. Run: pip install "hf_ext[{extra}]".', name=package
        )
        self.extra = extra
        self.needed_for = needed_for

    def __reduce__(self):
        # ImportError would rebuild it from the message alone, which fails in worker processes.
        return type(self), (self.name, self.extra, self.needed_for)


def closest(name: str, allowed: Iterable[str]) -> str:
    """The end of an error message about an unknown `name`: the likely spelling, then all that is allowed.

    Args:
        name (`str`): What the user wrote.
        allowed (`Iterable[str]`): The names that exist.

    Returns:
        `str`: Such as `" Did you mean 'spherical'? Available: dynasteer, spherical."`, with a leading space.
    """
    allowed = sorted(allowed)
    lower_case = {candidate.lower(): candidate for candidate in allowed}
    matches = get_close_matches(name.lower(), lower_case, n=1)
    hint = f" Did you mean {lower_case[matches[0]]!r}?" if matches else ""
    return f"{hint} Available: {', '.join(allowed) or 'none'}."
