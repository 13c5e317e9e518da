"""Inputs that are hard, and how rows lie and are shared."""

from importlib.util import find_spec

import torch

INF = float("inf")


def moved(tensor, device):
    """On another device with the same strides."""
    storage = torch.as_strided(tensor, (tensor.untyped_storage().size() // tensor.element_size(),), (1,), 0)
    return storage.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def split_rows(monkeypatch, splits):
    """Have ``splits`` programs share a row, where there are kernels."""
    if find_spec("triton") is None:
        return
    from onepass.kernels import launch, layout

    monkeypatch.setattr(layout, "programs_for", lambda _, vocab, vec, *__: (layout.lanes_for(vocab, vec), splits))
    # Launches are remembered; this test's must not be, nor any that was made before.
    monkeypatch.setattr(launch, "_launches", {})


HARD = {
    "scattered -inf": lambda x: x.masked_fill(torch.arange(x.shape[-1]) % 3 == 1, -INF),
    "half of the vocabulary -inf": lambda x: x.masked_fill(torch.arange(x.shape[-1]) < x.shape[-1] // 2, -INF),
    "a leading block -inf": lambda x: x.masked_fill(torch.arange(x.shape[-1]) < x.shape[-1] - 5, -INF),
    "a trailing block -inf": lambda x: x.masked_fill(torch.arange(x.shape[-1]) > 5, -INF),
    "all but one -inf": lambda x: x.masked_fill(torch.arange(x.shape[-1]) != 3, -INF),
    "the dtype's lowest as a mask": lambda x: x.masked_fill(torch.arange(x.shape[-1]) < 300, torch.finfo(x.dtype).min),
    "magnitude 1e4": lambda x: x * 1e4,
    "constant": lambda x: torch.full_like(x, 2.5),
    "constant and huge": lambda x: torch.full_like(x, -3e4),
    "one dominates": lambda x: x.index_fill(-1, torch.tensor([3]), 200.0),
    "a row of NaN": lambda x: x.index_fill(0, torch.tensor([1]), float("nan")),
    "one NaN": lambda x: x.clone().index_put_((torch.tensor([1]), torch.tensor([5])), torch.tensor(float("nan")).to(x)),
    "one +inf": lambda x: x.clone().index_put_((torch.tensor([1]), torch.tensor([5])), torch.tensor(INF).to(x)),
    "a row of -inf": lambda x: x.index_fill(0, torch.tensor([1]), -INF),
}
