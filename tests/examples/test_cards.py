"""No number in a card that its result file does not hold."""

import importlib.util
import json
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]
CARDS = sorted((ROOT / "model_cards").glob("*.md"))
RESULTS = sorted((ROOT / "examples" / "benchmarks").glob("*/results/*.json"))
COSTS = ("_ppl", "_drift", "_seconds", "_rss_ratio", "_error", "_time", "_memory", "_overhead")
FIELDS = {
    "name",
    "value",
    "unit",
    "baseline",
    "baseline_value",
    "ratio",
    "higher_is_better",
    "seeds",
    "spread",
    "setup",
}


def load_writer():
    path = ROOT / "examples" / "benchmarks" / "write_cards.py"
    spec = importlib.util.spec_from_file_location("write_cards", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.name)
def test_a_card_is_what_its_result_files_give(path):
    card = path.read_text(encoding="utf-8")
    assert "<!-- results:" in card
    assert load_writer().written(card) == card, "run python examples/benchmarks/write_cards.py"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_a_result_file_keeps_the_contract(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    assert result["versions"] and result["measures"]
    for measure in result["measures"]:
        assert set(measure) == FIELDS
        assert measure["ratio"] == pytest.approx(measure["value"] / measure["baseline_value"])
        cost = measure["name"].partition("/")[0].endswith(COSTS)
        assert measure["higher_is_better"] != cost, measure["name"]
