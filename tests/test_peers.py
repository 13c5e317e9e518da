"""The peers of `python -m benchmarks heads`."""

import sys

import pytest
import torch

from benchmarks import peers_heads

pytest.importorskip("trl.kernels.chunked_logprob", exc_type=ImportError)


def test_trl_without_its_trainers_leaves_the_modules_as_they_were(monkeypatch):
    """Its kernels are a peer where what its trainers import is not installed, too: forward and backward."""
    name = "trl.trainer.utils"
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 8, requires_grad=True), torch.randn(31, 8, requires_grad=True)
    target, mask = torch.randint(31, (9,)), torch.rand(9) < 0.5
    monkeypatch.setitem(sys.modules, name, None)  # an import of it is an error
    before = dict(sys.modules)
    rows = peers_heads.trl("entropy")
    log_probs, entropy = rows(hidden, weight, target, mask)
    grads = torch.autograd.grad((log_probs + 2 * entropy).sum(), [hidden, weight])
    assert sys.modules[name] is None and before.keys() <= sys.modules.keys()
    log_p = (hidden @ weight.T).log_softmax(-1)
    chosen = log_p.gather(-1, target[:, None])[:, 0] * mask
    expected_entropy = -(log_p.exp() * log_p).sum(-1) * mask
    torch.testing.assert_close([log_probs, entropy], [chosen, expected_entropy])
    expected = torch.autograd.grad((chosen + 2 * expected_entropy).sum(), [hidden, weight])
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-5)
    # Where nothing had been there, nothing is: what is installed can be imported again.
    monkeypatch.delitem(sys.modules, name)
    with peers_heads.stand_in(name, something=1):
        assert sys.modules[name].something == 1
    assert name not in sys.modules
