"""Quantized experts: decoding against bitsandbytes and transformers, results and gradients against decoded weights."""

import copy
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import onepass
from onepass import moe
from onepass.core.moe_options import ExpertOptions
from onepass.core.quantized import FORMATS
from onepass.moe import QuantizedWeight, expert_mlp, quantize, scattered_linear
from paths import interpreted

SHAPES = (3, 5, 7), (2, 33, 64), (2, 24, 100)  # an odd number of codes; odd rows; columns that no block divides


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


@pytest.fixture(scope="module")
def bitsandbytes():
    if not find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is not installed")
    with pytest.MonkeyPatch.context() as patch:
        # Its import asks a server for a kernel, and its fallbacks are compiled.
        if find_spec("kernels"):
            patch.setattr("kernels.get_kernel", lambda *_, **__: 1 / 0, raising=False)
        patch.setattr("torch._dynamo.config.disable", True)
        pytest.importorskip("bitsandbytes")
        yield pytest.importorskip("bitsandbytes.functional")


def dtypes(device):
    """The interpreter cuts bfloat16 off instead of rounding it."""
    return (torch.float32, torch.float16) if interpreted(device) else (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@pytest.mark.parametrize("block", [32, 64, 128, 256, 512, 1024, 2048, 4096])
def test_bitwise_as_bitsandbytes(device, bitsandbytes, block, nested):
    """As its build for the device: that for CPUs may round ties of float16 otherwise than to even.

    Its CPU build takes each row for whole blocks, and is asked for one row.
    """
    for shape in SHAPES[block % 3 :: 2]:
        for format, dtype in zip(("nf4", "fp4", "nf4"), dtypes(device)):
            w = randn(*shape).to(dtype)
            data, state = bitsandbytes.quantize_4bit(w, blocksize=block, quant_type=format, compress_statistics=nested)
            state.to(device)
            data = data.to(device)
            ours = QuantizedWeight.from_bitsandbytes(data, state)
            state.shape = torch.Size([w.numel()])
            expected = bitsandbytes.dequantize_4bit(data, state).view(shape)
            assert ours.dtype == dtype and torch.equal(ours.dequantize(), expected)
            assert (expected.cpu() - w).norm() < 0.2 * w.norm()


def test_bitwise_as_bitsandbytes_int8(device, bitsandbytes):
    for shape in SHAPES:
        data, stats, _ = bitsandbytes.int8_vectorwise_quant(randn(*shape).half().flatten(0, 1))
        ours = QuantizedWeight.from_bitsandbytes(data.view(shape).to(device), stats.to(device))
        expected = torch.ops.bitsandbytes.int8_vectorwise_dequant(data, stats)
        assert torch.equal(ours.to(torch.float32).dequantize().cpu().flatten(0, 1), expected)


def test_bitwise_as_mxfp4_of_transformers(device):
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = torch.randint(0, 256, (3, 5, 4, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    blocks[0, 0, 0] = torch.arange(16) * 17
    scales = torch.randint(110, 140, (3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    scales[0, :2, 0] = torch.tensor([0, 254])
    for dtype in dtypes(device):
        expected = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=dtype).mT
        ours = QuantizedWeight(blocks.to(device), scales.to(device), "mxfp4", (3, 5, 128), dtype=dtype)
        assert torch.equal(ours.dequantize().cpu(), expected), dtype


@pytest.mark.parametrize("shape, block", [((3, 256, 384), (128, 128)), ((2, 6, 35), (6, 7)), ((2, 6, 35), (1, 35))])
def test_bitwise_as_fp8_of_transformers(device, shape, block):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    data[(data & 127) == 127] = 1
    data = data.view(torch.float8_e4m3fn)
    scales = randn(shape[0], shape[1] // block[0], shape[2] // block[1]).abs()
    for dtype in dtypes(device):
        expected = torch.stack([fp8.Fp8Dequantize(None)._dequantize_one(*one, dtype) for one in zip(data, scales)])
        options = dict(dtype=dtype, block_size=block)
        ours = QuantizedWeight(data.to(device), scales.to(device), "fp8_block", shape, **options)
        assert torch.equal(ours.dequantize().cpu(), expected)
        if block[0] == 1:
            rows = QuantizedWeight(data.to(device), scales.to(device), "fp8_row", shape, dtype=dtype)
            assert torch.equal(rows.dequantize().cpu(), expected)


E2M1 = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0


@pytest.mark.parametrize("shape", SHAPES)
def test_nvfp4_is_its_definition(device, shape):
    weight = quantize(randn(*shape), "nvfp4")
    scales = weight.parts.scales.view(torch.float8_e4m3fn).double().view(*shape[:2], -1)
    bytes_ = weight.data.view(*shape[:2], -1)
    codes = torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(2)
    values = torch.tensor(E2M1, dtype=torch.float64)[(codes & 7).long()] * (1 - 2 * (codes > 7).double())
    expected = values * scales.repeat_interleave(16, -1) * weight.parts.outer_scales[0].double()
    got = weight.to(device).dequantize().cpu().double()
    torch.testing.assert_close(got, expected[..., : shape[2]], rtol=3e-7, atol=0)


@pytest.mark.parametrize("format", FORMATS)
def test_quantize_takes_the_nearest_value(device, format):
    bound = {"int8": 0.012, "fp8_block": 0.04, "fp8_row": 0.04}.get(format, 0.2)
    for shape in SHAPES:
        w = randn(*shape)
        w[0, 0] = 0.0
        decoded = quantize(w, format).to(device).dequantize().cpu()
        assert decoded.shape == w.shape and (decoded - w).norm() < bound * w.norm()
        assert not decoded[0, 0].any()
        again = quantize(decoded, format).dequantize()  # its values are representable, up to the scale's rounding
        torch.testing.assert_close(again, decoded, rtol=0 if format == "mxfp4" else 2e-2, atol=1e-7)
        if FORMATS[format].flat:
            nested = quantize(w, format, nested=True)
            assert (nested.to(device).dequantize().cpu() - w).norm() < bound * w.norm()


@pytest.mark.parametrize("format", FORMATS)
def test_the_largest_numbers_stay_finite(device, format):
    w = (torch.linspace(0.5, 1, 2 * 32 * 64).view(2, 32, 64) * torch.finfo(torch.float16).max).half()
    w[0], w[1, 1] = w[0] / 8, -w[1, 1]
    for nested in (False, True) if FORMATS[format].flat else (False,):
        decoded = quantize(w, format, nested=nested).to(device).dequantize().cpu()
        torch.testing.assert_close(decoded.double(), w.double(), rtol=0.5, atol=0)


# Results and gradients


T, H, I, E, K = 14, 40, 48, 5, 2  # noqa: E741


def inputs(device, transposed=False):
    of = {
        "hidden": randn(T, H, seed=1), "weights": randn(T, K, seed=2).abs(), "gate_up_bias": randn(E, 2 * I, seed=3),
        "down_bias": randn(E, H, seed=4), "a1": randn(E, 3, H, seed=5), "b1": randn(E, 2 * I, 3, seed=6),
        "a2": randn(E, 3, I, seed=7), "b2": randn(E, H, 3, seed=8),
    }  # fmt: skip
    of = {name: t.to(device).requires_grad_() for name, t in of.items()}
    ids = torch.rand(T, E - 1, generator=torch.Generator().manual_seed(9)).argsort(-1)[:, :K]  # one expert has no token
    ids[0, 0] = -1
    weights = randn(E, 2 * I, H, seed=10), randn(E, H, I, seed=11)
    return of, ids.to(device), [w.mT.contiguous() if transposed else w for w in weights]


def results(of, ids, weights, **options):
    out = expert_mlp(
        of["hidden"], SimpleNamespace(weights=of["weights"], experts=ids), *weights, gate_up_bias=of["gate_up_bias"],
        down_bias=of["down_bias"], lora_gate_up=(of["a1"], of["b1"], 0.7), lora_down=(of["a2"], of["b2"], 1.3),
        **options,
    )  # fmt: skip
    upstream = torch.linspace(-1, 1, out.numel(), device=out.device, dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad(out, list(of.values()), upstream)]


def close(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * b.abs().max().item())


@pytest.mark.usefixtures("uninitialised_memory_is_nan")
@pytest.mark.parametrize("format", FORMATS)
def test_experts_as_with_decoded_weights(device, monkeypatch, format):
    """Decoded in chunks, and by the grouped GEMM itself."""
    if interpreted(device) and format in ("fp4", "nvfp4", "int8", "fp8_row"):
        pytest.skip("the grouped GEMM is that of the others")
    transposed = format in ("fp4", "fp8_block")
    of, ids, weights = inputs(device, transposed)
    quantized = [quantize(w, format, nested=format == "nf4").to(device) for w in weights]
    decoded = [w.dequantize() for w in quantized]
    expected = results(of, ids, decoded, transposed=transposed)
    close(results(of, ids, quantized, transposed=transposed), expected)
    if format == "nf4":
        turns = dict(transposed=transposed, interleaved=True)
        close(results(of, ids, quantized, **turns), results(of, ids, decoded, **turns))
    if device.type == "cuda" or interpreted(device):
        grouped_gemm = import_module("onepass.kernels.grouped_gemm")
        assert all(grouped_gemm.is_decoded_in_loop(w.format, T * K, 2) for w in quantized)
        monkeypatch.setattr(grouped_gemm, "is_decoded_in_loop", lambda *_: False)
    close(results(of, ids, quantized, transposed=transposed, max_memory=3 * 2 * I * H * 4), expected)
    if format in ("nf4", "fp4"):
        close(results(of, ids, quantized, transposed=transposed, max_memory=1), expected)
        close(results(of, ids, [w.mT for w in quantized], transposed=not transposed), expected)
        close(results(of, ids, [decoded[0], quantized[1]], transposed=transposed), expected)


def test_a_tile_that_is_decoded_fits_into_shared_memory():
    """The interpreter has as much of it as the smallest card, and rows of float32 take twice as much."""
    pytest.importorskip("triton")
    plan = import_module("onepass.kernels.grouped_gemm").decoding_plan
    of, rest = quantize(randn(2, 128, 64), "nf4").format, (64, (1, 1, 1), 4, torch.device("cpu"))
    for rows in (16, 32, 64, 128):
        for glu in (False, True):
            found = plan((2 * rows, 4, 2, 64, 64, 3, 1), (glu, False, 1.0), ExpertOptions(), *rest, of)
            assert found.constexprs["STAGES"] >= 1 and found.constexprs["BLOCK_M"] == rows
        with pytest.raises(ValueError, match="shared memory, got 4096"):
            plan((2 * rows, 4, 2, 64, 64, 4096, 1), (False, False, 1.0), ExpertOptions(), *rest, of)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_empty_weights(format, shape):
    assert quantize(torch.empty(shape), format).dequantize().shape == shape


def test_float64_experts():
    of, ids, weights = inputs("cpu")
    of = {name: t.detach().double().requires_grad_() for name, t in of.items()}
    quantized = [quantize(w, "nf4").to(torch.float64) for w in weights]
    close(results(of, ids, quantized), results(of, ids, [w.dequantize() for w in quantized]))


def test_scattered_linear_as_with_decoded_weights(device):
    of, ids, (weight, _) = inputs(device)
    quantized = quantize(weight, "nf4").to(device)
    for options in ({}, {"weights": of["weights"], "max_memory": 1}, {"grouped_out": True}):
        found = []
        for w in (quantized, quantized.dequantize()):
            out = scattered_linear(of["hidden"], w, ids, bias=of["gate_up_bias"], **options)
            found.append([out, *torch.autograd.grad(out.square().sum(), [of["hidden"], of["gate_up_bias"]])])
        close(*found)


def test_autocast_and_the_dtype_of_hidden(device):
    of, ids, weights = inputs(device)
    quantized = [quantize(w, "fp8_row").to(device).to(torch.bfloat16) for w in weights]
    with pytest.raises(TypeError, match=r"gate_up_weight: expected torch.float32, that of hidden, got torch.bfloat16"):
        results(of, ids, quantized)
    if not interpreted(device):  # it has no products of bfloat16
        with torch.autocast(device.type, dtype=torch.bfloat16):
            got = results(of, ids, quantized)
            expected = results(of, ids, [w.dequantize() for w in quantized])
        assert got[0].dtype == torch.bfloat16
        close(got, expected)


def test_compiled():
    of, ids, weights = inputs("cpu")
    quantized = [quantize(w, "nf4", nested=True) for w in weights]
    expected = results(of, ids, quantized)
    compiled = torch.compile(lambda of, ids: results(of, ids, quantized), backend="eager")
    close(compiled(of, ids), expected)


def test_only_experts_with_tokens_are_decoded(monkeypatch):
    from onepass.reference import experts

    decoded, original = [], experts.decode
    monkeypatch.setattr(experts, "decode", lambda w, out, e: decoded.append(e) or original(w, out, e))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    of, ids, weights = inputs("cpu")
    results(of, ids, [quantize(w, "nf4") for w in weights])
    assert set(decoded) == set(ids[ids >= 0].tolist()) and E - 1 not in decoded


# Bad input


def parts_of(shape, format):
    weight = quantize(randn(*shape), format)
    return {"data": weight.data, "scales": weight.parts.scales, "format": format, "shape": shape}


def damaged(tensor, value, at=0):
    found = tensor.clone()
    found.view(-1)[at] = value
    return found


NF4, FP8 = parts_of(SHAPES[1], "nf4"), parts_of((2, 6, 8), "fp8_row")
MX, NV = parts_of((2, 6, 64), "mxfp4"), parts_of((2, 6, 64), "nvfp4")
BAD = {
    "format: expected one of 'nf4'": NF4 | {"format": "nf5"},
    "scales: expected shape (66,) for 'nf4', got (65,)": NF4 | {"scales": NF4["scales"][1:]},
    "scales: expected shape (2, 6, 1) or (2, 6) or (12,) for 'fp8_row', got (6, 2)": (
        FP8 | {"scales": FP8["scales"].view(6, 2)}
    ),
    "data: expected 2112 bytes for shape (2, 33, 64) in 'nf4'": NF4 | {"data": NF4["data"][1:]},
    "scales: expected finite numbers, got NaN or infinity in 1 of 66 blocks, first in block 7": (
        NF4 | {"scales": damaged(NF4["scales"], float("nan"), 7)}
    ),
    "scales: expected finite numbers, got NaN or infinity in 1 of 24 blocks, first in block 0": (
        MX | {"scales": damaged(MX["scales"], 255)}
    ),
    "scales: expected finite numbers, got NaN or infinity in 1 of 48 blocks, first in block 3": (
        NV | {"scales": damaged(NV["scales"], 127, 3), "global_scale": 1.0}
    ),
    "data: expected codes of numbers, got NaN in expert 1": FP8 | {"data": damaged(FP8["data"], 255, 60)},
    "global_scale: expected one for 'nvfp4'": NV,
    "block_size: expected a power of two from 32 to 4096, got 48": NF4 | {"block_size": 48},
    "scales: expected torch.uint8": MX | {"scales": MX["scales"].float()},
    "shape: expected (E, outputs, inputs), got (66, 64)": NF4 | {"shape": (66, 64)},
    "data: expected torch.int8, got torch.uint8": FP8 | {"format": "int8"},
    "state: expected a QuantState": {"data": NF4["data"]},
    "expected numbers that are finite in float32": {"tensor": damaged(randn(2, 3, 4), float("inf")), "format": "fp4"},
    "expected numbers that are finite in float32, got NaN, infinity or larger ones": {
        "tensor": randn(2, 3, 4).double() * 1e300,
        "format": "int8",
    },
    "expected a tensor with values": {"tensor": torch.empty(2, 3, 4, device="meta"), "format": "fp4"},
    "expected a floating-point tensor (E, outputs, inputs)": {"tensor": randn(3, 4), "format": "fp4"},
    "nested: expected False for 'int8', got True": {"tensor": randn(2, 3, 4), "format": "int8", "nested": True},
}


@pytest.mark.parametrize("message", BAD)
def test_one_error_that_names_the_weight(message):
    given = BAD[message]
    function = QuantizedWeight if "scales" in given else QuantizedWeight.from_bitsandbytes
    with pytest.raises((TypeError, ValueError)) as error:
        (quantize if "tensor" in given else function)(**given, name="experts.3.down")
    assert str(error.value).startswith(f"experts.3.down: {message}")


def test_a_gradient_of_a_quantized_weight_is_an_error():
    of, ids, weights = inputs("cpu")
    data = quantize(weights[1], "fp8_row")
    asked = QuantizedWeight(
        torch.nn.Parameter(data.data.view(torch.float8_e4m3fn)),
        data.parts[0],
        "fp8_row",
        (E, H, I),
        dtype=torch.float32,
    )
    with pytest.raises(ValueError, match=r"down_weight: a quantized weight has no gradient.*requires_grad_\(False\)"):
        results(of, ids, [weights[0], asked])
    with torch.no_grad():
        expert_mlp(of["hidden"], SimpleNamespace(weights=of["weights"], experts=ids), weights[0], asked)


# Modules of transformers


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
    out = theirs(hidden, ids, weights)
    for replace in (lambda old: torch.nn.Parameter(4 * old, requires_grad=False), lambda old: old.data.mul_(0.25)):
        new = replace(theirs.down_proj_scale_inv)
        if isinstance(new, torch.nn.Parameter):
            theirs.down_proj_scale_inv = new
        close([theirs(hidden, ids, weights)], [4 * out if isinstance(new, torch.nn.Parameter) else out])
    assert [line.format for line in moe.describe(theirs)] == ["fp8_block (blocks of 64 x 64)"] * 2
    assert [line.format for line in moe.describe(experts)] == ["float32"] * 2


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


def test_a_cast_to_integers_is_an_error():
    with pytest.raises(TypeError, match=r"target: expected a floating-point dtype, got torch.int32"):
        quantize(randn(2, 4, 64), "nf4").to(torch.int32)


def test_a_weight_that_is_moved_leaves_nothing_behind():
    weight = moe.quantize(randn(2, 8, 64), "nf4")
    moved = weight.to("meta")
    assert {t.device.type for t in vars(moved).values() if isinstance(t, torch.Tensor)} == {"meta"}
    assert weight.data.device.type == "cpu" and weight.to(torch.float16).source is weight.source


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
