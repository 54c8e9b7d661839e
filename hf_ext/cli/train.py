"""`hf-ext train`: a trainer of hf_ext with the flags of TRL's scripts, also under `accelerate launch`."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from .._public import PUBLIC
from ..core.errors import closest
from .app import UsageError


# What the user writes -> the public names of its trainer and of its config.
METHODS = {
    "rope-distillation": ("RopeDistillationTrainer", "RopeDistillationConfig"),
    "saft": ("SAFTTrainer", "SAFTConfig"),
}
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


def train(
    context: typer.Context,
    method: Annotated[str, typer.Argument(help=f"Method: {', '.join(METHODS)}.", show_default=False)],
) -> None:
    """Fine-tune a model with the flags of `trl sft` and those of the method; METHOD -- --help lists them."""
    if method not in METHODS:
        raise UsageError(f"Method {method!r} is unknown.{closest(method, METHODS)}")
    trainer_class, config_class = (_public(name) for name in METHODS[method])
    run(trainer_class, *parse(config_class, method, context.args))


def parse(config_class: type, method: str, arguments: list[str]) -> tuple[Any, Any, Any]:
    """Return the script's, the trainer's and the model's arguments.

    Raises:
        UsageError: a value is not allowed, or model or data set are missing.
    """
    from trl import ModelConfig, ScriptArguments, TrlParser

    parser = TrlParser((ScriptArguments, config_class, ModelConfig), prog=f"hf-ext train {method}")
    try:
        script, args, model = parser.parse_args_and_config([it for it in arguments if it != "--"])
    except ValueError as error:
        raise UsageError(str(error)) from error
    for flag, value in (("--model_name_or_path", model.model_name_or_path), ("--dataset_name", script.dataset_name)):
        if value is None:
            raise UsageError(f"{flag} is missing: a folder or a Hub id.")
    return script, args, model


def run(trainer_class: type, script: Any, args: Any, model: Any) -> None:
    """Load model and data, train, save, and push where asked to."""
    from datasets import load_dataset
    from trl import get_peft_config, get_quantization_config

    from .arguments import find_model

    args.model_init_kwargs = {
        "revision": model.model_revision,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(args.model_init_kwargs or {}),
    }
    data = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
    trainer = trainer_class(
        model=find_model(model.model_name_or_path),
        args=args,
        train_dataset=data[script.dataset_train_split],
        eval_dataset=data[script.dataset_test_split] if args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    trainer.accelerator.print(f"Saved to {args.output_dir}")
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    trainer.end()


def _public(name: str) -> type:
    return getattr(import_module(PUBLIC[name]), name)
