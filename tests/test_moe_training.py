"""MoE models of transformers, trained with their own routing and with ours: the same curve."""

import os

import pytest
import torch

from onepass.cli.demo_model import load_text
from onepass.integrations.transformers_experts import register
from onepass.moe import load_balancing_loss, route_block

transformers = pytest.importorskip("transformers")

STEPS, BATCH, LENGTH, COEFFICIENT = 50, 4, 64, 0.05
SIZE = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "attn_implementation": "eager",
}  # fmt: skip


def mixtral():
    config = transformers.MixtralConfig(
        **SIZE, num_local_experts=8, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=COEFFICIENT
    )
    return transformers.MixtralForCausalLM(config)


def deepseek_v3():
    config = transformers.DeepseekV3Config(
        **SIZE, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, first_k_dense_replace=0,
        moe_intermediate_size=32, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=32, n_shared_experts=1,
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def use_ours(model, family, routings):
    """Every block routes by `route_block`, which leaves its `Routing` in ``routings``."""
    blocks = [layer.mlp for layer in model.model.layers]
    for block in blocks:

        def routed(hidden_states, block=block):
            routing = route_block(block, hidden_states, losses=family is mixtral)
            routings.append(routing)
            return routing

        # A gate returns logits, weights and experts of all tokens; the block uses the last two.
        block.gate.forward = lambda h, routed=routed: (h, *routed(h.reshape(-1, h.shape[-1]))[:2])
    assert len(blocks) == 2


def train(family, ours, device):
    text = torch.frombuffer(bytearray(load_text().encode()), dtype=torch.uint8).long()
    torch.manual_seed(0)
    model = family().to(device).train()
    with torch.no_grad():
        # As transformers starts them, scores lie so close that two of them round to a tie about once in a run.
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(8)
    routings = []
    if ours:
        use_ours(model, family, routings)
        model.config.output_router_logits = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    starts = torch.randint(len(text) - LENGTH, (STEPS, BATCH), generator=torch.Generator().manual_seed(1))
    curve = []
    for step in range(STEPS):
        tokens = torch.stack([text[s : s + LENGTH] for s in starts[step]]).to(device)
        routings.clear()
        loss = model(input_ids=tokens, labels=tokens).loss
        if ours and family is mixtral:
            loss = loss + COEFFICIENT * load_balancing_loss(routings)
        assert not ours or len(routings) == 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


def train_adapters(implementation, device, folder):
    """PEFT's LoRA on the experts of a tiny Qwen3-MoE: the curve, and the logits with the adapters as they are saved."""
    peft = pytest.importorskip("peft")
    register()
    text = torch.frombuffer(bytearray(load_text().encode()), dtype=torch.uint8).long()

    def base():
        torch.manual_seed(0)
        config = transformers.Qwen3MoeConfig(
            **SIZE, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=32
        )
        model = transformers.Qwen3MoeForCausalLM(config).to(device)
        model.set_experts_implementation(implementation)
        return model

    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=[], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    )
    model = peft.get_peft_model(base(), config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    starts = torch.randint(len(text) - LENGTH, (STEPS, BATCH), generator=torch.Generator().manual_seed(1))
    curve = []
    for step in range(STEPS):
        tokens = torch.stack([text[s : s + LENGTH] for s in starts[step]]).to(device)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    model.save_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(base(), folder)
    with torch.no_grad():
        after, again = (m.eval()(input_ids=tokens).logits for m in (model, loaded))
    assert torch.equal(after, again)
    return curve, after.cpu()


def test_adapters_on_experts_learn_the_same_curve(device, tmp_path):
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("too long for the interpreter")
    (theirs, logits), (ours, same) = (train_adapters(which, device, tmp_path / which) for which in ("eager", "onepass"))
    assert theirs[-1] < theirs[0] - 0.3
    assert max(abs(a - b) for a, b in zip(theirs, ours)) < 1e-3
    torch.testing.assert_close(same, logits, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("family", [mixtral, deepseek_v3], ids=lambda f: f.__name__)
def test_the_same_curve(device, family):
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("too long for the interpreter")
    theirs, ours = (train(family, which, device) for which in (False, True))
    assert theirs[-1] < theirs[0] - 0.5  # something was learnt
    assert max(abs(a - b) for a, b in zip(theirs, ours)) < 1e-4
