"""The door: `from_pretrained(..., quantization_config=...)`, and `quantize` for a model already in memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer

from .. import __version__
from ..core.fingerprint import model_fingerprint, tensor_digest
from ..core.modules import replace_module
from .blockwise import BlockMethod, LayerResult, quantize_blockwise
from .calibration import load_calibration
from .checkpoint import RunCheckpoint
from .low_bit_linear import LowBitLinear
from .packed_linear import PackedLinear
from .plan import QuantizationPlan, fuse_experts, plan_quantization, slice_experts
from .report import LayerReport, QuantizationReport
from .windows import WindowMethod, quantize_windows


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .base_config import LowBitConfig


logger = logging.getLogger(__name__)


class LowBitQuantizer(HfQuantizer):
    """Quantizes a model after its float weights have loaded, or builds the low-bit skeleton a checkpoint loads into.

    A method subclasses it and answers `build_method`.
    """

    requires_calibration = False
    quantization_config: LowBitConfig

    def __init__(self, quantization_config: LowBitConfig, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        self.report: QuantizationReport | None = None
        self._rows: list[Tensor] = []

    def build_method(self) -> BlockMethod | WindowMethod:
        """Return the method that an engine runs, with the options of `self.quantization_config`."""
        raise NotImplementedError(f"{type(self).__name__} must say what it runs: override build_method")

    def make_layer(self, linear: nn.Module, packed: Any) -> nn.Module:
        """Return the layer that takes the place of `linear`, with the weight `packed`."""
        return LowBitLinear.from_packed(linear, packed)

    def skeleton_layer(self, name: str, linear: nn.Module) -> nn.Module:
        """Return an empty layer in place of `linear`, whose full name is `name`, for a checkpoint to load into."""
        return LowBitLinear.skeleton(linear, self.quantization_config.bits, self.quantization_config.group_size)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        """Find every reason to refuse before weights load; on a quantized checkpoint, build its skeleton."""
        config = self.quantization_config
        if self.pre_quantized:
            plan = plan_quantization(model, config)
            slice_experts(model, plan)
            self._build_skeleton(model, plan.targets)
            check_files(checkpoint_files or [], model, config)
        else:
            plan_quantization(model, config)
            if config.needs_data:
                with torch.device("cpu"):  # the skeleton is being built under the meta device
                    self._rows = load_calibration(config, model)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        if self.pre_quantized:
            check_all_loaded(model)
        else:
            self.report = self._quantize(model)
            self._rows = []
            self.quantization_config = self.quantization_config.without_run()
            model.config.quantization_config = self.quantization_config
        return model

    def _quantize(self, model: PreTrainedModel) -> QuantizationReport:
        def install(name: str, result: LayerResult) -> None:
            replace_module(model, name, self.make_layer(model.get_submodule(name), result.packed))

        return _run(model, self.quantization_config, self.build_method(), self._rows, install)

    def _build_skeleton(self, model: PreTrainedModel, targets: list[str]) -> None:
        for name in targets:
            replace_module(model, name, self.skeleton_layer(name, model.get_submodule(name)))
            # Some models initialise a linear's weight from the module that holds it; here it has none. All tensors
            # come from the checkpoint, or `check_all_loaded` raises.
            parent = model.get_submodule(name.rpartition(".")[0])
            parent._is_hf_initialized = not list(parent.buffers(recurse=False))

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
        if isinstance(dtype, str):  # save_pretrained leaves the name of the dtype in the config
            dtype = getattr(torch, dtype)
        for name, module in list(model.named_modules()):
            if isinstance(module, PackedLinear):
                replace_module(model, name, module.to_float(dtype))
        fuse_experts(model)
        return model.to(dtype)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters train on top; the packed weights do not."""
        return True


def quantize(model: PreTrainedModel, config: LowBitConfig) -> QuantizationReport:
    """Quantize `model` in place, and leave it as `from_pretrained(..., quantization_config=config)` would.

    Args:
        model ([`~transformers.PreTrainedModel`]): a decoder-only model with its float weights.
        config ([`LowBitConfig`]): a method's config, with `dataset` and, for text, `tokenizer`.

    Returns:
        [`QuantizationReport`]: an entry for every linear, also kept as `model.hf_quantizer.report`.

    Raises:
        ValueError: what cannot be quantized is refused before any weight changes. If the run itself is stopped, by an
            error or by Ctrl-C, the blocks already done are changed: load the model again, and go on with the same
            `checkpoint_dir` if there was one.
    """
    refuse_quantized(model)
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    with _unmarked_on_error(model, quantizer):
        quantizer.preprocess_model(model)
        model.hf_quantizer = quantizer
        quantizer.postprocess_model(model)
    return quantizer.report


def run_on_float_model(model: PreTrainedModel, config: LowBitConfig, method: BlockMethod) -> QuantizationReport:
    """Run a method that changes float weights in place and replaces no linear.

    Raises:
        ValueError: as [`quantize`].
    """
    refuse_quantized(model)
    rows = load_calibration(config, model)
    try:
        return _run(model, config, method, rows, lambda name, result: None)
    finally:
        fuse_experts(model)


