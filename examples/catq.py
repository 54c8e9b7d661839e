"""Make a model ternary with CAT-Q, save it, load it again, write it as GGUF, and see what it cost.

python examples/catq.py                      # SmolLM2-135M-Instruct, CPU minutes: a shortened run
python examples/catq.py --model Qwen/Qwen3-0.6B --group-size 128 --calibration wikitext2 --epochs 60 --rows 512
python examples/catq.py --toy                # a random model, seconds
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_ext
from hf_ext import CatQConfig, export_gguf
from hf_ext.hub.demo_text import demo_text


def toy_model(folder: str) -> str:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def megabytes(*paths: Path) -> float:
    return sum(path.stat().st_size for path in paths) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo", help="a model, or `demo`")
    parser.add_argument("--calibration", help="a text file or a data set's name; default: the demo's text")
    parser.add_argument("--held-out", type=Path, help="a text file to measure on, with --calibration")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--toy", action="store_true")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as workspace:
        path, tokenizer = hf_ext.demo_model() if arguments.model == "demo" else arguments.model, None
        if arguments.toy:
            path = toy_model(f"{workspace}/toy")
            calibration, held_out = torch.randint(0, 256, (8, 64)), torch.randint(0, 256, (256,))
        else:
            tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if arguments.calibration:
            calibration, held_out = arguments.calibration, arguments.held_out.read_text(encoding="utf-8")
        elif not arguments.toy:
            text = demo_text(model, tokenizer)
            calibration, held_out = text.calibration, text.held_out
        before = hf_ext.perplexity(model, tokenizer, held_out, sequence_length=128, max_windows=16)
        model.save_pretrained(f"{workspace}/float")

        config = CatQConfig(
            preset="fast",
            group_size=arguments.group_size,
            epochs=arguments.epochs,
            num_samples=arguments.rows,
            dataset=calibration,
            tokenizer=tokenizer,
        )
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=config)
        print(model.hf_quantizer.report.summary())
        model.save_pretrained(f"{workspace}/ternary")
        model = AutoModelForCausalLM.from_pretrained(f"{workspace}/ternary")  # `import hf_ext` is all it needs
        after = hf_ext.perplexity(model, tokenizer, held_out, sequence_length=128, max_windows=16)
        export_gguf(model, f"{workspace}/model.gguf", "q2_0_g64", tokenizer=tokenizer)
        sizes = [megabytes(*Path(workspace, kind).glob("*.safetensors")) for kind in ("float", "ternary")]
        print(f"perplexity {before:.2f} -> {after:.2f}, {sizes[0]:.1f} MB -> {sizes[1]:.1f} MB")
        print(f"GGUF: {megabytes(Path(workspace, 'model.gguf')):.1f} MB")


if __name__ == "__main__":
    main()
