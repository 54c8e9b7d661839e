"""Short real training runs of TRL's trainers and ours, whose weights can be compared."""

from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel
from trl import SFTConfig, SFTTrainer

from tests import tiny


SETTINGS = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "learning_rate": 0.5,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    # Clipping would hide a loss that is off by a factor.
    "max_grad_norm": 0.0,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
    "seed": 3,
}


def prompts(rows: int = 8) -> Dataset:
    """Prompts and completions of unequal lengths."""
    words = [f"w{(7 * row + 3 * place) % 50}" for row in range(rows) for place in range(12)]
    lengths = [(3 + row % 4, 2 + (5 * row) % 7) for row in range(rows)]
    prompts = [" ".join(words[12 * row :][: lengths[row][0]]) for row in range(rows)]
    completions = [" " + " ".join(words[12 * row + 5 :][: lengths[row][1]]) for row in range(rows)]
    return Dataset.from_dict({"prompt": prompts, "completion": completions})


def chats(rows: int = 8) -> Dataset:
    """Two turns each."""
    return Dataset.from_list(
        [
            {
                "messages": [
                    {"role": "user", "content": f"w{row} w{row + 1}"},
                    {"role": "assistant", "content": " ".join(f"w{row + k}" for k in range(2 + row % 5))},
                    {"role": "user", "content": f"w{row + 9}"},
                    {"role": "assistant", "content": f"w{2 * row} w4"},
                ]
            }
            for row in range(rows)
        ]
    )


def make(
    folder: Path,
    model: PreTrainedModel,
    trainer_class: type[SFTTrainer] = SFTTrainer,
    config_class: type[SFTConfig] = SFTConfig,
    train_dataset: Dataset | None = None,
    trainer_settings: dict[str, Any] | None = None,
    **settings: Any,
) -> SFTTrainer:
    args = config_class(str(folder), **{**SETTINGS, **settings})
    return trainer_class(
        model=model,
        args=args,
        train_dataset=prompts() if train_dataset is None else train_dataset,
        processing_class=tiny.tokenizer(),
        **(trainer_settings or {}),
    )


def curve(trainer: SFTTrainer, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]
