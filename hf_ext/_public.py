"""The two tables from which hf_ext's public names and its quantizers are found.

Nothing is imported here: a name costs its imports when it is first used.
"""

# Public name -> the module that defines or re-exports it.
PUBLIC = {
    "LowBitLinear": "hf_ext.quantizers.low_bit_linear",
    "OSAQConfig": "hf_ext.quantizers.osaq",
    "QuantizationReport": "hf_ext.quantizers.report",
    "absorb_outliers": "hf_ext.quantizers.osaq",
    "demo_model": "hf_ext.hub.demo_model",
    "perplexity": "hf_ext.evaluation.perplexity",
    "quantize": "hf_ext.quantizers.base",
}

# `quant_method` in a checkpoint's config.json -> where its config class and its quantizer class are defined.
QUANTIZERS = {
    "osaq": ("hf_ext.quantizers.osaq.config:OSAQConfig", "hf_ext.quantizers.osaq.quantizer:OSAQQuantizer"),
}
