"""The engine for trained methods: walks a decoder in windows of blocks, trained to give the float blocks' outputs.

Two streams of activations run through the model: the float one makes the targets, and the quantized one, which has
passed only blocks that are finished, makes the inputs. Beside the model it holds both streams, which may lie on disk,
the targets of one window and the training state of its blocks. It knows a method only by the properties of
`WindowMethod`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..core.modules import decoder_blocks, linear_shape, named_linears, replace_module
from .activations import ActivationStore, BlockInputs
from .blockwise import LayerResult, evaluating, explaining_weight_readers, warn_of_notes
from .calibration import batches
from .report import LayerReport, QuantizationReport


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .checkpoint import RunCheckpoint


@dataclass
class Window:
    """A run of decoder blocks with what goes in and what should come out.

    Args:
        index (`int`), count (`int`): its place among all windows.
        linears (`dict[str, nn.Module]`): the trainable stand-ins of its linears, by full name.
        inputs (`BlockInputs`): the quantized stream in front of its first block.
        targets (`ActivationStore`): the float blocks' outputs, by batch.
        stop (`int`): the block behind its last.
        curve (`list[float]`): filled by `fit`: what to show of the training.
    """

    index: int
    count: int
    linears: dict[str, nn.Module]
    inputs: BlockInputs
    targets: ActivationStore
    stop: int
    progress: tqdm
    curve: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        """Batches of the calibration set."""
        return len(self.inputs)

    def forward(self, number: int) -> Tensor:
        """The window's output on batch `number`, with its linears as they are."""
        return self.inputs.run(number, self.stop)


class WindowMethod(Protocol):
    """A trained method as the engine sees it.

    `wrap` gives the stand-in of a linear: an `nn.Module` with the method's state as its state dict, which a resumed
    run loads again, and the float linear as `.linear`, outside of it. Windows may overlap, so one stand-in may be
    fitted more than once.
    """

    name: str
    needs_inputs: bool
    packed_types: tuple[type, ...]

    def windows(self, blocks: int) -> list[range]:
        """The windows in order; starts never go back, and together they cover `range(blocks)`."""

    def wrap(self, name: str, linear: nn.Module) -> nn.Module:
        """Return the trainable stand-in of `linear`, whose full name is `name`."""

    def bypass(self, linears: dict[str, nn.Module], bypassed: bool) -> None:
        """Let stand-ins compute what the float linears did, or what the quantized ones will."""

    def fit(self, window: Window) -> None:
        """Train the stand-ins of `window`."""

    def solve(self, stand_in: nn.Module) -> LayerResult:
        """Turn a stand-in into the result that is stored."""

    def steps(self, batches: int) -> int:
        """Training steps of one window, for the progress bar."""


def quantize_windows(
    model: PreTrainedModel,
    rows: list[Tensor],
    method: WindowMethod,
    targets: list[str],
    install: Callable[[str, LayerResult], None],
    *,
    batch_size: int = 8,
    offload_dir: str | None = None,
    checkpoint: RunCheckpoint | None = None,
) -> QuantizationReport:
    """Train the linears named in `targets`, window by window, in place; the arguments are `quantize_blockwise`'s.

    Returns:
        `QuantizationReport`: an entry for each target, and a curve for each window.

    Raises:
        ValueError: non-finite activations or losses, naming the window.
    """
    started = time.monotonic()
    report = QuantizationReport(method.name, calibration_tokens=sum(map(len, rows)))
    blocks_name, blocks = decoder_blocks(model)
    # Blocks behind the last one that changes need not be walked.
    count = 1 + max(int(name.removeprefix(f"{blocks_name}.").partition(".")[0]) for name in targets)
    schedule = method.windows(count)
    with torch.no_grad(), evaluating(model), _frozen(model), ExitStack() as stack:
        stores = [stack.enter_context(ActivationStore(offload_dir)) for _ in range(3)]
        calibration = list(batches(rows, batch_size))
        walk = _Walk(
            model, blocks_name, targets, method, install, report,
            BlockInputs(model, blocks, calibration, stores[0]),
            BlockInputs(model, blocks, calibration, stores[1]),
        )  # fmt: skip
        steps = method.steps(len(calibration))
        progress = stack.enter_context(tqdm(total=steps * len(schedule), desc=method.name, unit="step", delay=1.0))
        stack.callback(walk.restore)
        resumed = _finished(checkpoint, schedule, count) if checkpoint else 0
        for number, blocks_of_window in enumerate(schedule):
            following = _following(schedule, number, count)
            progress.set_description(f"{method.name} window {number + 1}/{len(schedule)}", refresh=False)
            if number < resumed:
                walk.resume(checkpoint, number, following, last=number + 1 == resumed)
                progress.update(steps)
                continue
            window = walk.open(number, len(schedule), blocks_of_window, stores[2], progress)
            if window.linears:
                method.fit(window)
            report.curves.append(window.curve)
            finished = walk.close(following)
            if checkpoint:
                for index, results in finished.items():
                    checkpoint.save_block(index, results)
                checkpoint.save_window(number, walk.state(), window.curve)
    report.seconds = time.monotonic() - started
    warn_of_notes(report)
    return report


