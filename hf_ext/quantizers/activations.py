"""The inputs of decoder blocks on the calibration set, in memory or on disk, and how to run a block on them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ActivationStore:
    """Numbered tensors in memory, or in a folder of their own under `offload_dir` that is removed at the end."""

    def __init__(self, offload_dir: str | None):
        self._memory: dict[int, Tensor] = {}
        self._offload_dir = offload_dir
        self._folder: Path | None = None

    def __enter__(self) -> ActivationStore:
        if self._offload_dir is not None:
            Path(self._offload_dir).mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix="activations-", dir=self._offload_dir))
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._memory.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __setitem__(self, number: int, tensor: Tensor) -> None:
        if self._folder is None:
            self._memory[number] = tensor
        else:
            save_file({"hidden_states": tensor.contiguous()}, self._folder / f"{number}.safetensors")

    def __getitem__(self, number: int) -> Tensor:
        if self._folder is None:
            return self._memory[number]
        return load_file(self._folder / f"{number}.safetensors")["hidden_states"]


@dataclass
class Batch:
    """One calibration batch at one block: its `hidden_states` `[rows, length, hidden]` and how to run the block."""

    block: nn.Module
    hidden_states: Tensor
    args: tuple
    kwargs: dict[str, Any]

    def run(self) -> Tensor:
        output = self.block(self.hidden_states, *self.args, **self.kwargs)
        return output[0] if isinstance(output, tuple) else output


class BlockInputs:
    """The calibration set in front of one block of `blocks`: iterate for its batches, `advance` to the next block."""

    def __init__(self, model: PreTrainedModel, blocks: nn.ModuleList, batches: list[Tensor], store: ActivationStore):
        self.blocks = blocks
        self.store = store
        self.shapes = [tuple(batch.shape) for batch in batches]
        self.index = 0
        _refuse_data_dependence(model, blocks, batches[0])
        # Rows have no padding, so what the model hands its blocks depends on the shape of a batch alone.
        self._arguments = {
            shape: _block_arguments(model, blocks, batch)
            for shape, batch in {tuple(batch.shape): batch for batch in batches}.items()
        }
        for number, batch in enumerate(batches):
            store[number] = _first_hidden_states(model, blocks, batch)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self.shapes)):
            yield self._batch(number)

    def _batch(self, number: int) -> Batch:
        return self._batch_at(self.index, number, self.store[number])

    def _batch_at(self, index: int, number: int, hidden_states: Tensor) -> Batch:
        args, kwargs = self._arguments[self.shapes[number]][index]
        block = self.blocks[index]
        device = next(block.parameters()).device
        return Batch(block, hidden_states.to(device), args, kwargs)

    def __len__(self) -> int:
        """Batches of the calibration set."""
        return len(self.shapes)

    def run(self, number: int, stop: int) -> Tensor:
        """The output of the blocks from the current one up to `stop` on batch `number`."""
        hidden_states = self.store[number]
        for index in range(self.index, stop):
            hidden_states = self._batch_at(index, number, hidden_states).run()
        return hidden_states

    def keep_output(self, number: int, output: Tensor) -> None:
        """Make `output` of the current block the input of the next one, for a later `advance(rerun=False)`."""
        self.store[number] = output

    def advance(self, *, rerun: bool) -> None:
        """Step behind the current block, running it on every batch unless all outputs were kept."""
        if rerun:
            for number in range(len(self.shapes)):
                self.store[number] = self._batch(number).run()
        self.index += 1


class _Stop(Exception):
    """Ends a forward once the wanted tensor has been seen."""


Arguments = list[tuple[tuple, dict[str, Any]]]


def _split(args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, tuple, dict[str, Any]]:
    if args:
        return args[0], args[1:], kwargs
    kwargs = dict(kwargs)
    return kwargs.pop("hidden_states"), (), kwargs


def _run(model: PreTrainedModel, input_ids: Tensor) -> None:
    device = model.get_input_embeddings().weight.device
    model.base_model(input_ids=input_ids.to(device), use_cache=False)


def _first_hidden_states(model: PreTrainedModel, blocks: nn.ModuleList, input_ids: Tensor) -> Tensor:
    found: list[Tensor] = []

    def stop(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        found.append(_split(args, kwargs)[0])
        raise _Stop

    handle = blocks[0].register_forward_pre_hook(stop, with_kwargs=True)
    try:
        _run(model, input_ids)
    except _Stop:
        pass
    finally:
        handle.remove()
    return found[0]


def _block_arguments(model: PreTrainedModel, blocks: nn.ModuleList, input_ids: Tensor) -> Arguments:
    """Return what each block is called with beside the hidden states: masks and positions may differ by block."""
    arguments: Arguments = []

    def note(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        arguments.append(_split(args, kwargs)[1:])

    with ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(note, with_kwargs=True).remove)
        _run(model, input_ids)
    return arguments


def _refuse_data_dependence(model: PreTrainedModel, blocks: nn.ModuleList, input_ids: Tensor) -> None:
    """Raise if a block takes an argument, beside the hidden states, that depends on the tokens."""
    probe = input_ids[:1, :4]
    for first, second in zip(
        _block_arguments(model, blocks, probe), _block_arguments(model, blocks, probe.flip(1)), strict=True
    ):
        for name, value in first[1].items():
            other = second[1].get(name)
            if isinstance(value, Tensor) and isinstance(other, Tensor) and not torch.equal(value, other):
                raise ValueError(
                    f"The decoder blocks of {type(model).__name__} take {name!r}, which depends on the tokens; "
                    "block-by-block quantization cannot replay it, so this model is not supported."
                )
