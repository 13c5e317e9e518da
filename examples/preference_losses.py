"""DPO, SimPO, ORPO and GSPO of a trained head in three GEMMs: losses that couple the tokens of a sequence.

    python examples/preference_losses.py

A small Llama learns with DPO to prefer one completion of a prompt to another. The rows are the tokens of a chosen
sequence, those of the rejected one, and so on: each pair is a group. ``side`` is 1 for rows of chosen sequences and -1
for those of rejected ones.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

import onepass
from onepass import RowGroups, SoftmaxStatistics

STEPS, PAIRS, PROMPT, LENGTH = 15, 8, 4, 10


def averages(per_row: Tensor, side: Tensor, groups: RowGroups) -> tuple[Tensor, Tensor]:
    """The means over the tokens of the chosen and of the rejected sequence of each pair."""
    means = [
        groups.sum(per_row.where(of, 0.0)) / groups.sum(of.to(per_row)).clamp(min=1) for of in (side > 0, side < 0)
    ]
    return means[0], means[1]


def dpo(s: SoftmaxStatistics, side: Tensor, reference: Tensor, groups: RowGroups, beta: float = 0.1) -> Tensor:
    """DPO (arXiv:2305.18290); ``reference`` are the log-probs of the reference model."""
    return -F.logsigmoid(beta * groups.sum(side * (s.log_probs - reference)))


def simpo(s: SoftmaxStatistics, side: Tensor, groups: RowGroups, beta: float = 2.0, gamma: float = 0.5) -> Tensor:
    """SimPO (arXiv:2405.14734)."""
    chosen, rejected = averages(s.log_probs, side, groups)
    return -F.logsigmoid(beta * (chosen - rejected) - gamma)


def orpo(s: SoftmaxStatistics, side: Tensor, share: Tensor, groups: RowGroups, beta: float = 0.1) -> Tensor:
    """ORPO (arXiv:2403.07691); ``share`` is what a chosen token counts in the likelihood, and 0 for rejected ones."""
    chosen, rejected = averages(s.log_probs, side, groups)
    odds = chosen - rejected - torch.log(-torch.expm1(chosen)) + torch.log(-torch.expm1(rejected))
    return groups.sum(-s.log_probs * share) - beta * F.logsigmoid(odds)


def gspo(s: SoftmaxStatistics, advantages: Tensor, old: Tensor, groups: RowGroups, epsilon: float = 0.2) -> Tensor:
    """GSPO (arXiv:2507.18071); a group is one completion, whose tokens have one advantage."""
    ratio, advantage = groups.mean(s.log_probs - old).exp(), groups.mean(advantages)
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage)


def main() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prompts = torch.randint(1, 128, (PAIRS, 1, PROMPT), device=device).expand(-1, 2, -1)
    ids = torch.cat([prompts, torch.randint(1, 128, (PAIRS, 2, LENGTH), device=device)], -1).flatten(0, 1)
    targets = ids[:, 1:]
    mask = torch.arange(targets.shape[1], device=device).expand_as(targets) >= PROMPT - 1
    side = torch.tensor([1.0, -1.0], device=device).repeat(PAIRS).unsqueeze(-1).expand(targets.shape)
    with torch.no_grad():
        hidden = model.model(ids[:, :-1]).last_hidden_state
        reference, _ = onepass.linear_selective_log_softmax_and_entropy(
            hidden, model.lm_head.weight, targets, row_mask=mask
        )
    for step in range(STEPS):
        hidden = model.model(ids[:, :-1]).last_hidden_state
        loss = onepass.linear_loss(
            hidden, model.lm_head.weight, targets, dpo, side, reference, row_mask=mask,
            groups=[2 * targets.shape[1]] * PAIRS,
        )  # fmt: skip
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 5 == 0 or step == STEPS - 1:
            print(f"step {step:3d}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
