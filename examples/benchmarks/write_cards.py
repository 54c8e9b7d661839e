"""Write the tables of model_cards/*.md from the result files they name.

A card marks a table by `<!-- results: PATH -->` and `<!-- end of results -->`; PATH is relative to this folder.
"""

import json
import re
from pathlib import Path


HERE = Path(__file__).parent
CARDS = HERE.parents[1] / "model_cards"
MARKED = re.compile(r"(<!-- results: (\S+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def table(path: Path) -> str:
    result = json.loads(path.read_text(encoding="utf-8"))
    lines = ["| measure | value | against | its value | ratio | setup |", "|---|---|---|---|---|---|"]
    lines += [
        f"| `{m['name']}` | {m['value']:.4g} {m['unit']} | {m['baseline']} | {m['baseline_value']:.4g} | "
        f"{m['ratio']:.3f} | {m['setup']} |"
        for m in result["measures"]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join([*lines, "", f"From `examples/benchmarks/{path.relative_to(HERE)}`: {versions}.", ""])


def written(card: str) -> str:
    return MARKED.sub(lambda match: match[1] + table(HERE / match[2]) + match[3], card)


if __name__ == "__main__":
    for path in sorted(CARDS.glob("*.md")):
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
