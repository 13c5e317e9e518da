"""The sampler's experts in TRL's `GRPOTrainer`, on a small Qwen3-MoE.

    python examples/trl_grpo_replay.py

The sampler has the weights of the trainer and rounds otherwise, so that its routers take other experts where two are
nearly tied. It returns the experts of each token, as vLLM and SGLang do. Each step prints how far the ratios of the
trainer's and the sampler's probabilities are from 1: with the trainer's own experts and with the sampler's replayed.
The weights are equal, so that all of the ratio comes from routing: replayed, it is 1 up to the arithmetic. The loss is
computed with the replayed experts. See docs/moe.md. Needs the extra `trl`, 1.15 on.
"""

import os
import tempfile
from typing import Any

import torch
import trl
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl_grpo import small_llama, variety

import onepass
from onepass.moe import RoutingRecord, record_routing, replay_routing

LENGTH = 8
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # of `rollout_func`


def small_moe(folder: str) -> str:
    """Save a byte-level model with experts and its tokenizer in the folder."""
    tokenizer = AutoTokenizer.from_pretrained(small_llama(folder))
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=16, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, initializer_range=0.2, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ))  # fmt: skip
    model.save_pretrained(folder)
    return folder


def experts_of_the_sampler(model: Any, ids: Tensor, mask: Tensor) -> RoutingRecord:
    """The experts that routers take whose weights were rounded to 4 bits of their fraction."""
    gates = [p for name, p in model.named_parameters() if name.endswith("mlp.gate.weight")]
    exact = [gate.clone() for gate in gates]
    for gate in gates:
        gate.copy_(gate.to(torch.float8_e4m3fn).to(gate.dtype))
    with record_routing(model) as record:
        model(input_ids=ids, attention_mask=mask)
    for gate, values in zip(gates, exact):
        gate.copy_(values)
    return record


@torch.no_grad()
def sample(prompts: list[str], trainer: "ReplayTrainer") -> dict[str, Any]:
    """A stand-in for an engine: completions, the log-prob of each token, and the experts that computed it."""
    model, tokenizer = trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class
    given = [tokenizer(p)["input_ids"] for p in prompts]
    longest = max(map(len, given))
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(g)) + g for g in given], device=model.device)
    mask = (torch.arange(longest) >= torch.tensor([[longest - len(g)] for g in given])).long().to(model.device)
    log_probs = []
    for _ in range(LENGTH):
        record = experts_of_the_sampler(model, ids, mask)
        with replay_routing(model, record):
            logits = model(input_ids=ids, attention_mask=mask).logits[:, -1].float()
        drawn = logits.softmax(-1).multinomial(1)
        log_probs.append(logits.log_softmax(-1).gather(-1, drawn))
        ids, mask = torch.cat([ids, drawn], 1), torch.cat([mask, torch.ones_like(drawn)], 1)
    # The record of the last pass has all tokens but the last one; causal layers computed them as before.
    trainer.arrays = record.to_array(mask)
    completions = ids[:, longest:].tolist()
    return {"prompt_ids": given, "completion_ids": completions, "logprobs": torch.cat(log_probs, 1).tolist()}


class ReplayTrainer(trl.GRPOTrainer):  # type: ignore[misc]
    """Computes its log-probs with the experts of the sampler."""

    arrays: list[Any]  # the experts of each of the last samples: (tokens - 1, layers, K)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        found = super()._generate_and_score_completions(inputs)
        return found | {"sample": torch.arange(len(self.arrays))}  # TRL shuffles the samples

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        self.of_batch = inputs
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor, None]:
        method = super()._get_per_token_logps_and_entropies
        arrays = [self.arrays[n] for n in self.of_batch["sample"].tolist()]
        record = RoutingRecord.from_array(arrays, attention_mask)
        with torch.no_grad(), record_routing(model):
            own, *_ = method(model, input_ids, attention_mask, *args, **options)
        # The context may end before the backward, and layers may be computed again in it.
        with replay_routing(model, record) as replay:
            log_probs, entropies, *rest = method(model, input_ids, attention_mask, *args, **options)
        sampled, mask = self.of_batch["sampling_per_token_logps"], self.of_batch["completion_mask"]
        for name, found in (("own", own), ("replayed", log_probs.detach())):
            error = onepass.ratio_report(found, sampled, mask).to_dict()["mean_abs_ratio_error"]
            print(f"step {self.state.global_step}, {name} experts: mean |ratio - 1| {error:.3e}")
        choices = sum(array.size for array in arrays)
        print(f"step {self.state.global_step}, {int(replay.changed)} of {choices} choices differ")
        return log_probs, entropies, *rest


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        args = trl.GRPOConfig(
            output_dir=folder, max_steps=3, per_device_train_batch_size=8, num_generations=8, temperature=1.0,
            max_completion_length=LENGTH, learning_rate=1e-3, report_to="none", save_strategy="no", logging_steps=3,
            bf16=False, gradient_checkpointing=True, model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        trainer = ReplayTrainer(
            small_moe(folder),
            reward_funcs=variety,
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["Once", "upon", "a", "time"] * 8}),
            rollout_func=sample,
        )
        trainer.train()
