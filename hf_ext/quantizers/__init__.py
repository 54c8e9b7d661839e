"""Low-bit quantization: one block-wise engine, one packed linear, one folder a method."""

# First of all, whichever module is imported first: registration runs right after this import and loads the methods'
# modules, which must not be half imported themselves at that moment.
import transformers.quantizers.auto  # noqa: F401
