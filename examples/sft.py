"""Supervised fine-tuning in plain PyTorch: cross-entropy from hidden states, without materializing the logits.

    python examples/sft.py

Trains a small Llama on the bytes of this folder; replace it by `AutoModelForCausalLM.from_pretrained(...)`.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import onepass

STEPS, BATCH, LENGTH = 60, 8, 64

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
text = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
config = LlamaConfig(
    vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    bos_token_id=None, eos_token_id=None,
)  # fmt: skip
model = LlamaForCausalLM(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(STEPS):
    starts = torch.randint(len(data) - LENGTH, (BATCH,)).tolist()
    tokens = torch.stack([data[start : start + LENGTH] for start in starts])
    labels = tokens.clone()
    labels[:, : LENGTH // 4] = -100  # the prompt: these rows are left out of all GEMMs

    hidden = model.model(tokens).last_hidden_state
    loss = onepass.linear_cross_entropy(hidden[:, :-1], model.lm_head.weight, labels[:, 1:])

    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0 or step == STEPS - 1:
        print(f"step {step:3d}  loss {loss.item():.3f}")