def _run(
    model: PreTrainedModel,
    config: LowBitConfig,
    method: BlockMethod | WindowMethod,
    rows: list[Tensor],
    install: Callable[[str, LayerResult], None],
) -> QuantizationReport:
    refuse_offloaded(model)
    refuse_non_finite(model)
    plan = plan_quantization(model, config)
    if hasattr(method, "check_shapes"):
        method.check_shapes(plan.shapes)
    checkpoint = None
    if config.checkpoint_dir is not None:
        identity = run_identity(model, config, rows, method)
        checkpoint = RunCheckpoint(config.checkpoint_dir, identity, method.packed_types)
    slice_experts(model, plan)
    options = {}
    if method.needs_inputs:
        if hasattr(method, "observe"):
            warn_if_few_tokens(plan, rows)
        options = {"batch_size": config.batch_size, "offload_dir": config.offload_dir}
    engine = quantize_windows if hasattr(method, "windows") else quantize_blockwise
    report = engine(model, rows, method, plan.targets, install, checkpoint=checkpoint, **options)
    report.layers.extend(LayerReport(name, "skipped", *why) for name, why in plan.skipped.items())
    logger.info(report.summary())
    return report


def refuse_quantized(model: PreTrainedModel) -> None:
    held = getattr(model, "hf_quantizer", None)
    if held is not None:
        raise ValueError(
            f"{type(model).__name__} is already quantized with {held.quantization_config.quant_method!r}; "
            "call model.dequantize() first, or load the float checkpoint."
        )
    done = next((name for name, module in model.named_modules() if isinstance(module, PackedLinear)), None)
    if done is not None:
        raise ValueError(
            f"{done} is low-bit already: an earlier run on this model was stopped half-way. Load the float checkpoint "
            "again; with the same checkpoint_dir the run goes on where it stopped."
        )


@contextmanager
def _unmarked_on_error(model: PreTrainedModel, quantizer: HfQuantizer) -> Iterator[None]:
    try:
        yield
    except BaseException:
        quantizer.remove_quantization_config(model)
        model.config._is_quantized = False
        fuse_experts(model)
        raise


def run_identity(
    model: PreTrainedModel, config: LowBitConfig, rows: list[Tensor], method: BlockMethod | WindowMethod
) -> dict[str, Any]:
    """Return all that decides the bytes of a run's result."""
    return {
        "method": method.name,
        "hf_ext": __version__,
        "model": model_fingerprint(model),
        "calibration": tensor_digest(rows),
        **{name: getattr(config, name) for name in ("batch_size", "seed") if hasattr(config, name)},
        **getattr(method, "identity", {}),
        **config.to_dict(),
    }


def refuse_offloaded(model: nn.Module) -> None:
    """Raise `ValueError` if weights of `model` are not in memory: the engine reads and writes them in place."""
    absent = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    if absent:
        raise ValueError(
            f"{len(absent)} weights are offloaded to disk, {absent[0]} first; quantization needs them in memory. Load "
            "without offloading: a device_map that fits, or a smaller dtype."
        )


def refuse_non_finite(model: nn.Module) -> None:
    """Raise `ValueError` naming the first weight of `model` that holds NaN or infinite values."""
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ValueError(
                f"{name} holds NaN or infinite values; nothing was changed. Check the checkpoint, or load it in "
                "a dtype that holds its values: dtype=torch.float32."
            )


def warn_if_few_tokens(plan: QuantizationPlan, rows: list[Tensor]) -> None:
    tokens = sum(map(len, rows))
    widest = max(width for _, width in plan.shapes.values())
    if tokens < widest:
        logger.warning(
            "The calibration set has %d tokens, fewer than the %d columns of the widest linear: its statistics are "
            "singular, and directions no token happened to use look free to change. Use at least %d tokens.",
            tokens,
            widest,
            8 * widest,
        )


def check_files(checkpoint_files: list[str], model: PreTrainedModel, config: LowBitConfig) -> None:
    """Read the headers of a checkpoint's files.

    Raises:
        OSError: a file is cut short or damaged. ValueError: a packed tensor has another shape than `config` says.
    """
    expected = {name: list(buffer.shape) for name, buffer in model.named_buffers()}
    given = ", ".join(f"{name}={value!r}" for name, value in config.changed_options().items()) or "the defaults"
    for path in checkpoint_files:
        if not str(path).endswith(".safetensors"):
            continue
        try:
            with safe_open(path, framework="pt") as file:
                shapes = {name: file.get_slice(name).get_shape() for name in file.keys() if name in expected}  # noqa: SIM118
        except SafetensorError as error:
            raise OSError(
                f"{path} is truncated or damaged ({error}). Download or save the checkpoint again."
            ) from error
        for name, shape in shapes.items():
            if shape != expected[name]:
                raise ValueError(
                    f"{name} is {shape} in {path}, but {given} of the stored quantization_config need "
                    f"{expected[name]}: config.json and the weights must come from one save_pretrained call."
                )


def check_all_loaded(model: PreTrainedModel) -> None:
    """Raise `ValueError` if a tensor of `model` did not come from the checkpoint.

    Transformers would only warn, and the model would run on random weights.
    """
    tied = set(model.all_tied_weights_keys)
    absent = [
        name
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in tied and not getattr(tensor, "_is_hf_initialized", False)
    ]
    if absent:
        shown = ", ".join(absent[:3]) + (f" and {len(absent) - 3} more" if len(absent) > 3 else "")
        raise ValueError(
            f"The checkpoint does not hold {shown}. Its quantization_config does not describe its tensors: "
            "config.json and the weights must come from one save_pretrained call."
        )
