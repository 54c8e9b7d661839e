"""The model card says what the checkpoint is, in words and in metadata that the Hub reads."""

import ast
import re

from huggingface_hub import ModelCard

from hf_ext import LittleBit2Config, OSAQConfig
from hf_ext.hub.cards import QuantizedSizes, quantized_card


CONFIG = OSAQConfig(bits=3, group_size=64)


def card_of(source, base_model):
    sizes = QuantizedSizes(float_bytes=538_000_000, quantized_bytes=160_000_000)
    return quantized_card("out", str(source), base_model, CONFIG, sizes, "osaq: 210 linears quantized")


def test_metadata_survives_the_file(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Base\n")
    card_of(tmp_path, "org/base").save(tmp_path / "card.md")
    data = ModelCard.load(tmp_path / "card.md").data
    assert (data.base_model, data.license, data.base_model_relation) == ("org/base", "apache-2.0", "quantized")
    assert data.tags == ["hf_ext", "osaq", "3-bit"]


def test_a_start_that_is_no_model_says_so(tmp_path):
    start = quantized_card("out", "m", None, LittleBit2Config(), QuantizedSizes(2, 1), "done")
    assert "is an initialisation" in start.text and "is an initialisation" not in card_of(tmp_path, None).text


def test_unknown_licence_and_base_stay_out(tmp_path):
    card = card_of(tmp_path, None)
    assert card.data.license is None and card.data.base_model is None
    assert tmp_path.name in card.text


def test_snippet_imports_hf_ext_before_it_loads(tmp_path):
    text = card_of(tmp_path, None).text
    snippet = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    first = ast.parse(snippet).body[0]
    assert first.names[0].name == "hf_ext"
    for part in ("160.0 MB", "538.0 MB", "`group_size` | 64"):
        assert part in text
