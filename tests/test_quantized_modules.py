"""Quantized experts of models of transformers: adapters of PEFT, saving, casting, copying and training."""

import copy
import gc
import weakref

import pytest
import torch

import onepass
from onepass import moe
from onepass.moe import QuantizedWeight, quantize
from quantized_cases import close, randn


@pytest.fixture
def families():
    pytest.importorskip("transformers")
    import test_experts_transformers as theirs
    from onepass.integrations import transformers_experts

    transformers_experts.register()
    return theirs


@pytest.fixture
def nothing_is_decoded_whole(monkeypatch):
    """`dequantize` is an error while this is entered."""
    return lambda m: m.setattr(QuantizedWeight, "dequantize", lambda self: pytest.fail("decoded as a whole"))


def kinds(bitsandbytes):
    def parametrized(experts):
        from bitsandbytes.nn.parametrize import replace_parameter_4bit

        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(experts, name, compress_statistics=True, quant_type="nf4")

    return {"bitsandbytes": parametrized, "mxfp4": lambda experts: moe.quantize_experts(experts, "mxfp4"),
            "fp4": lambda experts: moe.quantize_experts(experts, "fp4", nested=True)}  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("kind", ["bitsandbytes", "mxfp4", "fp4"])
def test_peft_adapters_on_quantized_experts(
    bitsandbytes, families, monkeypatch, nothing_is_decoded_whole, family, kind
):
    """As with the decoded weights in place; factors are used as they are, also of two adapters."""
    peft = pytest.importorskip("peft")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hidden, ids, weights = randn(33, 24), torch.rand(33, 6).argsort(-1)[:, :2], randn(33, 2).abs()
    found = []
    for quantized in (True, False):
        experts = families.experts_of(family)
        kinds(bitsandbytes)[kind](experts)
        if not quantized:
            assert moe.dequantize_experts(experts) == 2
        block = torch.nn.ModuleDict({"experts": experts})
        names = [f"experts.{name}" for name in ("gate_up_proj", "down_proj")]
        config = peft.LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, target_modules=[], target_parameters=names)
        peft.inject_adapter_in_model(config, block)
        experts.config._experts_implementation = "onepass"
        leaves = hidden.detach().requires_grad_(), weights.detach().requires_grad_()
        wrappers = {m.parameter_name: m for m in block.modules() if hasattr(m, "parameter_name")}
        named = [n for name in sorted(wrappers) for n in wrappers[name].named_parameters()]
        adapters = [p for n, p in named if n.startswith("lora")]
        assert len(adapters) == 4
        for seed, p in enumerate(adapters):  # PEFT nests what is parametrized in another order
            p.data = randn(*p.shape, seed=seed)
        with onepass.patch("transformers"), monkeypatch.context() as m:
            if quantized:
                nothing_is_decoded_whole(m)
                m.setattr("torch.nn.utils.parametrize.register_parametrization", pytest.fail)
                lines = [str(line) for line in moe.describe(block)]
                assert len(lines) == 2 and all("onepass: experts that have tokens are decoded" in x for x in lines)
                assert all({"bitsandbytes": "nf4 (blocks of 64, nested"}.get(kind, kind) in x for x in lines), lines
            out = block["experts"](leaves[0], ids, leaves[1])
            found.append([out, *torch.autograd.grad(out, [*leaves, *adapters], torch.ones_like(out))])
    close(*found)


