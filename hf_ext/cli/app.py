"""How every command reports: its result once on stdout, errors in a line or two on stderr, and its exit code."""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console, RenderableType
from typer.core import TyperGroup


EXIT_RUNTIME, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
# These say what is wrong by themselves; of any other exception the class is worth knowing too.
SELF_EXPLAINING = (ValueError, TypeError, OSError, ImportError)


class UsageError(typer.TyperException):
    """What the user asked for cannot be done; nothing was changed."""

    exit_code = EXIT_USAGE


@dataclass(frozen=True)
class Result:
    """What a command returns: `data` for `--json`, `shown` for people."""

    data: dict[str, Any]
    shown: RenderableType


class ReportingGroup(TyperGroup):
    """Runs a command, prints its `Result`, and turns exceptions into messages and exit codes.

    With `--json` stdout holds one JSON object and nothing else, whatever libraries print. `HF_EXT_DEBUG=1` adds the
    traceback.
    """

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        args = sys.argv[1:] if args is None else list(args)
        as_json = "--json" in args
        try:
            with redirect_stdout(sys.stderr) if as_json else nullcontext():
                outcome = super().main(args, prog_name, standalone_mode=False, **extra)
        except Exception as error:
            code = getattr(error, "exit_code", EXIT_RUNTIME)
            _print_error(error, code, as_json)
        else:
            # An int is the code of --help (0) or of Ctrl-C (130).
            code = outcome if isinstance(outcome, int) else 0
            if isinstance(outcome, Result):
                _print_result(outcome, as_json)
            elif code == EXIT_INTERRUPTED:
                _print_message(
                    "Interrupted; no model was written. Blocks finished under --checkpoint-dir are kept.", as_json
                )
        if standalone_mode:
            sys.exit(code)
        return code


def note(message: str) -> None:
    """Tell the user what goes on, on stderr."""
    print(message, file=sys.stderr, flush=True)


def _print_result(result: Result, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_json_value(result.data)))
    else:
        Console().print(result.shown)


def _print_error(error: Exception, code: int, as_json: bool) -> None:
    debug = os.environ.get("HF_EXT_DEBUG") == "1"
    if debug:
        traceback.print_exception(error)
    message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
    message = " ".join(message.split())
    if code == EXIT_USAGE and not message:  # no arguments: the help is printed already
        return
    if not message or not isinstance(error, (typer.TyperException, *SELF_EXPLAINING)):
        message = f"{type(error).__name__}: {message}".removesuffix(": ")
    _print_message(message, as_json)
    if code == EXIT_RUNTIME and not debug and not as_json:
        note("HF_EXT_DEBUG=1 shows where it happened.")


def _print_message(message: str, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"error": message}))
    else:
        note(f"Error: {message}")


def _json_value(value: Any) -> Any:
    """Return `value` with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
