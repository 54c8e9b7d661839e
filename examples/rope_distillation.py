"""Train a model on documents so that its predictions do not hang on distances: a TRL script, with TRL's flags.

python examples/rope_distillation.py         # SmolLM2-135M-Instruct on notes with a fact to recall, CPU minutes
accelerate launch examples/rope_distillation.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name my/documents
python examples/rope_distillation.py --toy   # a random model, seconds
"""

import random
import sys
import tempfile

from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

import hf_ext
from hf_ext import RopeDistillationConfig, RopeDistillationTrainer


ROOMS = ("kitchen", "cellar", "garden", "attic", "library", "garage")
THINGS = ("key", "lamp", "coat", "letter", "clock", "basket")
ON_A_CPU = ["--use_cpu", "--bf16", "false", "--report_to", "none", "--save_strategy", "no", "--logging_steps", "5"]


def notes(count: int, seed: int, length: int = 24) -> Dataset:
    """Notes on where things are, of which the last line asks after one."""
    draw, rows = random.Random(seed), []
    for _ in range(count):
        places = {thing: draw.choice(ROOMS) for thing in THINGS}
        lines = [f"Note {line}: nothing happened in the {draw.choice(ROOMS)} today ." for line in range(length)]
        for thing, room in places.items():
            lines.insert(draw.randrange(len(lines)), f"The {thing} is in the {room} .")
        thing = draw.choice(THINGS)
        rows.append({"text": " ".join([*lines, f"So the {thing} is in the {places[thing]} ."])})
    return Dataset.from_list(rows)


def toy_model(folder: str) -> str:
    words = sorted({word for row in notes(50, seed=0) for word in row["text"].split()})
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), **shape)).save_pretrained(folder)
    return folder


def main(arguments: list[str]) -> None:
    parser = TrlParser((ScriptArguments, RopeDistillationConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config(arguments)
    dataset, held_out = notes(64, seed=0), notes(8, seed=1)
    if script_args.dataset_name:
        dataset = load_dataset(script_args.dataset_name, script_args.dataset_config)[script_args.dataset_train_split]
    trainer = RopeDistillationTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset,
        eval_dataset=held_out,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    before = trainer.evaluate()
    trainer.train()
    trainer.save_model(training_args.output_dir)
    for name, figures in (("before", before), ("after", trainer.evaluate())):
        loss, view_kl = figures["eval_loss"], figures["eval_view_kl"]
        trainer.accelerator.print(f"{name}: loss {loss:.4f}, divergence of the perturbed view {view_kl:.4f}")


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "--toy"]
    with tempfile.TemporaryDirectory() as folder:
        if not given:
            toy = "--toy" in sys.argv
            model, steps = (toy_model(f"{folder}/toy"), "2") if toy else (hf_ext.demo_model(), "20")
            given = ["--model_name_or_path", model, "--output_dir", f"{folder}/out", "--max_steps", steps, *ON_A_CPU]
            given += ["--learning_rate", "1e-5", "--per_device_train_batch_size", "2"]
        main(given)