def test_fp8_experts(families):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    experts = families.experts_of("qwen3_moe", hidden_size=128, moe_intermediate_size=64)
    new = type("Experts", (fp8.FP8Experts,), {})
    new = fp8.use_experts_implementation(experts_class=new, experts_interface=fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    experts.config._experts_implementation = "onepass"
    theirs = new(config=experts.config, block_size=(64, 64))
    for name in ("gate_up_proj", "down_proj"):
        found = quantize(getattr(experts, name), "fp8_block", block_size=(64, 64))
        getattr(theirs, name).data = found.data.view(torch.float8_e4m3fn).view(found.shape)
        getattr(theirs, f"{name}_scale_inv").data = found.parts.scales
        getattr(experts, name).data = found.dequantize()
    hidden, ids, weights = randn(9, 128).requires_grad_(), torch.rand(9, 6).argsort(-1)[:, :2], randn(9, 2).abs()
    with pytest.raises(ValueError, match="gate_up_weight: a quantized weight has no gradient"):
        theirs(hidden, ids, weights)
    found = []
    for module in (theirs, experts):
        module.requires_grad_(False)
        out = module(hidden, ids, weights)
        found.append([out, *torch.autograd.grad(out, [hidden], torch.ones_like(out))])
    close(*found)
    theirs.down_proj_scale_inv.requires_grad_()
    with pytest.raises(ValueError, match="down_weight: a quantized weight has no gradient, and that of its scales"):
        theirs(hidden, ids, weights)
    theirs.down_proj_scale_inv.requires_grad_(False)
    out = theirs(hidden, ids, weights)
    for replace in (lambda old: torch.nn.Parameter(4 * old, requires_grad=False), lambda old: old.data.mul_(0.25)):
        new = replace(theirs.down_proj_scale_inv)
        if isinstance(new, torch.nn.Parameter):
            theirs.down_proj_scale_inv = new
        close([theirs(hidden, ids, weights)], [4 * out if isinstance(new, torch.nn.Parameter) else out])
    assert [line.format for line in moe.describe(theirs)] == ["fp8_block (blocks of 64 x 64)"] * 2
    assert [line.format for line in moe.describe(experts)] == ["float32"] * 2


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_scales_of_fp8_experts_of_another_shape(rows):
    experts = torch.nn.Module()
    experts.block_size = 64, 64
    experts.gate_up_proj = torch.zeros(3, 256, 128).to(torch.float8_e4m3fn)
    experts.gate_up_proj_scale_inv = torch.rand(3, rows, 2)
    with pytest.raises(ValueError, match=rf"gate_up_proj: scales: expected shape \(3, 4, 2\) .* got \(3, {rows}, 2\)"):
        QuantizedWeight.from_transformers(experts, "gate_up_proj")


def test_experts_that_are_not_run_are_described_as_such(families, monkeypatch):
    experts = families.experts_of("mixtral")
    experts.config._experts_implementation = "onepass"
    assert all("onepass: grouped GEMM" in line.path for line in moe.describe(experts))
    monkeypatch.setattr(type(experts), "_apply_gate", lambda self, x: x.chunk(2, -1)[0].square())
    lines = [line.path for line in moe.describe(experts)]
    assert len(lines) == 2 and all("not supported: experts_implementation='onepass'" in line for line in lines)
    with pytest.raises(NotImplementedError, match="_apply_gate is none of"):
        experts(randn(5, 24), torch.tensor([[0, 1]] * 5), torch.ones(5, 2))


def test_gate_and_up_within_one_block_of_fp8():
    """Each of them has a scale, as transformers allocates them."""
    experts = torch.nn.Module()
    experts.block_size = 64, 64
    codes, scales = randn(3, 40, 128).to(torch.float8_e4m3fn), torch.rand(3, 2, 2)
    experts.gate_up_proj, experts.gate_up_proj_scale_inv = codes, scales
    found = QuantizedWeight.from_transformers(experts, "gate_up_proj").to(torch.float32).dequantize()
    wide = scales.repeat_interleave(20, 1).repeat_interleave(64, 2)
    assert torch.equal(found, codes.float() * wide)


def test_sharded_experts_are_an_error(families):
    """Codes of experts that are sharded over processes; without processes: this is said before anything is read."""
    peft = pytest.importorskip("peft")
    experts = families.experts_of("mixtral")
    weight = randn(2, 3, 64)
    weight.device_mesh = "of a DTensor"
    with pytest.raises(TypeError, match=r"down_proj: expected a weight that is not sharded .* got a DTensor"):
        quantize(weight, "nf4", name="down_proj")
    moe.quantize_experts(experts, "nf4")
    experts.config._experts_implementation, experts._is_expert_parallel = "onepass", True
    block = torch.nn.ModuleDict({"experts": experts})
    config = peft.LoraConfig(r=3, target_modules=[], target_parameters=["experts.down_proj"])
    rows = randn(5, 24), torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 2)
    with onepass.patch("transformers"):
        for name in ("gate_up_proj", "down_proj"):  # without an adapter, and with one
            if name == "down_proj":
                peft.inject_adapter_in_model(config, block)
            with pytest.raises(NotImplementedError, match=rf"MixtralExperts\.{name} is sharded .* got torch.uint8"):
                block["experts"](*rows)


