"""A tiny model, and TRL's trainers on it for five steps: no downloads. Runs with every version of TRL that we patch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

STEPS, BATCH = 5, 4
TEXT = ["one pass over logits", "the router chooses", "every loss is a few lines", "experts come in chunks"] * 8
PROMPTS, COMPLETIONS = [t[:6] for t in TEXT], [t[6:] for t in TEXT]
LARGER = {"hidden_size": 48}  # a teacher's


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<eos>"]
    vocabulary = {token: n for n, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[1], padding_side="left"
    )


def save_model(folder: Path, seed: int = 0, **size: Any) -> None:
    """A trainer loads its reference model from where the trained one came from."""
    tokenizer = bytes_tokenizer()
    torch.manual_seed(seed)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, max_position_embeddings=128) | size
    config = Qwen3Config(
        **sizes, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(c))) for c in completions]


def sft(model: Any, common: dict[str, Any], **options: Any) -> Any:
    args = trl.SFTConfig(**common, max_length=64, **options)
    return trl.SFTTrainer(model, args=args, train_dataset=Dataset.from_dict({"text": TEXT}), **named())


def dpo(model: Any, common: dict[str, Any], **options: Any) -> Any:
    data = {"prompt": PROMPTS, "chosen": COMPLETIONS, "rejected": [c[::-1] for c in COMPLETIONS]}
    args = trl.DPOConfig(**common, max_length=64, **options)
    return trl.DPOTrainer(model, args=args, train_dataset=Dataset.from_dict(data), **named())


def kto(model: Any, common: dict[str, Any], **options: Any) -> Any:
    data = {"prompt": PROMPTS, "completion": COMPLETIONS, "label": [n % 2 == 0 for n in range(len(TEXT))]}
    args = trl.KTOConfig(**common, max_length=64, **options)
    return trl.KTOTrainer(model, args=args, train_dataset=Dataset.from_dict(data), **named())


def grpo(model: Any, common: dict[str, Any], kind: str = "GRPO", **options: Any) -> Any:
    options = {"beta": 0.05} | options
    args = getattr(trl, f"{kind}Config")(
        **common, max_completion_length=8, num_generations=4, temperature=0.9, **options
    )
    prompts = Dataset.from_dict({"prompt": PROMPTS})
    return getattr(trl, f"{kind}Trainer")(model, reward_funcs=reward, args=args, train_dataset=prompts, **named())


def rloo(model: Any, common: dict[str, Any], **options: Any) -> Any:
    return grpo(model, common, "RLOO", **options)


def distillation(model: Any, common: dict[str, Any]) -> Any:
    folder = Path(common["output_dir"]) / "teacher"
    save_model(folder, seed=1, **LARGER)
    args = trl.DistillationConfig(**common, max_completion_length=8, beta=0.5)
    prompts = Dataset.from_dict({"prompt": PROMPTS})
    return trl.DistillationTrainer(model, teacher_model=load(folder), args=args, train_dataset=prompts, **named())


def named() -> dict[str, Any]:
    return {"processing_class": bytes_tokenizer()}


def options_of(folder: Path, **options: Any) -> dict[str, Any]:
    """What all trainers are given."""
    common = dict(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, logging_steps=1, report_to="none",
        use_cpu=True, save_strategy="no", seed=0, learning_rate=1e-3, disable_tqdm=True, bf16=False,
    )  # fmt: skip
    return common | {"gradient_checkpointing": False} | options


def train(trainer: Callable[..., Any], folder: Path, **options: Any) -> list[tuple[float, float]]:
    """Loss and norm of the gradient of every step."""
    common = options_of(folder, **options)
    save_model(folder / "model")
    trained = trainer(load(folder / "model"), common)
    trained.train()
    return [(log["loss"], log["grad_norm"]) for log in trained.state.log_history if "loss" in log]
