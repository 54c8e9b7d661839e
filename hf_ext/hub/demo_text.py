"""Text for the demo: WikiText-2 where it is in reach, else text that the model writes itself."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import StoppingCriteria


if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


WIKITEXT_ID = "Salesforce/wikitext"
WIKITEXT_SPLITS = {"calibration": "validation", "held_out": "test"}
DATA_FILES = {"calibration": "wikitext-2-valid.txt", "held_out": "wikitext-2-test.txt"}
HUB_TIMEOUT = 3.0  # seconds until the first answer
CALIBRATION_ROWS, HELD_OUT_ROWS, ROW_TOKENS = 16, 4, 512


@dataclass(frozen=True)
class DemoText:
    """Token rows to calibrate with, token ids `[tokens]` to measure on, the window for these, and their source."""

    calibration: Tensor
    held_out: Tensor
    sequence_length: int
    source: str


def demo_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> DemoText:
    """Return calibration and held-out text: the folder `HF_EXT_DATA`, else the Hub, else sampled from `model`.

    Sampled text needs no data at all (the idea of LLM-QAT, https://huggingface.co/papers/2305.17888). A perplexity on
    it tells how far a model moved from the one that wrote it; it is no measure of the model on people's text.
    """
    for find_texts, source in ((_local_texts, "WikiText-2"), (_hub_texts, "WikiText-2 (raw)")):
        if texts := find_texts():
            rows = tokenizer(texts["calibration"], return_tensors="pt", verbose=False)["input_ids"][0]
            rows = rows[: CALIBRATION_ROWS * ROW_TOKENS].view(CALIBRATION_ROWS, ROW_TOKENS)
            held_out = tokenizer(texts["held_out"], return_tensors="pt", verbose=False)["input_ids"][0]
            return DemoText(rows, held_out[: 2 * HELD_OUT_ROWS * ROW_TOKENS], 2 * ROW_TOKENS, source)
    rows = sample_text(model, CALIBRATION_ROWS + HELD_OUT_ROWS, ROW_TOKENS, seed)
    calibration, held_out = rows.split([CALIBRATION_ROWS, HELD_OUT_ROWS])
    return DemoText(calibration, held_out.reshape(-1), ROW_TOKENS, "text sampled from the float model")


def sample_text(model: PreTrainedModel, num_samples: int, sequence_length: int, seed: int = 0) -> Tensor:
    """Return token ids `[num_samples, sequence_length]` that `model` writes from random first tokens at temperature 1.

    The global random state is left as it was.
    """
    generator = torch.Generator().manual_seed(seed)
    vocab_size = model.get_input_embeddings().num_embeddings
    first = torch.randint(vocab_size, (num_samples, 1), generator=generator).to(model.device)
    devices = [model.device] if model.device.type == "cuda" else []
    bar = tqdm(total=sequence_length - 1, desc="sampling text", unit="token", delay=5)
    with torch.random.fork_rng(devices=devices), bar:
        torch.manual_seed(seed)
        return model.generate(
            first,
            attention_mask=torch.ones_like(first),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            repetition_penalty=1.0,
            min_length=sequence_length,  # rows of one length: no end of text before
            max_length=sequence_length,
            stopping_criteria=[_Progress(bar)],
        ).cpu()


class _Progress(StoppingCriteria):
    """Moves a progress bar on at every token, and stops nothing."""

    def __init__(self, bar: tqdm):
        self.bar = bar

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.bar.update()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _local_texts() -> dict[str, str] | None:
    if folder := os.environ.get("HF_EXT_DATA"):
        paths = {part: Path(folder) / name for part, name in DATA_FILES.items()}
        if all(path.is_file() for path in paths.values()):
            return {part: path.read_text(encoding="utf-8") for part, path in paths.items()}
    return None


def _hub_texts() -> dict[str, str] | None:
    from huggingface_hub import snapshot_download

    names = {part: f"wikitext-2-raw-v1/{split}-00000-of-00001.parquet" for part, split in WIKITEXT_SPLITS.items()}
    try:
        import pyarrow.parquet

        # Unlike the download of one file, it does not retry for half a minute where there is no network.
        folder = snapshot_download(
            WIKITEXT_ID, repo_type="dataset", allow_patterns=list(names.values()), etag_timeout=HUB_TIMEOUT
        )
        tables = {part: pyarrow.parquet.read_table(Path(folder) / name)["text"] for part, name in names.items()}
    except Exception:  # whatever keeps the set away, sampled text comes next
        return None
    return {part: "".join(table.to_pylist()) for part, table in tables.items()}