def test_mxfp4_experts_of_transformers(families):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    experts = families.experts_of("gpt_oss", hidden_size=64, intermediate_size=32)
    theirs = mxfp4.Mxfp4GptOssExperts(experts.config)
    for name in ("gate_up_proj", "down_proj"):
        found = quantize(getattr(experts, name).detach().mT, "mxfp4", name=name)
        getattr(theirs, name).data = found.data.view(getattr(theirs, name).shape)
        setattr(theirs, f"{name}_scales", found.parts.scales)
        again = QuantizedWeight.from_transformers(theirs, name).to(torch.float32)
        assert again.shape == getattr(experts, name).mT.shape and torch.equal(again.dequantize(), found.dequantize())


def test_a_state_is_saved_and_loaded(families, tmp_path):
    experts, other = (families.experts_of("mixtral") for _ in range(2))
    moe.quantize_experts(experts, "nf4", nested=True)
    with torch.no_grad():
        other.gate_up_proj.mul_(2)
    assert moe.quantize_experts(other, "nf4", nested=True) == 2 and moe.quantize_experts(other, "fp4") == 0
    other.load_state_dict(experts.state_dict())
    other.to(torch.bfloat16).to(torch.float32)  # leaves codes and scales alone
    assert torch.equal(other.gate_up_proj, experts.gate_up_proj)


def test_a_state_without_values_is_loaded(families):
    experts = families.experts_of("mixtral")
    moe.quantize_experts(experts, "nf4")
    experts.load_state_dict({n: t.to("meta") for n, t in experts.state_dict().items()}, assign=True)
    assert {t.device.type for t in experts.state_dict().values()} == {"meta"}


STATES = [("nf4", None), ("fp4", None), ("int8", None), ("fp8_row", None), ("fp8_block", (8, 16)),
          ("fp8_block", (16, 8))]  # fmt: skip


@pytest.mark.parametrize("saved", STATES)
def test_a_state_of_another_format_is_an_error(families, saved):
    """Where the codes and the scales have as many bytes, too."""
    models = {}
    for kind in STATES:
        models[kind] = families.experts_of("mixtral")
        moe.quantize_experts(models[kind], kind[0], block_size=kind[1])
    state = models[saved].state_dict()
    for kind, experts in models.items():
        for loaded in (experts, copy.deepcopy(experts), copy.deepcopy(experts).to("meta").to_empty(device="cpu")):
            if kind == saved:
                loaded.load_state_dict(state)
                assert torch.equal(loaded.down_proj, models[saved].down_proj)
            else:
                for strict in (True, False):
                    with pytest.raises(RuntimeError, match=rf"down_proj.0: expected codes of .*, got {saved[0]} "):
                        loaded.load_state_dict(state, strict=strict)


