"""Experts with quantized weights: results and gradients against those with decoded weights."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from onepass.core.moe_options import ExpertOptions
from onepass.core.quantized import FORMATS
from onepass.moe import QuantizedWeight, expert_mlp, quantize, scattered_linear
from paths import interpreted
from quantized_cases import E, H, I, K, T, close, inputs, randn, results


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
    kernels = import_module("onepass.kernels.grouped_gemm")
    of = quantize(randn(2, 128, 64), "nf4").format
    product = kernels.Product(
        assignments=0, tiles=4, E=2, N=64, K=64, R=3, share=1, scatter=False, glu=False, scale=1.0,
        options=ExpertOptions(), x_row=64, lora_strides=(1, 1, 1), element=4, device=torch.device("cpu"),
    )  # fmt: skip
    for rows in (16, 32, 64, 128):
        for glu in (False, True):
            found = kernels.decoding_plan(product._replace(assignments=2 * rows, glu=glu), of)
            assert found.constexprs["STAGES"] >= 1 and found.constexprs["BLOCK_M"] == rows
        with pytest.raises(ValueError, match="shared memory, got 4096"):
            kernels.decoding_plan(product._replace(assignments=2 * rows, R=4096), of)


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
