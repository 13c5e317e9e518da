"""Decoded experts that stay in memory from a forward to its backward."""

from functools import partial
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from onepass.moe import expert_mlp, quantize, scattered_linear
from paths import interpreted
from quantized_cases import E, H, I, close, inputs, randn, results

EXPERT = H * I * 4  # bytes of an expert of the decoded weight down, in float32; gate_up has twice as many
CASES = {  # bytes at a time: what a forward decodes, and its backward; of an expert the weight, its number, how many
    1: (
        [(w, e, 1) for w in "ud" for e in range(E)],
        [("d", e, 1) for e in range(E - 1)] + [("u", e, 1) for e in range(E)],
    ),
    5 * EXPERT: ([("u", 0, 2), ("u", 2, 2), ("u", 4, 1), ("d", 0, 5)], [("u", 0, 2), ("u", 2, 2), ("u", 4, 1)]),
    10 * EXPERT: ([("u", 0, 2), ("u", 2, 3), ("d", 0, 5)], [("u", 2, 3)]),
    1 << 30: ([("u", 0, 5), ("d", 0, 5)], []),
}  # fmt: skip


@pytest.fixture
def decoded(device, monkeypatch):
    """What is decoded, as in `CASES`."""
    if device.type == "cpu" and not interpreted(device):
        pytest.skip("no expert stays decoded on a CPU")
    monkeypatch.setattr(import_module("onepass.kernels.grouped_gemm"), "is_decoded_in_loop", lambda *_: False)
    module = import_module("onepass.kernels.decoded_experts")
    found, original = [], module.decode

    def decode(weight, out, first, offsets):
        found.append(("u" if weight.format.rows * weight.format.columns > H * I else "d", first, len(out)))
        return original(weight, out, first, offsets)

    monkeypatch.setattr(module, "decode", decode)
    monkeypatch.setattr(module, "_kept", {})
    monkeypatch.setattr(import_module("onepass.kernels.zeros"), "GRAPHS", "no module")  # a test may have imported it
    return found


def layer(device, seed=0):
    """A layer of experts with quantized weights, as a function of the hidden states, and the same with decoded ones."""
    _, ids, _ = inputs(device)
    weights = randn(E, 2 * I, H, seed=seed + 10), randn(E, H, I, seed=seed + 11)
    quantized = [quantize(w, "fp8_row").to(device) for w in weights]
    routing = SimpleNamespace(weights=randn(*ids.shape, seed=seed).abs().to(device), experts=ids)
    both = quantized, [w.dequantize() for w in quantized]
    return [lambda x, pair=pair: expert_mlp(x, routing, *pair, max_memory=1 << 30) for pair in both]


def gradient(out, x, **options):
    x.grad = None
    out.square().sum().backward(**options)
    return x.grad


@pytest.mark.pairs
@pytest.mark.usefixtures("uninitialised_memory_is_nan")
@pytest.mark.parametrize("max_memory", CASES)
@pytest.mark.parametrize("transposed", [False, True])
def test_what_remains_is_not_decoded_again(device, decoded, monkeypatch, max_memory, transposed):
    module = import_module("onepass.kernels.decoded_experts")
    sizes, of_weight = [], module.DecodedExperts.of

    def of(self, *given):
        for chunk in of_weight(self, *given):
            sizes.append(sum(t.nbytes for t in self.memory.values()))
            yield chunk

    monkeypatch.setattr(module.DecodedExperts, "of", of)
    tensors, ids, weights = inputs(device, transposed)
    quantized = [quantize(w, "fp8_row").to(device) for w in weights]
    expected = results(tensors, ids, [w.dequantize() for w in quantized], transposed=transposed)
    close(results(tensors, ids, quantized, transposed=transposed, max_memory=max_memory), expected)
    forward, backward = CASES[max_memory]
    assert decoded == forward + backward and max(sizes) <= max(max_memory, 2 * EXPERT)
    assert not module._kept


def test_each_layer_has_its_own(device, decoded):
    """The backward of another layer, in any order, twice, and after a forward without a backward."""
    x = randn(14, H, seed=1).to(device).requires_grad_()
    (first, first_expected), (second, second_expected) = layer(device), layer(device, 20)
    wanted = [gradient(run(x), x) for run in (first_expected, second_expected)]
    for order in ((0, 1), (1, 0)):
        outs = [first(x), second(x)]
        for n in order:
            close([gradient(outs[n], x)], [wanted[n]])
    decoded.clear()
    out = first(x)
    for times in range(2):
        close([gradient(out, x, retain_graph=True)], [wanted[0]])
        assert len(decoded) == 2 + 2 * times
    decoded.clear()
    out = first(x)
    with torch.no_grad():
        second(x)
    close([gradient(out, x)], [wanted[0]])
    assert len(decoded) == 6


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_gradient_checkpointing(device, decoded, use_reentrant):
    """Each layer is decoded in the forward and when it is computed again, and not for the backward after that."""
    x, layers = randn(14, H, seed=1).to(device).requires_grad_(), [layer(device), layer(device, 20)]
    run = partial(checkpoint, use_reentrant=use_reentrant)
    out = run(layers[1][0], run(layers[0][0], x))
    assert not import_module("onepass.kernels.decoded_experts")._kept, "until a forward is computed again"
    close([gradient(out, x)], [gradient(layers[1][1](layers[0][1](x)), x)])
    assert decoded == [("u", 0, E), ("d", 0, E)] * 4


def test_saved_tensors_that_are_moved(device, decoded):
    """A copy of the saved tensor may be that of any forward, so that nothing that is decoded is used."""
    x, (run, expected) = randn(14, H, seed=1).to(device).requires_grad_(), layer(device)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        out = run(x)
    close([gradient(out, x)], [gradient(expected(x), x)])
    assert len(decoded) == 4


def test_nothing_is_kept_without_a_backward_to_come(device, decoded):
    kept = import_module("onepass.kernels.decoded_experts")._kept
    x, (run, _) = randn(14, H, seed=1).to(device).requires_grad_(), layer(device)
    out = run(x)
    assert kept
    del out
    assert not kept
    out = run(x)
    scattered_linear(x, quantize(randn(E, I, H), "fp8_row").to(device), inputs(device)[1])
    assert not kept
    del out


def test_memory_is_for_weights_that_are_not_decoded_within_the_gemm(device, decoded, monkeypatch):
    """Here `down`, so that there is none for `gate_up`."""
    module = import_module("onepass.kernels.grouped_gemm")
    monkeypatch.setattr(module, "is_decoded_in_loop", lambda f, *_: f.rows * f.columns > H * I)
    x, (run, expected) = randn(14, H, seed=1).to(device).requires_grad_(), layer(device)
    out = run(x)
    (kept,) = import_module("onepass.kernels.decoded_experts")._kept.values()
    assert sum(t.nbytes for t in kept.decoded.memory.values()) == 5 * EXPERT
    close([gradient(out, x)], [gradient(expected(x), x)])


@pytest.mark.gpu
def test_streams_and_graphs(decoded, device):
    from paths import captured

    module = import_module("onepass.kernels.decoded_experts")
    x, (run, expected) = randn(14, H, seed=1).to(device).requires_grad_(), layer(device)
    wanted = gradient(expected(x), x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        close([gradient(run(x), x)], [wanted])
    torch.cuda.current_stream().wait_stream(stream)
    run(x)
    graph, got = captured(lambda: gradient(run(x), x))
    assert not module._kept
    graph.replay()
    close([got], [wanted])