def small_model(families, implementation, decoded=False):
    """NF4 experts with LoRA, of which ``decoded`` ones are plain tensors."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes = families.SMALL | dict(hidden_size=32, head_dim=16, vocab_size=256, num_hidden_layers=1)
    config = transformers.AutoConfig.for_model("qwen3_moe", **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    assert moe.quantize_experts(model, "nf4") == 2
    names = [line.name for line in moe.describe(model)]  # whole: PEFT has no suffixes for what is parametrized
    if decoded:  # PEFT 0.21 does not take its adapters off a parametrized weight again
        assert moe.dequantize_experts(model) == 2
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], target_parameters=names)
    model = peft.get_peft_model(model, lora)
    for n, p in model.named_parameters():  # PEFT nests what is parametrized in another order
        if p.requires_grad:
            p.data = randn(*p.shape, seed=sum(p.shape)) * (0 if "lora_B" in n else 0.5)
    return model


def test_a_copy_is_decoded_alone(families, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    experts = families.experts_of("mixtral")
    assert moe.quantize_experts(experts, "nf4") == 2
    copied, expected = copy.deepcopy(experts), experts.gate_up_proj
    assert moe.dequantize_experts(copied) == 2
    assert torch.equal(copied.gate_up_proj, expected) and torch.equal(experts.gate_up_proj, expected)
    assert type(copied.gate_up_proj) is torch.nn.Parameter and type(copied) is type(families.experts_of("mixtral"))
    assert moe.dequantize_experts(experts) == 2 and torch.equal(experts.gate_up_proj, expected)


def test_the_memory_of_decoded_experts(families, monkeypatch):
    """The limit reaches the operation, for all experts of a model, also in a copy; None is the default again."""
    from onepass.integrations import transformers_experts

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    given, original = [], transformers_experts.expert_mlp

    def expert_mlp(*args, max_memory, **options):
        given.append(max_memory)
        return original(*args, max_memory=max_memory, **options)

    monkeypatch.setattr(transformers_experts, "expert_mlp", expert_mlp)
    layers = [families.experts_of("mixtral") for _ in range(2)]
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), *layers])
    hidden, ids = randn(5, 24), torch.tensor([[0, 1]] * 5)
    for limit in (1 << 20, None):
        assert moe.set_decoding_memory(model, limit) == 2
        assert moe.quantize_experts(model, "nf4") in (4, 0) and len(moe.describe(model)) == 4
        given.clear()
        for experts in (*layers, copy.deepcopy(layers[0])):
            experts.config._experts_implementation = "onepass"
            experts(hidden, ids, torch.ones(5, 2))
        assert given == [limit] * 3
    assert moe.set_decoding_memory(torch.compile(layers[0], backend="eager"), 1) == 1
    for wrong in (0, 1.5, True, "1 GiB"):
        with pytest.raises((TypeError, ValueError), match="max_memory: expected"):
            moe.set_decoding_memory(model, wrong)
    with pytest.raises(TypeError, match="model: expected one with experts, got Linear, which has none"):
        moe.set_decoding_memory(torch.nn.Linear(2, 2), 1)
    with pytest.raises(TypeError, match=r"model: expected a torch.nn.Module, got"):
        moe.set_decoding_memory([model], 1)


def test_training_after_inference_mode(families, monkeypatch):
    """What is kept of a quantized weight that inference mode has read cannot be saved for a backward."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    experts = families.experts_of("mixtral")
    experts.config._experts_implementation = "onepass"
    assert moe.quantize_experts(experts, "nf4") == 2
    hidden, ids = randn(5, 24).requires_grad_(), torch.tensor([[0, 1]] * 5)
    with torch.inference_mode():
        expected = experts(hidden, ids, torch.ones(5, 2))
    out = experts(hidden, ids, torch.ones(5, 2))
    out.sum().backward()
    assert torch.equal(out, expected) and hidden.grad.isfinite().all()


@pytest.mark.parametrize("unloads", [False, True])
def test_adapters_are_not_merged_into_codes(families, unloads, monkeypatch):
    """PEFT would add them to a copy of the values."""
    peft = pytest.importorskip("peft", "0.21")
    block = torch.nn.ModuleDict({"experts": families.experts_of("qwen3_moe")})
    moe.quantize_experts(block, "nf4")
    names = ["experts.gate_up_proj", "experts.down_proj"]
    model = peft.PeftModel(block, peft.LoraConfig(r=3, init_lora_weights=False, target_modules=[],
                                                  target_parameters=names))  # fmt: skip
    with onepass.patch("transformers"):
        message = "expected a weight that is not quantized, to merge an adapter into it, got 'nf4'; call onepass"
        with pytest.raises(ValueError, match=message):
            model.merge_and_unload() if unloads else model.merge_adapter()
        assert moe.dequantize_experts(model) == 2
        model.merge_adapter()
        moe.quantize_experts(model, "fp8_row")
        hidden, ids = randn(5, 24), torch.tensor([[0, 1]] * 5)
        merged = block["experts"](hidden, ids, torch.ones(5, 2))
        with pytest.raises(ValueError, match="to take a merged adapter out of it, got 'fp8_row'; call onepass"):
            model.unmerge_adapter()
        with pytest.raises(ValueError, match="to take a merged adapter out of it"), model.disable_adapter():
            block["experts"](hidden, ids, torch.ones(5, 2))
        assert torch.equal(block["experts"](hidden, ids, torch.ones(5, 2)), merged)
        moe.dequantize_experts(model)
        model.unmerge_adapter()


