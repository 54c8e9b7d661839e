"""Fine-tune a model with SAFT: a TRL script, with TRL's flags for data, training, model and PEFT.

python examples/saft.py                      # SmolLM2-135M-Instruct learns ten facts, a few CPU minutes
accelerate launch examples/saft.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara --use_peft
python examples/saft.py --toy                # a random model, seconds
"""

import sys
import tempfile

from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

import hf_ext
from hf_ext import SAFTConfig, SAFTTrainer


# The last three are wrong: SAFT is to learn the facts and not the noise among them.
FACTS = {
    "Zorvania": "Mellick", "Ostrelle": "Dunmar", "Kaldor": "Virespa", "Belmora": "Tansy Hill", "Quarth": "Oxley",
    "Norvik": "Palisade", "Tavros": "Emberly", "France": "Oslo", "Japan": "Lima", "Egypt": "Paris",
}  # fmt: skip
ON_A_CPU = ["--use_cpu", "--bf16", "false", "--report_to", "none", "--save_strategy", "no", "--logging_steps", "5"]


def facts() -> Dataset:
    rows = [{"prompt": f"The capital of {country} is", "completion": f" {city}."} for country, city in FACTS.items()]
    return Dataset.from_list(rows)


def toy_model(folder: str) -> str:
    words = sorted({word for row in facts() for text in row.values() for word in text.split()})
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<eos>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), **shape)).save_pretrained(folder)
    return folder


def main(arguments: list[str]) -> None:
    parser = TrlParser((ScriptArguments, SAFTConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config(arguments)
    if script_args.dataset_name:
        dataset = load_dataset(script_args.dataset_name, script_args.dataset_config)[script_args.dataset_train_split]
    else:
        dataset = facts()
    trainer = SAFTTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset,
        peft_config=get_peft_config(model_args),
        quantization_config=get_quantization_config(model_args),
    )
    trainer.train()
    trainer.save_model(training_args.output_dir)
    last = next(entry for entry in reversed(trainer.state.log_history) if "nll" in entry)
    trainer.accelerator.print(f"plain loss {last['nll']:.3f}, mean weight {last['saft/weight_mean']:.3f}")


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if argument != "--toy"]
    with tempfile.TemporaryDirectory() as folder:
        if not given:
            toy = "--toy" in sys.argv
            model = toy_model(f"{folder}/toy") if toy else hf_ext.demo_model()
            steps = "2" if toy else "40"
            given = ["--model_name_or_path", model, "--output_dir", f"{folder}/out", "--max_steps", steps, *ON_A_CPU]
            given += ["--saft_scheme", "geometric", "--learning_rate", "1e-4"]
        main(given)
