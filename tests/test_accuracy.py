"""No less accurate than torch's own float32 log-softmax, at every vocabulary and magnitude; gradients rounded once."""

import pytest
import torch

import onepass

VOCABS = [1, 2, 3, 17, 127, 128, 1000, 4099, 32000, 50257, 128256, 151936, 262144]
ROWS = 64
# Results are sums of float32 terms of size 1 and more: a unit in the last place of those counts as no error, though
# torch's own may happen to be smaller.
ULP = torch.finfo(torch.float32).eps


def errors(vocab, dtype, magnitude, device, rows):
    """Largest errors against float64: of log-probs and entropy, ours and torch's, and of the gradient, in roundings."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(rows, vocab, generator=generator) * magnitude).to(dtype).to(device)
    index = torch.randint(vocab, (rows,), generator=generator).to(device)
    g_log_p, g_entropy = torch.randn(2, rows, generator=generator).to(device)

    def definition(x):
        log_p = x.log_softmax(-1)
        return log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)

    exact = logits.double().requires_grad_()
    log_p, entropy = definition(exact)
    (gradient,) = torch.autograd.grad((log_p, entropy), exact, (g_log_p.double(), g_entropy.double()))
    ours = logits.clone().requires_grad_()
    got = onepass.selective_log_softmax_and_entropy(ours, index)
    (got_gradient,) = torch.autograd.grad(got, ours, (g_log_p, g_entropy))
    torchs = definition(logits.float())
    worst = lambda a, b: (a.double() - b).abs().max().item()  # noqa: E731
    smallest = [ULP * max(1.0, e.abs().max().item()) for e in (log_p, entropy)]
    # One rounding of the output's dtype, and float32 arithmetic at the size of the terms that were added.
    eps = torch.finfo(dtype).eps
    terms = (g_log_p.abs() + g_entropy.abs() * (1 + entropy.abs())).unsqueeze(-1)
    bound = eps * gradient.abs() + 16 * ULP * (gradient.abs() + terms) + torch.finfo(dtype).tiny
    rounding = ((got_gradient.double() - gradient).abs() / bound).max().item()
    return (
        (worst(got[0], log_p), worst(torchs[0], log_p), smallest[0]),
        (worst(got[1], entropy), worst(torchs[1], entropy), smallest[1]),
        rounding,
    )


@pytest.mark.parametrize("magnitude", [1.0, 20.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", VOCABS)
def test_within_twice_torchs_error(device, vocab, dtype, magnitude):
    if device.type == "cpu" and vocab > 5000:
        pytest.skip("slow in the interpreter; the GPU suite has it")
    *results, rounding = errors(vocab, dtype, magnitude, device, ROWS if device.type == "cuda" else 4)
    for ours, torchs, smallest in results:
        assert ours <= 2 * max(torchs, smallest)
    assert rounding <= 1


if __name__ == "__main__":
    print("vocab dtype magnitude | log-prob ours torch | entropy ours torch | gradient, share of one rounding")
    for vocab in VOCABS:
        for dtype in (torch.bfloat16, torch.float32):
            for magnitude in (1.0, 1e4):
                (p, q, _), (e, f, _), g = errors(vocab, dtype, magnitude, torch.device("cuda"), ROWS)
                print(f"{vocab} {str(dtype)[6:]} {magnitude:g} | {p:.1e} {q:.1e} | {e:.1e} {f:.1e} | {g:.2f}")
