"""`hf-ext`: the commands, put together."""

from __future__ import annotations

import typer

from .app import ReportingGroup
from .demo import demo
from .eval import evaluate
from .export import export
from .quantize import quantize
from .train import CONTEXT, train


app = typer.Typer(
    name="hf-ext",
    cls=ReportingGroup,
    help="Quantize, train, measure and export Transformers models from the command line.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("quantize")(quantize)
app.command("eval")(evaluate)
app.command("export")(export)
app.command("train", context_settings=CONTEXT)(train)
app.command("demo")(demo)


def main() -> None:
    """Run `hf-ext` with the arguments of this process."""
    app()


if __name__ == "__main__":
    main()