def _following(schedule: list[range], number: int, count: int) -> int:
    """The first block that is not finished behind window `number`."""
    return schedule[number + 1].start if number + 1 < len(schedule) else count


def _finished(checkpoint: RunCheckpoint, schedule: list[range], count: int) -> int:
    """How many windows, from the first on, `checkpoint` holds with all the blocks that they finished."""
    for number in range(len(schedule)):
        blocks = range(_following(schedule, number, count))
        if not checkpoint.has_window(number) or not all(checkpoint.has_block(index) for index in blocks):
            return number
    return len(schedule)


@dataclass
class _Walk:
    """The two streams in front of the first unfinished block, and the stand-ins from there on."""

    model: PreTrainedModel
    blocks_name: str
    targets: list[str]
    method: WindowMethod
    install: Callable[[str, LayerResult], None]
    report: QuantizationReport
    float_stream: BlockInputs
    quantized_stream: BlockInputs
    stand_ins: dict[int, dict[str, nn.Module]] = field(default_factory=dict)

    def open(self, number: int, count: int, window: range, store: ActivationStore, progress: tqdm) -> Window:
        """Wrap the linears of `window`, and compute its targets."""
        for index in window:
            self._wrap(index)
        linears = {name: linear for index in window for name, linear in self.stand_ins[index].items()}
        self.method.bypass(linears, True)
        for batch in range(len(self.float_stream)):
            with explaining_weight_readers(list(linears)):
                target = self.float_stream.run(batch, window.stop)
            if not torch.isfinite(target).all():
                raise ValueError(
                    f"blocks {window.start} to {window.stop - 1} give NaN or infinite activations on calibration "
                    f"batch {batch}. The weights or the dtype overflow there: load with dtype=torch.float32."
                )
            store[batch] = target
        self.method.bypass(linears, False)
        return Window(number, count, linears, self.quantized_stream, store, window.stop, progress)

    def close(self, following: int) -> dict[int, dict[str, LayerResult]]:
        """Finish the blocks before `following`, and move both streams in front of it."""
        finished = {}
        while self.float_stream.index < following:
            index = self.float_stream.index
            stand_ins = self.stand_ins.pop(index)
            self.method.bypass(stand_ins, True)
            self.float_stream.advance(rerun=True)
            finished[index] = {name: self.method.solve(stand_in) for name, stand_in in stand_ins.items()}
            self._finish({name: stand_in.linear for name, stand_in in stand_ins.items()}, finished[index])
        return finished

    def resume(self, checkpoint: RunCheckpoint, number: int, following: int, *, last: bool) -> None:
        """Do what a finished window did, from its files."""
        while self.float_stream.index < following:
            index = self.float_stream.index
            self.float_stream.advance(rerun=True)
            self._finish(self._linears(index), checkpoint.load_block(index))
        state, curve = checkpoint.load_window(number)
        self.report.curves.append(curve)
        if last:
            for index, tensors in state.items():
                self._wrap(index)
                for name, linear in self.stand_ins[index].items():
                    linear.load_state_dict(tensors[name])

    def restore(self) -> None:
        """Put the float linears of unfinished blocks back: what a run that is stopped leaves there."""
        for stand_ins in self.stand_ins.values():
            for name, stand_in in stand_ins.items():
                replace_module(self.model, name, stand_in.linear)

    def state(self) -> dict[int, dict[str, dict[str, Tensor]]]:
        """The stand-ins' tensors, by block and name."""
        return {
            index: {name: stand_in.state_dict() for name, stand_in in stand_ins.items()}
            for index, stand_ins in self.stand_ins.items()
        }

    def _linears(self, index: int) -> dict[str, nn.Module]:
        block = self.float_stream.blocks[index]
        linears = {f"{self.blocks_name}.{index}.{name}": linear for name, linear in named_linears(block)}
        return {name: linear for name, linear in linears.items() if name in self.targets}

    def _wrap(self, index: int) -> None:
        if index not in self.stand_ins:
            linears = self._linears(index)
            self.stand_ins[index] = {name: self.method.wrap(name, linear) for name, linear in linears.items()}
            for name, linear in self.stand_ins[index].items():
                replace_module(self.model, name, linear)

    def _finish(self, linears: dict[str, nn.Module], results: dict[str, LayerResult]) -> None:
        for name, result in results.items():
            replace_module(self.model, name, linears[name])
            self.install(name, result)
            shape = linear_shape(linears[name])
            self.report.layers.append(LayerReport(name, "quantized", shape, result.note, result.metrics))
        self.quantized_stream.advance(rerun=True)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Keep the model's own parameters out of the gradients: only what a method adds is trained."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def shuffled(count: int, generator: torch.Generator) -> Iterator[int]:
    """The numbers below `count` in a random order."""
    yield from torch.randperm(count, generator=generator).tolist()
