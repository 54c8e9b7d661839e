"""Quantize a model with OSAQ to 3 bits a weight, save it, load it again, and see what it cost.

python examples/osaq.py                      # SmolLM2-135M-Instruct, a few CPU minutes
python examples/osaq.py --model Qwen/Qwen3-0.6B --calibration wikitext2
python examples/osaq.py --toy                # a random model, seconds
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_ext
from hf_ext import OSAQConfig


TEXT = """Quantization stores the weights of a language model with few bits. A grid is laid over each group of
weights, and every weight is moved to the nearest point of the grid. One large weight widens the grid of its group,
and all the others lose precision to it. Such outliers can be absorbed first: a weight matrix may be changed along
directions that its inputs never use, so that the largest weights shrink while the output stays as it was."""


def toy_model(folder: str) -> str:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def folder_megabytes(folder: str | Path) -> float:
    return sum(path.stat().st_size for path in Path(folder).glob("*.safetensors")) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo", help="a model, or `demo`")
    parser.add_argument("--calibration", help="a text file or a data set's name; default: a few sentences")
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--group-size", type=int, default=-1)
    parser.add_argument("--toy", action="store_true")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as workspace:
        if arguments.toy:
            path, tokenizer = toy_model(f"{workspace}/toy"), None
            calibration = torch.randint(0, 256, (8, 64))
            held_out = torch.randint(0, 256, (256,))
        else:
            path = hf_ext.demo_model() if arguments.model == "demo" else arguments.model
            tokenizer = AutoTokenizer.from_pretrained(path)
            calibration = arguments.calibration or [TEXT]
            held_out = TEXT

        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        before = hf_ext.perplexity(model, tokenizer, held_out, sequence_length=128)
        model.save_pretrained(f"{workspace}/float")

        for title, options in (("plain rounding", {"max_null_ratio": 0.0}), ("OSAQ", {})):
            config = OSAQConfig(
                bits=arguments.bits,
                group_size=arguments.group_size,
                rounding="rtn",
                dataset=calibration,
                tokenizer=tokenizer,
                sequence_length=128,
                **options,
            )
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=config)
            model.save_pretrained(f"{workspace}/quantized")
            model = AutoModelForCausalLM.from_pretrained(f"{workspace}/quantized")  # `import hf_ext` is all it needs
            after = hf_ext.perplexity(model, tokenizer, held_out, sequence_length=128)
            size = folder_megabytes(f"{workspace}/quantized") / folder_megabytes(f"{workspace}/float")
            print(f"{title}: perplexity {before:.2f} -> {after:.2f}, size on disk {size:.0%} of the float model")


if __name__ == "__main__":
    main()
