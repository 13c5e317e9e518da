"""Quantized weights: codes bit for bit as those of bitsandbytes and transformers, formats, and bad input."""

from types import SimpleNamespace

import pytest
import torch

from onepass import moe
from onepass.core.quantized import FORMATS
from onepass.moe import QuantizedWeight, quantize
from paths import interpreted
from quantized_cases import randn

SHAPES = (3, 5, 7), (2, 33, 64), (2, 24, 100)  # an odd number of codes; odd rows; columns that no block divides


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
    expected = values * scales.repeat_interleave(16, -1) * weight.parts.outer_scales.double().view(-1, 1, 1)
    got = weight.to(device).dequantize().cpu().double()
    torch.testing.assert_close(got, expected[..., : shape[2]], rtol=3e-7, atol=0)


def test_experts_of_other_magnitudes_in_nvfp4():
    w = randn(2, 3, 32) * torch.tensor([1.0, 1e-8])[:, None, None]
    decoded = quantize(w, "nvfp4").dequantize()
    assert all((d - expected).norm() < 0.2 * expected.norm() for d, expected in zip(decoded, w))


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


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 8), (2, 4, 0)])
def test_empty_weights(format, shape):
    assert quantize(torch.empty(shape), format).dequantize().shape == shape


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
    "global_scale: expected a number or a floating-point tensor, got 'x' (str)": NV | {"global_scale": "x"},
    "global_scale: expected a number or a floating-point tensor, got torch.complex64": (
        NV | {"global_scale": torch.ones((), dtype=torch.complex64)}
    ),
    "nested: expected (outer_scales, table, offset), got (1, 2) (tuple)": NF4 | {"nested": (1, 2)},
    "nested: table: expected a number or a floating-point tensor, got None": NF4 | {"nested": (1.0, None, 1.0)},
    "data: expected a dense tensor": NF4 | {"data": NF4["data"].to_sparse()},
    "scales: expected a dense tensor": NF4 | {"scales": NF4["scales"].to_sparse()},
    "data: expected codes of 4 bits, two in a byte, got torch.bool": NF4 | {"data": NF4["data"].view(torch.bool)},
    "expected magnitudes whose product with a code of 'int8' is finite": {
        "tensor": torch.full((2, 3, 4), 3e36),
        "format": "int8",
    },
    "block_size: expected a power of two from 32 to 4096, got 48": NF4 | {"block_size": 48},
    "block_size: expected an int, got torch.int64 of shape (2,)": NF4 | {"block_size": torch.tensor([64, 64])},
    "block_size: expected an int, got 64.0": NF4 | {"block_size": 64.0},
    "block_size: expected 32 for 'mxfp4', got torch.int64 of shape (2,)": MX | {"block_size": torch.tensor([32, 32])},
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


def test_nested_scales_in_other_blocks_than_those_of_bitsandbytes():
    weight = quantize(randn(2, 33, 64), "nf4", nested=True)
    scales, outer_scales, table, offset = weight.parts
    state = SimpleNamespace(
        absmax=scales, shape=weight.shape, code=None, blocksize=64, quant_type="nf4", dtype=weight.dtype,
        state2=SimpleNamespace(absmax=outer_scales, code=table, blocksize=256), offset=offset,
    )  # fmt: skip
    found = QuantizedWeight.from_bitsandbytes(weight.data, state)
    assert torch.equal(found.dequantize(), weight.dequantize())
    state.state2.blocksize = 128
    with pytest.raises(ValueError, match="nested: expected blocks of 256, got 128"):
        QuantizedWeight.from_bitsandbytes(weight.data, state)


def test_a_cast_to_integers_is_an_error():
    with pytest.raises(TypeError, match=r"target: expected a floating-point dtype, got torch.int32"):
        quantize(randn(2, 4, 64), "nf4").to(torch.int32)


def test_a_weight_that_is_moved_leaves_nothing_behind():
    weight = moe.quantize(randn(2, 8, 64), "nf4")
    moved = weight.to("meta")
    assert {t.device.type for t in vars(moved).values() if isinstance(t, torch.Tensor)} == {"meta"}
    assert weight.data.device.type == "cpu" and weight.to(torch.float16).sources is weight.sources
