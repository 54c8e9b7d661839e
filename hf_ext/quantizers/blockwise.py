"""The engine: walks a decoder block by block, shows a method each linear's inputs, and puts its answer in place.

Beside the model it holds one block's statistics and the activations of the calibration set, which may lie on disk. It
knows a method only by the properties of `BlockMethod`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..core.modules import decoder_blocks, linear_shape, named_linears, set_linear_weight
from ..ops.packed_weight import dequantize
from .activations import ActivationStore, Batch, BlockInputs
from .calibration import batches
from .report import LayerReport, QuantizationReport


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .checkpoint import RunCheckpoint


@dataclass
class LayerResult:
    """What a method made of one linear.

    Args:
        weight (`torch.Tensor` `[out, in]`, *optional*): the new weight, for a method that keeps the linear float.
        packed (*optional*): the low-bit weight, for a method that replaces the linear: a dataclass of tensors and
            plain values, such as `PackedWeight`.
        note (`str`): anything the user should know of this layer.
        metrics (`dict[str, float]`): figures for the report.
    """

    weight: Tensor | None = None
    packed: Any = None
    note: str = ""
    metrics: dict[str, float] = field(default_factory=dict)


class BlockMethod(Protocol):
    """A closed-form method as the engine sees it.

    Attributes:
        name: the method's name, for the progress bar and the report.
        needs_inputs: whether the method looks at activations; without, there is no calibration set and no `observe`.
        propagate_error: whether later blocks see the outputs of the changed (`True`) or of the float blocks.
        packed_types: the dataclasses that its packed weights are of.
    """

    name: str
    needs_inputs: bool
    propagate_error: bool
    packed_types: tuple[type, ...]

    def observe(self, group: str, hidden_states: Tensor) -> None:
        """See `hidden_states`, `[tokens, in_features]`: inputs of the linears of `group`, which share them."""

    def solve(self, group: str, linears: dict[str, nn.Module]) -> dict[str, LayerResult]:
        """Answer for every linear of `group`, and forget its statistics. A group may have seen no token."""


def quantize_blockwise(
    model: PreTrainedModel,
    rows: list[Tensor],
    method: BlockMethod,
    targets: list[str],
    install: Callable[[str, LayerResult], None],
    *,
    batch_size: int = 8,
    offload_dir: str | None = None,
    checkpoint: RunCheckpoint | None = None,
) -> QuantizationReport:
    """Apply `method` to the linears named in `targets`, block by block, in place.

    Args:
        model: a decoder-only model with its float weights.
        rows: calibration rows, 1-D token ids without padding.
        method: what to do; see `BlockMethod`.
        targets: full names of the linears, all inside decoder blocks.
        install: called as `install(name, result)` once a block has been passed, to put `result` in the linear's place.
        batch_size: rows in one forward.
        offload_dir: where the activations lie; memory if `None`.
        checkpoint: where finished blocks are kept and taken from.

    Returns:
        `QuantizationReport`: an entry for each target.

    Raises:
        ValueError: non-finite weights or activations, naming the layer.
    """
    started = time.monotonic()
    report = QuantizationReport(method.name, calibration_tokens=sum(map(len, rows)))
    blocks_name, blocks = decoder_blocks(model)
    with (
        torch.no_grad(),
        evaluating(model),
        ActivationStore(offload_dir) as store,
        tqdm(total=len(targets), desc=method.name, unit="linear", delay=1.0) as progress,
    ):
        inputs = probe = None
        if method.needs_inputs:
            inputs = BlockInputs(model, blocks, list(batches(rows, batch_size)), store)
            probe = next(iter(inputs))  # the first block's first batch
        for index, block in enumerate(blocks):
            progress.set_description(f"{method.name} block {index + 1}/{len(blocks)}", refresh=False)
            linears = {f"{blocks_name}.{index}.{name}": linear for name, linear in named_linears(block)}
            linears = {name: linear for name, linear in linears.items() if name in targets}
            results = checkpoint.load_block(index) if checkpoint else None
            finished = results is not None
            if finished:
                progress.update(len(linears))
            else:
                groups = (
                    _observe_block(block, linears, inputs, method) if inputs else {name: [name] for name in linears}
                )
                results = _solve_groups(groups, linears, method, progress)
                if checkpoint:
                    checkpoint.save_block(index, results)
            if inputs and not method.propagate_error:
                inputs.advance(rerun=finished)
            for name, result in results.items():
                if result.packed is None or method.propagate_error:
                    set_linear_weight(linears[name], _float_weight(result))
            if inputs and method.propagate_error:
                inputs.advance(rerun=True)
            for name, result in results.items():
                install(name, result)
                status = "absorbed" if result.packed is None else "quantized"
                shape = linear_shape(linears[name])
                report.layers.append(LayerReport(name, status, shape, result.note, result.metrics))
            if probe is not None:
                _check_runs(probe, list(linears))
                probe = None
    report.seconds = time.monotonic() - started
    warn_of_notes(report)
    return report


def warn_of_notes(report: QuantizationReport) -> None:
    """Warn once of every note, with the layers that carry it."""
    for note, names in report.notes().items():
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        warnings.warn(f"{report.method}: {note}: {shown}", stacklevel=4)


def _check_runs(batch: Batch, names: list[str]) -> None:
    """Raise `ValueError` now, and not when the model is used, if a block reads the weights of its linears itself."""
    with explaining_weight_readers(names):
        batch.run()


@contextmanager
def explaining_weight_readers(names: list[str]) -> Iterator[None]:
    """Turn what a block raises that reads the weight of a replaced linear, one of `names`, into a `ValueError`."""
    try:
        yield
    except AttributeError as error:
        raise ValueError(
            f"A block of this model does not run with its linears replaced ({error}): it reads a weight directly. "
            f"Leave that linear float by modules_to_not_convert; it is one of {', '.join(names)}."
        ) from error


def _float_weight(result: LayerResult) -> Tensor:
    return dequantize(result.packed) if result.weight is None else result.weight


def _solve_groups(
    groups: dict[str, list[str]], linears: dict[str, nn.Module], method: BlockMethod, progress: tqdm
) -> dict[str, LayerResult]:
    results: dict[str, LayerResult] = {}
    for leader, members in groups.items():
        progress.set_postfix_str(leader.rpartition(".")[2], refresh=False)
        try:
            results |= method.solve(leader, {name: linears[name] for name in members})
        except ValueError as error:
            raise ValueError(f"{' and '.join(members)}: {error}") from error
        progress.update(len(members))
    return {name: results[name] for name in linears}


def _observe_block(
    block: nn.Module, linears: dict[str, nn.Module], inputs: BlockInputs, method: BlockMethod
) -> dict[str, list[str]]:
    """Show `method` the inputs of every group of linears; return the groups, `{leader: members}`.

    Linears that get the very same tensor (query, key and value; gate and up) are one group with one set of statistics.
    With `propagate_error` off, the outputs of this pass are the next block's inputs.
    """
    groups: dict[str, list[str]] = {name: [name] for name in linears}
    for number, batch in enumerate(inputs):
        if number == 0:
            groups = _shared_inputs(block, linears, batch.run)
        with ExitStack() as hooks:
            for leader in groups:
                hooks.callback(linears[leader].register_forward_pre_hook(_observer(leader, method)).remove)
            output = batch.run()
        if not torch.isfinite(output).all():
            raise ValueError(
                f"block {inputs.index} gives NaN or infinite activations on calibration batch {number}. The weights "
                "or the dtype overflow there: load the model with dtype=torch.float32, or check the calibration data."
            )
        if not method.propagate_error:
            inputs.keep_output(number, output)
    return groups


def _observer(group: str, method: BlockMethod) -> Callable:
    def observe(linear: nn.Module, args: tuple) -> None:
        tokens = args[0].reshape(-1, args[0].shape[-1])
        if not torch.isfinite(tokens).all():
            raise ValueError(f"the inputs of {group} hold NaN or infinite values; no later layer was changed.")
        method.observe(group, tokens)

    return observe


def _shared_inputs(block: nn.Module, linears: dict[str, nn.Module], run: Callable[[], Any]) -> dict[str, list[str]]:
    """Run the block once and group the linears whose input was the same tensor; unvisited ones stand alone."""
    seen: list[tuple[Tensor, str]] = []
    groups: dict[str, list[str]] = {}

    def watch(name: str) -> Callable:
        def note(linear: nn.Module, args: tuple) -> None:
            leader = next((first for tensor, first in seen if tensor is args[0]), None)
            if leader is None:
                seen.append((args[0], name))
            groups.setdefault(leader or name, []).append(name)

        return note

    with ExitStack() as hooks:
        for name, linear in linears.items():
            hooks.callback(linear.register_forward_pre_hook(watch(name)).remove)
        run()
    visited = {name for members in groups.values() for name in members}
    return groups | {name: [name] for name in linears if name not in visited}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
