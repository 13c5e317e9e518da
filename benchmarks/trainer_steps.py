"""The training steps that `trainers.py` measures, of a tiny decoder. Importing this module imports TRL."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from peft import LoraConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from trainers import bytes_tokenizer, load, reward, save_model

Sizes = dict[str, int]
Step = Callable[[], int]
PROMPT = "Once upon a time"


def sft(folder: Path, sizes: Sizes, **common: Any) -> Any:
    args = trl.SFTConfig(**prepared(folder, sizes), max_length=sizes["length"])
    text = [PROMPT + chr(97 + n % 26) * sizes["length"] for n in range(sizes["batch"])]
    return trl.SFTTrainer(load(folder), args=args, train_dataset=Dataset.from_dict({"text": text}), **common)


def dpo(folder: Path, sizes: Sizes, **common: Any) -> Any:
    text = [chr(97 + n) * sizes["length"] for n in range(2)]
    data = {"prompt": [PROMPT], "chosen": [text[0]], "rejected": [text[1]]}
    data = {name: values * sizes["batch"] for name, values in data.items()}
    options = prepared(folder, sizes) | {"per_device_train_batch_size": sizes["batch"] // 2}  # of pairs
    args = trl.DPOConfig(**options, max_length=2 * sizes["length"])
    return trl.DPOTrainer(load(folder), args=args, train_dataset=Dataset.from_dict(data), **common)


def grpo(folder: Path, sizes: Sizes, **common: Any) -> Any:
    args = trl.GRPOConfig(
        **prepared(folder, sizes), max_completion_length=sizes["length"], num_generations=sizes["batch"], beta=0.0
    )
    data = Dataset.from_dict({"prompt": [PROMPT] * sizes["batch"]})
    return trl.GRPOTrainer(load(folder), reward_funcs=reward, args=args, train_dataset=data, **common)


TRAINERS: dict[str, Callable[..., Any]] = {"SFT": sft, "DPO": dpo, "GRPO": grpo}
ADAPTERS: dict[str, Callable[[], Any]] = {
    "full": lambda: None,
    "LoRA": lambda: LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
}


def save(folder: Path, sizes: Sizes) -> None:
    """Save the model that all trainers load."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # a GPU draws random weights faster
        save_model(
            folder, vocab_size=sizes["vocab"], hidden_size=sizes["hidden"], intermediate_size=2 * sizes["hidden"],
            max_position_embeddings=4 * sizes["length"],
        )  # fmt: skip


def build(trainer: str, adapter: str, folder: Path, sizes: Sizes) -> Step:
    """A step of a trainer, on one batch that is prepared before, of the model in ``folder``."""
    common = dict(processing_class=bytes_tokenizer(), peft_config=ADAPTERS[adapter]())
    return step_of(TRAINERS[trainer](folder, sizes, **common))


def prepared(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """The options that all trainers share."""
    return dict(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=sizes["batch"], report_to="none",
        disable_tqdm=True, save_strategy="no", bf16=torch.cuda.is_available(), gradient_checkpointing=False,
    )  # fmt: skip


def step_of(trainer: Any) -> Step:
    trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1  # as its own loop says
    trainer.model.to(trainer.args.device)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    model = trainer.accelerator.prepare(trainer.model_wrapped).train()  # for autocast
    trainer.optimizer = trainer.accelerator.prepare(trainer.optimizer)

    def step() -> int:
        """Returns the peak of memory until the gradients are computed, in bytes."""
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, batch)
        trainer.accelerator.backward(loss)
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return peak

    return step
