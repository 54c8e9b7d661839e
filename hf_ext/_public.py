"""The tables from which hf_ext's public names, what they need, and its quantizers are found.

Nothing is imported here: a name costs its imports when it is first used.
"""

# Public name -> the module that defines or re-exports it.
PUBLIC = {
    "CatQConfig": "hf_ext.quantizers.catq",
    "LittleBit2Config": "hf_ext.quantizers.littlebit2",
    "LittleBit2Trainer": "hf_ext.quantizers.littlebit2.trainer",
    "LowBitLinear": "hf_ext.quantizers.low_bit_linear",
    "OSAQConfig": "hf_ext.quantizers.osaq",
    "QuantizationReport": "hf_ext.quantizers.report",
    "RopeDistillationConfig": "hf_ext.trainers.rope_distillation.config",
    "RopeDistillationTrainer": "hf_ext.trainers.rope_distillation.trainer",
    "SAFTConfig": "hf_ext.trainers.saft.config",
    "SAFTTrainer": "hf_ext.trainers.saft.trainer",
    "absorb_outliers": "hf_ext.quantizers.osaq",
    "demo_model": "hf_ext.hub.demo_model",
    "export_gguf": "hf_ext.quantizers.export",
    "export_gptq": "hf_ext.quantizers.export",
    "pack": "hf_ext.quantizers.littlebit2",
    "perplexity": "hf_ext.evaluation.perplexity",
    "quantize": "hf_ext.quantizers.base",
    "saft_loss": "hf_ext.trainers.saft",
    "saft_weight": "hf_ext.trainers.saft",
}

# An optional package that the module of a public name imports -> the extra that brings it.
EXTRAS = {"trl": "train"}

# `quant_method` in a checkpoint's config.json -> where its config class and its quantizer class are defined.
QUANTIZERS = {
    "catq": ("hf_ext.quantizers.catq.config:CatQConfig", "hf_ext.quantizers.catq.quantizer:CatQQuantizer"),
    "littlebit2": (
        "hf_ext.quantizers.littlebit2.config:LittleBit2Config",
        "hf_ext.quantizers.littlebit2.quantizer:LittleBit2Quantizer",
    ),
    "osaq": ("hf_ext.quantizers.osaq.config:OSAQConfig", "hf_ext.quantizers.osaq.quantizer:OSAQQuantizer"),
}
