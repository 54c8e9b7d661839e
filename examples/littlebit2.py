"""Take a model below one bit a weight with LittleBit-2: factorize it, distil it from itself, pack it, load it again.

python examples/littlebit2.py                      # SmolLM2-135M-Instruct, CPU minutes: the start of a training run
python examples/littlebit2.py --model Qwen/Qwen3-0.6B --text corpus.txt --steps 20000 --learning-rate 4e-5
python examples/littlebit2.py --toy                # a random model, seconds
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainingArguments

import hf_ext
from hf_ext import LittleBit2Config, LittleBit2Trainer, pack
from hf_ext.hub.demo_text import demo_text


def toy_model(folder: str) -> str:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="demo", help="a model, or `demo`")
    parser.add_argument("--text", help="a text file; its last tenth is held out. Default: the demo's text")
    parser.add_argument("--bits", type=float, default=0.55)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--hidden-loss-weight", type=float, default=0.0, help="the paper's is 10; see the Trainer")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--toy", action="store_true")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as workspace:
        path = hf_ext.demo_model() if arguments.model == "demo" else arguments.model
        if arguments.toy:
            path, arguments.steps = toy_model(f"{workspace}/toy"), 4
        teacher = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        if arguments.toy:
            tokens, held_out = torch.randint(0, 256, (4096,)), torch.randint(0, 256, (256,))
        elif arguments.text:
            text = Path(arguments.text).read_text(encoding="utf-8")
            tokens = AutoTokenizer.from_pretrained(path)(text, return_tensors="pt")["input_ids"][0]
            tokens, held_out = tokens.split([len(tokens) - len(tokens) // 10, len(tokens) // 10])
        else:
            text = demo_text(teacher, AutoTokenizer.from_pretrained(path))
            tokens, held_out = text.calibration.flatten(), text.held_out[:1024]
        rows = [{"input_ids": row} for row in tokens.split(arguments.sequence_length)[:-1]]

        def perplexity(model) -> float:
            return hf_ext.perplexity(model, None, held_out, sequence_length=arguments.sequence_length)

        config = LittleBit2Config(bits=arguments.bits, trainable=True)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=config)
        before, start = perplexity(teacher), perplexity(model)
        options = TrainingArguments(
            f"{workspace}/training",
            max_steps=arguments.steps,
            learning_rate=arguments.learning_rate,
            per_device_train_batch_size=2,
            lr_scheduler_type="cosine",
            warmup_steps=arguments.steps // 50,
            logging_steps=max(1, arguments.steps // 10),
            save_strategy="no",
            report_to="none",
        )
        weights = {"hidden_loss_weight": arguments.hidden_loss_weight}
        LittleBit2Trainer(model, teacher_model=teacher, args=options, train_dataset=rows, **weights).train()
        pack(model).save_pretrained(f"{workspace}/packed")

        model = AutoModelForCausalLM.from_pretrained(f"{workspace}/packed")  # `import hf_ext` is all it needs
        print(f"perplexity: float {before:.1f}, start {start:.1f}, {arguments.steps} steps on {perplexity(model):.1f}")


if __name__ == "__main__":
    main()
