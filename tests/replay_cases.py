"""Small mixtures of experts of transformers, and steps of them, for the tests that record and replay their experts."""

import copy

import pytest
import torch

from onepass.moe import RoutingRecord

transformers = pytest.importorskip("transformers", "5.13")
import lazy_models  # noqa: E402

FAMILIES = {
    "qwen3_moe": "Qwen3MoeForCausalLM", "mixtral": "MixtralForCausalLM", "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM", "glm4_moe": "Glm4MoeForCausalLM",
}  # fmt: skip
# Of other forms: the weights over all experts, a bias that the block passes, and tokens in two dimensions.
OTHERS = {"llama4": "Llama4ForCausalLM", "minimax_m2": "MiniMaxM2ForCausalLM", "afmoe": "AfmoeForCausalLM"}
B, S = 2, 7
_built = {}


def build(family):
    """A model in which choices are far apart. DeepSeek-V3 and GLM-4 have a first layer without experts."""
    if family not in _built:
        cls = getattr(transformers, (FAMILIES | OTHERS)[family])
        config = cls.config_class()
        lazy_models.shrink(config)
        config.num_key_value_heads = 4  # of DeepSeek-V3, as many as there are heads
        torch.manual_seed(1)
        model = cls(config).float()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "correction_bias" in name or name.endswith(("gate.weight", "router.weight")):
                tensor.data.normal_(std=0.5)
        _built[family] = model.train()
    return copy.deepcopy(_built[family])


def build_of_images():
    """A text model of Ernie 4.5 VL, whose router for images is called only in passes with tokens of images."""
    from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeTextModel

    config = transformers.Ernie4_5_VLMoeConfig().text_config
    options = dict(
        vocab_size=lazy_models.VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, moe_num_experts=4, num_experts=4, moe_k=2, moe_intermediate_size=[16, 16],
        moe_num_shared_experts=0, mlp_layer_types=["dense", "sparse"], pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    )  # fmt: skip
    for name, value in options.items():
        setattr(config, name, value)
    torch.manual_seed(1)
    model = Ernie4_5_VLMoeTextModel(config)
    for name, tensor in model.named_parameters():
        if name.endswith("gate.weight"):
            tensor.data.normal_(std=0.5)
    return model.train()


def batches(n=1):
    g = torch.Generator().manual_seed(3)
    return [torch.randint(3, lazy_models.VOCAB, (B, S - i), generator=g) for i in range(n)]


def losses(model, inputs):
    return [model(input_ids=ids, labels=ids, use_cache=False).loss for ids in inputs]


def gradients(model):
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


def drifted(record):
    """Another choice of every layer, which no router would make."""

    def other(ids):
        g = torch.Generator().manual_seed(len(ids))
        return torch.rand(len(ids), 4, generator=g).argsort(-1)[:, : ids.shape[-1]].short()

    return RoutingRecord([[other(ids) for ids in layers] for layers in record.passes])


def backward(found, order):
    if order == "joint":
        sum(found).backward()
    for n in {"first to last": range(len(found)), "last to first": reversed(range(len(found)))}.get(order, ()):
        found[n].backward()


def close(got, expected):
    """As sums of micro-batches in another order are."""
    assert len(got) == len(expected)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
