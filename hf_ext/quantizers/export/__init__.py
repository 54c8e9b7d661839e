"""Models with packed weights in the formats of other programs: GGUF for llama.cpp, the GPTQ layout for GPU servers."""

from .gguf import export_gguf
from .gptq import export_gptq


__all__ = ["export_gguf", "export_gptq"]
