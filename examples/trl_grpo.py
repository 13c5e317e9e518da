"""TRL's own `GRPOTrainer` on onepass, which takes one line: `onepass.patch("trl")`.

    python examples/trl_grpo.py [MODEL]

Without a model, a small untrained Llama learns to write different characters. Needs the extra `trl`.
"""

import sys
import tempfile

import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import onepass


def small_llama(folder: str, spread: float = 1.0) -> str:
    """Save a byte-level model and its tokenizer in the folder, where a trainer can load them.

    ``spread`` multiplies the weight of its head, since the logits of an untrained model are nearly equal.
    """
    vocabulary = {c: n for n, c in enumerate(["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokens = Tokenizer(models.BPE(vocabulary, []))
    tokens.pre_tokenizer, tokens.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data.mul_(spread)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def variety(completions: list[str], **_: object) -> list[float]:
    return [len(set(completion)) / 16 for completion in completions]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, onepass.patch("trl") as patched:
        print(patched)
        args = trl.GRPOConfig(
            output_dir=folder, max_steps=5, per_device_train_batch_size=8, num_generations=8, max_completion_length=16,
            learning_rate=1e-3, logging_steps=1, report_to="none", save_strategy="no", bf16=False,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            sys.argv[1] if len(sys.argv) > 1 else small_llama(folder),
            reward_funcs=variety,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["Once", "upon", "a", "time"] * 8}),
        )
        trainer.train()
        print(f"reward {trainer.state.log_history[-2]['reward']:.3f} after {trainer.state.global_step} steps")
