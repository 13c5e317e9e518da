"""Distillation from a teacher's top-K tokens: K log-probs per token instead of logits over the vocabulary.

    python examples/distillation.py

The teacher is a small Llama that is trained first; its top-K log-probs could also come from a file or a server.
"""

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import onepass

STEPS, BATCH, LENGTH, K = 60, 8, 64, 8

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)


def llama(hidden_size: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256, hidden_size=hidden_size, intermediate_size=2 * hidden_size, num_hidden_layers=2,
        num_attention_heads=4, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device)


def batch() -> Tensor:
    starts = torch.randint(len(data) - LENGTH, (BATCH,)).tolist()
    return torch.stack([data[start : start + LENGTH] for start in starts])


teacher, student = llama(128), llama(64)
for model in (teacher, student):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens = batch()
        hidden = model.model(tokens).last_hidden_state[:, :-1]
        if model is teacher:
            loss = onepass.linear_cross_entropy(hidden, model.lm_head.weight, tokens[:, 1:])
        else:
            with torch.no_grad():
                log_probs, ids = teacher(tokens).logits[:, :-1].log_softmax(-1).topk(K)
            # Both are normalized over these K tokens. (`onepass.distillation_loss` adds labels in the same read.)
            loss = onepass.linear_topk_kl_div(
                hidden, model.lm_head.weight, ids, log_probs, renormalize=True, reduction="mean"
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == STEPS - 1:
            print(f"{'teacher' if model is teacher else 'student'}  step {step:3d}  loss {loss.item():.3f}")
