"""RoPE-perturbed self-distillation: predictions that do not hang on absolute distances (arXiv 2604.14339)."""

__all__: list[str] = []
