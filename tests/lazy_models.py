"""Small models of every architecture in the auto-mappings of transformers, for the tests of `onepass.attach`.

A configuration is made small by names that most of them share. Models that cannot be built in this way, or that do not
run on token ids alone, are listed by the test.
"""

import contextlib
import copy
import inspect
import warnings

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

VOCAB, TOKENS = 101, 12
MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
)
# The first name of each group that a configuration has is set.
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32,
    "embedding_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "intermediate_size": 64,
    "d_ff": 64, "n_inner": 64, "ffn_dim": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "max_position_embeddings": 64, "n_positions": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "num_nextn_predict_layers": 0, "sliding_window": 8,
    "image_size": 16, "patch_size": 8, "depth": 2, "num_codebooks": 2, "rotary_dim": 8, "state_size": 8,
    "time_step_rank": 4, "chunk_size": 8, "mamba_chunk_size": 8, "linear_head_dim": 8,
    "linear_num_heads": 4,
}  # fmt: skip
LARGE = 12_000_000  # parameters; a model with more was not made small


class TooLargeError(ValueError):
    """A model was not made small, nor will it be by leaving sizes as they are."""


def names():
    """``(model type, class name)`` of every architecture, once per class."""
    found = {}
    for mapping in MAPPINGS:
        for kind, classes in getattr(modeling_auto, mapping, {}).items():
            for name in classes if isinstance(classes, list | tuple) else [classes]:
                if name.endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "LMModel")):
                    found.setdefault(name, kind)
    return sorted((kind, name) for name, kind in found.items())


def shrink(config, without=(), seen=None):
    """Make a configuration, and those within it, small. Lists of one entry per layer are cut."""
    seen = set() if seen is None else seen
    if id(config) in seen:
        return
    seen.add(id(config))
    layers = next(
        (getattr(config, n) for n in ("num_hidden_layers", "n_layer", "num_layers") if hasattr(config, n)), None
    )
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value, without, seen)
        elif isinstance(value, list | tuple) and layers and len(value) == layers and not isinstance(value[0], dict):
            with contextlib.suppress(Exception):
                setattr(config, name, type(value)([value[0], value[-1]]))
    rope = getattr(config, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        rope["mrope_section"] = [1, 1, 2]
    if getattr(config, "is_encoder_decoder", False) and not hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = 1
    for name, value in SIZES.items():
        old = None
        with contextlib.suppress(Exception):  # a name that is an error in a configuration with layers of several kinds
            old = getattr(config, name, None)
        if name not in without and isinstance(old, int) and not isinstance(old, bool):
            with contextlib.suppress(Exception):
                setattr(config, name, value)
    for name in ("use_cache", "tie_encoder_decoder"):
        if hasattr(config, name):
            with contextlib.suppress(Exception):
                setattr(config, name, False)


def build(kind, name, without=()):
    """A small model in float32 with random weights, whose result does not depend on dropout.

    Args:
        without: the sizes that are left as they are.
    """
    cls = getattr(transformers, name)
    config = AutoConfig.for_model(kind) if cls.config_class is None else cls.config_class()
    shrink(config, without)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if size > LARGE:
        raise TooLargeError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = cls(config).float()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.eval()  # dropout in functions too; gradients are computed all the same


def inputs(model):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (2, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    given = {"input_ids": ids, "labels": labels}
    if "attention_mask" in inspect.signature(type(model).forward).parameters:
        given["attention_mask"] = torch.ones_like(ids)
    return given


def step(model, given):
    """The loss and the gradients of one step, and the logits as the model returns them."""
    model.zero_grad()
    torch.manual_seed(1)
    out = model(**given)
    out.loss.backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


ATTEMPTS = (
    (),
    ("head_dim",),
    ("num_key_value_heads",),
    ("n_head", "num_heads", "num_attention_heads", "head_dim", "state_size"),
)


def first_step(kind, name):
    """A small model that trains, its inputs, and the result of `step`.

    Raises:
        Exception: that of the first attempt, if no model could be built and trained.
    """
    errors = []
    for without in ATTEMPTS:
        try:
            model = build(kind, name, without)
            given = inputs(model)
            out, gradients = step(model, given)
            if out.loss.isfinite():
                return model, given, out, gradients
            errors.append(ValueError(f"loss {out.loss}"))
        except TooLargeError:
            raise
        except Exception as error:  # whatever a configuration that is too small runs into
            errors.append(error)
    raise errors[0]
