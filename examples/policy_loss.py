"""A GRPO-style loss, clipped and with an entropy bonus: three GEMMs for forward and backward.

    python examples/policy_loss.py

A small Llama learns to write vowels: groups of completions are rewarded by their fraction of vowels.
"""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import onepass

STEPS, PROMPTS, GROUP, LENGTH, TEMPERATURE = 15, 4, 8, 12, 1.0
VOWELS = torch.tensor([ord(c) for c in "aeiou"])

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
config = LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    bos_token_id=None, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
model = LlamaForCausalLM(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
prompts = torch.randint(1, 128, (PROMPTS, 4), device=device).repeat_interleave(GROUP, 0)


def policy_loss(s: onepass.SoftmaxStatistics, advantages: Tensor, old_log_probs: Tensor) -> Tensor:
    """The loss of every token; called with the statistics of some rows at a time."""
    ratio = (s.log_probs - old_log_probs).exp()
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * advantages, clipped * advantages) - 0.001 * s.entropy


for step in range(STEPS):
    sampled = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=LENGTH
    )
    completions = sampled[:, prompts.shape[1] :]
    rewards = torch.isin(completions, VOWELS.to(device)).float().mean(-1)
    groups = rewards.view(PROMPTS, GROUP)
    advantages = (groups - groups.mean(-1, keepdim=True)) / (groups.std(-1, keepdim=True) + 1e-4)
    advantages = advantages.view(-1, 1).expand(completions.shape)

    old_log_probs = None
    for _ in range(2):  # updates per batch
        hidden = model.model(sampled[:, :-1]).last_hidden_state[:, prompts.shape[1] - 1 :]
        if old_log_probs is None:
            with torch.no_grad():
                old_log_probs, _ = onepass.linear_selective_log_softmax_and_entropy(
                    hidden, model.lm_head.weight, completions, temperature=TEMPERATURE
                )
        loss = onepass.linear_loss(
            hidden, model.lm_head.weight, completions, policy_loss, advantages, old_log_probs, temperature=TEMPERATURE
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if step % 5 == 0 or step == STEPS - 1:
        print(f"step {step:3d}  reward {rewards.mean().item():.3f}")
