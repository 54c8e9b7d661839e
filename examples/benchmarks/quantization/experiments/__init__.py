"""The experiments of the quantization benchmark, one file a question."""
