"""The sampler's log-probs in TRL's `GRPOTrainer`: its temperature, the tokens that it kept, and its float32 logits.

    python examples/trl_grpo_parity.py [MODEL]

The sampler draws from the 20 most probable tokens at temperature 0.8, from float32 logits of a bfloat16 head, and
returns these tokens and the log-prob of the one that it drew, as vLLM does. Each step prints how far three kinds of
log-probs of the trainer are from the sampler's: TRL's own, which know the temperature alone; with the tokens that were
kept; and also with float32 logits, with which the loss is computed. See docs/parity.md. Needs the extra `trl`, 1.15 on.
"""

import os
import sys
import tempfile
from typing import Any

import torch
import trl
from datasets import Dataset
from torch import Tensor
from trl_grpo import small_llama, variety

import onepass

TEMPERATURE, KEPT, LENGTH = 0.8, 20, 16
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # of `rollout_func`


@torch.no_grad()
def sample(prompts: list[str], trainer: "ParityTrainer") -> dict[str, Any]:
    """A stand-in for vLLM: completions, the log-prob of each token, and the tokens that it was drawn from."""
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    given = [tokenizer(p)["input_ids"] for p in prompts]
    longest = max(map(len, given))
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(g)) + g for g in given], device=model.device)
    mask = torch.tensor([[0] * (longest - len(g)) + [1] * len(g) for g in given], device=model.device)
    head, log_probs, kept = model.get_output_embeddings(), [], []
    for _ in range(LENGTH):
        hidden = model.base_model(input_ids=ids, attention_mask=mask).last_hidden_state[:, -1]
        best = (hidden.float() @ head.weight.float().T / TEMPERATURE).topk(KEPT)
        of_best = best.values.log_softmax(-1)
        drawn = of_best.exp().multinomial(1)
        ids = torch.cat([ids, best.indices.gather(-1, drawn)], 1)
        mask = torch.cat([mask, torch.ones_like(drawn)], 1)
        log_probs.append(of_best.gather(-1, drawn))
        kept.append(best.indices)
    trainer.kept = torch.stack(kept, 1)
    completions = ids[:, longest:].tolist()
    return {"prompt_ids": given, "completion_ids": completions, "logprobs": torch.cat(log_probs, 1).tolist()}


class ParityTrainer(trl.GRPOTrainer):  # type: ignore[misc]
    """Computes its log-probs from the tokens that the sampler has kept, and from float32 logits."""

    kept: Tensor  # (completions, tokens, KEPT) of the last samples

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return super()._generate_and_score_completions(inputs) | {"kept": self.kept}

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.of_batch = inputs
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor, None]:
        with torch.no_grad():
            own, *_ = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **options
            )
        unwrapped = self.accelerator.unwrap_model(model)
        hidden = unwrapped.base_model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        hidden, weight = hidden[:, -logits_to_keep - 1 : -1], unwrapped.get_output_embeddings().weight
        tokens, kept = input_ids[:, -logits_to_keep:], self.of_batch["kept"]
        rounded, _ = onepass.linear_selective_log_softmax_and_entropy(
            hidden.detach(), weight.detach(), tokens, temperature=TEMPERATURE, support=kept
        )
        exact, entropy = onepass.linear_selective_log_softmax_and_entropy(
            hidden, weight, tokens, temperature=TEMPERATURE, support=kept, logits_dtype=torch.float32
        )
        sampled, mask = self.of_batch["sampling_per_token_logps"], self.of_batch["completion_mask"]
        for name, log_probs in (("TRL", own), ("kept tokens", rounded), ("kept tokens, float32 logits", exact)):
            report = onepass.ratio_report(log_probs.detach(), sampled, mask).to_dict()
            error, kl = report["mean_abs_ratio_error"], report["kl_k3"]
            print(f"step {self.state.global_step}, {name}: mean |ratio - 1| {error:.3e}, KL {kl:.3e}")
        return exact, entropy, None


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, onepass.patch("trl"):
        args = trl.GRPOConfig(
            output_dir=folder, max_steps=5, per_device_train_batch_size=8, num_generations=8, temperature=TEMPERATURE,
            max_completion_length=LENGTH, learning_rate=1e-3, report_to="none", save_strategy="no", logging_steps=5,
            bf16=torch.cuda.is_available(), model_init_kwargs={"dtype": "bfloat16"},
        )  # fmt: skip
        trainer = ParityTrainer(
            sys.argv[1] if len(sys.argv) > 1 else small_llama(folder, spread=8.0),
            reward_funcs=variety,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["Once", "upon", "a", "time"] * 8}),
            rollout_func=sample,
        )
        trainer.train()
