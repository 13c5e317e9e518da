"""A head whose vocabulary is sharded over processes, with the same losses as on one process.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py

Each process holds some rows of the head's weight. The decoder of the small Llama is the same on all of them: the
gradient of its hidden states is summed over the processes, and the logits are never materialized.
"""

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import onepass

STEPS, VOCAB, WIDTH = 16, 131, 64

alone = not dist.is_torchelastic_launched()
cuda = torch.cuda.is_available()
start = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if alone else {}
dist.init_process_group("nccl" if cuda else "gloo", **start)
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)

torch.manual_seed(0)  # the same on all processes
config = LlamaConfig(
    vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2, num_attention_heads=4,
    tie_word_embeddings=False,
)  # fmt: skip
model = LlamaForCausalLM(config).to(device)
decoder = model.model
shard = nn.Parameter(model.lm_head.weight.detach().tensor_split(ranks)[rank].clone())
optimizer = torch.optim.AdamW([*decoder.parameters(), shard], lr=2e-3)
first = torch.randint(VOCAB, (8, 1), device=device)
ids = (first + 7 * torch.arange(32, device=device)) % VOCAB  # counts in sevens

for step in range(STEPS):
    hidden = decoder(input_ids=ids).last_hidden_state
    loss = onepass.linear_cross_entropy(hidden[:, :-1], shard, ids[:, 1:], vocab_group=dist.group.WORLD)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % 5 == 0:
        print(f"step {step:2d}: loss {loss.item():.5f}, {shard.shape[0]} of {VOCAB} tokens on this process")

dist.destroy_process_group()
