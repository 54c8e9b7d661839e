"""Every private symbol of another package that hf_ext uses, and every upstream method that it overrides.

These can change without a deprecation. `tests/upstream/test_contracts.py` checks that each exists with the parameters
written here, so that a new release fails there first and says why the symbol matters. What the `ops` layer uses is
listed all the same, although that layer may not import this one.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class UpstreamSymbol:
    """One upstream symbol on which hf_ext relies.

    Args:
        package (`str`): The distribution that holds it.
        versions (`str`): The releases in which it is known to be as written here, as a version specifier.
        path (`str`): `"module:attribute.attribute"`.
        why (`str`): What hf_ext does with it.
        parameters (`tuple[str, ...]`, *optional*): The parameter names, with `*` and `**` where upstream writes them.
            `None` where the symbol is not called.
    """

    package: str
    versions: str
    path: str
    why: str
    parameters: tuple[str, ...] | None = None


def _transformers(path: str, why: str, *parameters: str) -> UpstreamSymbol:
    return UpstreamSymbol("transformers", ">=5.24,<6", f"transformers.{path}", why, parameters or None)


def _quantizer(method: str, why: str, *parameters: str) -> UpstreamSymbol:
    return _transformers(f"quantizers.base:HfQuantizer.{method}", why, "self", *parameters)


def _peft(path: str, why: str, *parameters: str) -> UpstreamSymbol:
    return UpstreamSymbol("peft", ">=0.21,<1", f"peft.{path}", why, parameters or None)


def _trl(path: str, why: str, *parameters: str) -> UpstreamSymbol:
    return UpstreamSymbol("trl", ">=1.16,<2", f"trl.{path}", why, parameters or None)


def _module(method: str, why: str, *parameters: str) -> UpstreamSymbol:
    return UpstreamSymbol("torch", ">=2.6,<3", f"torch.nn.modules.module:Module.{method}", why, ("self", *parameters))


def _aten(name: str, why: str, *parameters: str) -> UpstreamSymbol:
    return UpstreamSymbol("torch", ">=2.6,<3", f"torch:ops.aten.{name}.default", why, parameters)


UPSTREAM = (
    _transformers("quantizers.auto:AUTO_QUANTIZATION_CONFIG_MAPPING", "asked who holds a quant_method"),
    _transformers("quantizers.auto:AUTO_QUANTIZER_MAPPING", "asked who holds a quant_method"),
    _transformers("quantizers.auto:register_quantization_config", "registers a config class", "method"),
    _transformers("quantizers.auto:register_quantizer", "registers a quantizer class", "name"),
    _transformers("quantizers.base:get_keys_to_not_convert", "the modules that stay float", "model"),
    _transformers("quantizers.quantizers_utils:should_convert_module", "matches names", "full_name", "patterns"),
    _transformers("pytorch_utils:Conv1D", "its weight lies transposed", "nf", "nx"),
    _quantizer("_process_model_before_weight_loading", "swaps linears before a checkpoint loads", "model", "**kwargs"),
    _quantizer("_process_model_after_weight_loading", "quantizes once float weights are loaded", "model", "**kwargs"),
    _quantizer("_dequantize", "turns low-bit linears back into float ones", "model", "dtype"),
    _quantizer("get_new_dtype", "keeps packed codes and scales as stored", "converter", "param", "dtype"),
    _quantizer("get_state_dict_and_metadata", "writes what a fresh process needs", "model"),
    _peft(
        "tuners.tuners_utils:_maybe_include_all_linear_layers",
        'wrapped, so that "all-linear" means low-bit linears too',
        "peft_config",
        "model",
    ),
    UpstreamSymbol(
        "torch", ">=2.6,<3", "torch:ops.onednn.qconv2d_pointwise.default", "dequantizes a block of bf16 weights"
    ),
    UpstreamSymbol("torch", ">=2.6,<3", "torch:ops.onednn.qconv_prepack.default", "packs the ones it multiplies by"),
    _peft("tuners.lora.model:dispatch_default", "replaced by one that knows low-bit linears"),
    _peft(
        "tuners.lora.layer:dispatch_default",
        "asked after our own dispatch",
        "target",
        "adapter_name",
        "config",
        "parameter_name",
        "**kwargs",
    ),
    _peft(
        "tuners.lora.layer:LoraLayer.update_layer",
        "makes the adapter of a low-bit linear",
        "self",
        "adapter_name",
        "r",
        "lora_alpha",
        "config",
        "**kwargs",
    ),
    _peft(
        "tuners.lora.layer:LoraLayer._get_in_out_features",
        "a low-bit linear has no weight to read its shape from",
        "self",
        "module",
    ),
    _module("_apply", "keeps scales in float32 when a model is cast", "fn", "recurse"),
    _module(
        "_load_from_state_dict",
        "drops what was derived from the codes of before",
        "state_dict",
        "prefix",
        "local_metadata",
        "strict",
        "missing_keys",
        "unexpected_keys",
        "error_msgs",
    ),
    _aten("_convert_weight_to_int4pack_for_cpu", "packs 4-bit codes for the CPU kernel", "self", "innerKTiles"),
    _aten(
        "_weight_int4pack_mm_for_cpu",
        "4-bit matrix product on the CPU",
        "self",
        "mat2",
        "qGroupSize",
        "qScaleAndZeros",
    ),
    UpstreamSymbol(
        "gguf",
        ">=0.17,<1",
        "gguf.gguf_writer:GGUFWriter.add_tensor_info",
        "writes tensors of types that the package does not know: the number is taken as it is, and the shape too",
        ("self", "name", "tensor_shape", "tensor_dtype", "tensor_nbytes", "raw_dtype"),
    ),
    _transformers(
        "integrations.gguf.gguf_tokenizer_mapping:GGUF_PRE_TOKENIZER_SPLITS", "the splits that llama.cpp's names mean"
    ),
    UpstreamSymbol(
        "torch",
        ">=2.6,<3",
        "torch.cpu:_is_amx_tile_supported",
        "trains in bfloat16 on a CPU only where its products are fast",
    ),
    _transformers("modeling_rope_utils:ROPE_INIT_FUNCTIONS", "the frequencies of a scaled rotation"),
    _aten("_weight_int8pack_mm", "8-bit matrix product on the CPU", "self", "mat2", "scales"),
    _trl(
        "trainer.sft_trainer:SFTTrainer.compute_loss",
        "called with a function for the model, which it only calls; sums the log_probs that return",
        "self",
        "model",
        "inputs",
        "return_outputs",
        "num_items_in_batch",
    ),
    _transformers(
        "trainer:Trainer.get_batch_samples",
        "the batches of a step get what the loss of all of them needs",
        "self",
        "epoch_iterator",
        "num_batches",
        "device",
    ),
    _trl("trainer.sft_trainer:SFTTrainer.log", "averages what lies in _metrics", "self", "logs", "start_time"),
    _trl(
        "trainer.utils:add_fused_lm_head",
        "called once more where a loss needs further statistics of the distribution",
        "model",
        "temperature",
        "cast_lm_head_to_fp32",
        "outputs",
    ),
    _trl("trainer.utils:FusedCausalLMOutput", "extended by the divergence from a reference"),
    _trl("trainer.utils:use_adapter", "the reference of a model with adapters", "model", "adapter_name"),
    _trl("models.utils:prepare_deepspeed", "prepares the reference", "model", "accelerator"),
    _trl("models.utils:prepare_fsdp", "prepares the reference", "model", "accelerator"),
    _trl("models.utils:_ForwardRedirection", "runs a loss inside the forward of a wrapped model"),
    _trl(
        "kernels.chunked_divergence:ChunkedDivergenceFunction.forward",
        "divergence of two distributions from hidden states, in tiles",
        "ctx",
        "student_hidden",
        "student_weight",
        "student_bias",
        "teacher_hidden",
        "teacher_weight",
        "teacher_bias",
        "beta",
        "temperature",
        "student_logit_scale",
        "student_final_logit_softcapping",
        "teacher_logit_scale",
        "teacher_final_logit_softcapping",
    ),
)