def test_what_is_read_again(families, monkeypatch):
    """Tensors of a quantized weight that have been replaced; of a weight that has been decoded, nothing is kept."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    experts = families.experts_of("mixtral")
    experts.config._experts_implementation = "onepass"
    moe.quantize_experts(experts, "nf4")
    given = randn(5, 24), torch.tensor([[0, 1]] * 5), torch.ones(5, 2)
    first = experts(*given)
    stored = experts.parametrizations.down_proj[0]
    stored.scales = (2 * stored.scales.view(torch.float32)).view(torch.uint8)
    torch.testing.assert_close(experts(*given), 2 * first)
    codes = weakref.ref(experts.parametrizations.down_proj.original.untyped_storage())
    alive = codes() is not None
    moe.dequantize_experts(experts)
    torch.testing.assert_close(experts(*given), 2 * first)
    gc.collect()
    assert alive and codes() is None


def test_adapters_of_the_only_expert():
    """PEFT has another form for one expert."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=16, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_experts=1, num_experts_per_tok=1, experts_implementation="onepass",
    )  # fmt: skip
    ids, names = torch.arange(8)[None], [f"model.layers.0.mlp.experts.{n}" for n in ("gate_up_proj", "down_proj")]
    with onepass.patch("transformers"):
        model = transformers.Qwen3MoeForCausalLM(config)
        moe.quantize_experts(model, "nf4")
        lora = peft.LoraConfig(r=2, target_modules=[], target_parameters=names, init_lora_weights=False)
        model = peft.get_peft_model(model, lora)
        found = []
        for _ in range(2):
            loss = model(input_ids=ids, labels=ids).loss
            adapters = [p for n, p in model.named_parameters() if "lora" in n]
            found.append((loss, *torch.autograd.grad(loss, adapters)))
            moe.dequantize_experts(model)
    assert len(found[0]) == 5
    for quantized, decoded in zip(*found):
        assert torch.allclose(quantized, decoded, rtol=1e-5, atol=1e-6) and decoded.any()


def test_adapters_without_the_patch_are_an_error(families):
    """PEFT 0.21 leaves them behind on a parametrized weight, where they would apply when adapters are disabled."""
    tokens = torch.arange(7).view(1, 7)
    model = small_model(families, "onepass")
    with pytest.raises(NotImplementedError, match=r"proj: PEFT would add .* call onepass\.patch"):
        model(tokens)
    with onepass.patch("transformers"):
        model(tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_cast_of_the_model(families, dtype):
    """The values have the dtype of the model, as those of its other parameters."""
    model = torch.nn.ModuleDict({"experts": families.experts_of("qwen3_moe"), "gate": torch.nn.Linear(3, 3)})
    moe.quantize_experts(model, "nf4")
    expected = model["experts"].down_proj
    model.to(dtype)
    assert model["experts"].down_proj.dtype == dtype
    assert moe.dequantize_experts(model) == 2
    assert all(p.dtype == dtype for p in model.parameters())
    torch.testing.assert_close(model["experts"].down_proj.data, expected.to(dtype))


def test_fifty_steps_on_the_demo_text(families, monkeypatch, tmp_path):
    """With the experts of onepass on NF4, and with those of transformers on decoded weights; then saved and merged."""
    from onepass.cli.demo_model import Size, load_text, sample_windows

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    tokens = torch.frombuffer(bytearray(load_text()[:20000].encode()), dtype=torch.uint8).long()
    batches = sample_windows(tokens, 50, Size(256, 32, 1, 4, 24), 0)
    curves = []
    with onepass.patch("transformers"):
        for implementation in ("eager", "onepass"):
            model = small_model(families, implementation, decoded=implementation == "eager")
            head = model.get_output_embeddings().weight.requires_grad_()
            head.data = randn(*head.shape) * 0.5
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
            losses = []
            for batch in batches:
                logits = model(batch[:, :-1]).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            curves.append(torch.tensor(losses))
        assert curves[0][-5:].mean() < curves[0][:5].mean() - 0.3
        assert (curves[0] - curves[1]).abs().max() < 1e-3

        expected = model(batches[0]).logits
        model.save_pretrained(tmp_path)
        again = small_model(families, "onepass")
        again.load_adapter(tmp_path, "default")
        again.get_output_embeddings().weight.data = head.data
        torch.testing.assert_close(again(batches[0]).logits, expected)
        assert moe.dequantize_experts(again) == 2
        torch.testing.assert_close(again.merge_and_unload()(batches[0]).logits, expected, rtol=1e-4, atol=1e-4)
