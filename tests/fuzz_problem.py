"""A random call and its definition in float64, and the tensors of one: what all functions of test_fuzz.py share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import onepass
from definition import transform
from layouts import EXPANSIONS

INF, NAN = float("inf"), float("nan")
Spec = dict[str, Any]


class Problem(NamedTuple):
    """A call and its definition.

    Attributes:
        tensors: by name, on the CPU.
        grad: those of which a gradient is taken.
        call: of the tensors, on the device.
        define: of the same in float64; returns results of the same names.
        outside: of ids that no vocabulary has, which rows ``(...)`` have them and what an error names.
        tolerance: of a result of size 1, and of a gradient beyond its own rounding; or the norm of errors against that
            of what is expected.
        values_only: why the gradient is not compared, or "".
    """

    tensors: dict[str, Tensor]
    grad: tuple[str, ...]
    call: Callable[[dict[str, Any]], dict[str, Tensor]]
    define: Callable[[dict[str, Any]], dict[str, Tensor]]
    outside: tuple[Tensor, str] | None = None
    tolerance: tuple[float, float] | float = (1.0, 1.0)
    values_only: str = ""


HARD = {
    "none": lambda x: x,
    "scattered -inf": lambda x: x.masked_fill(torch.arange(x.shape[-1]) % 3 == 1, -INF),
    "a leading block -inf": lambda x: x.masked_fill(torch.arange(x.shape[-1]) < x.shape[-1] // 2, -INF),
    "1e4": lambda x: (x * 1e4).clamp(-6e4, 6e4),
    "constant": lambda x: torch.full_like(x, 2.5),
    "a row of NaN": lambda x: in_row(x, slice(None), NAN),
    "one NaN": lambda x: in_row(x, 0, NAN),
    "one +inf": lambda x: in_row(x, -1, INF),
    "a row of -inf": lambda x: in_row(x, slice(None), -INF),
}


def in_row(x: Tensor, columns: Any, value: float) -> Tensor:
    x = x.clone()
    rows = x.view(-1, x.shape[-1])
    if len(rows):
        rows[len(rows) // 2, columns] = value
    return x


def dtype_of(spec: Spec) -> torch.dtype:
    return getattr(torch, spec["dtype"])


class Source:
    """The tensors of a call, from its seed."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.dtype = spec, dtype_of(spec)
        self.generator = torch.Generator().manual_seed(spec["seed"])
        self.rows = tuple(spec["rows"])
        self.vocab = spec["vocab"]

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.dtype)

    def logits(self, vocab: int | None = None) -> Tensor:
        x = torch.randn((*self.rows, vocab or self.vocab), generator=self.generator) * 3
        return HARD[self.spec["hard"]](x).to(self.dtype)

    def ids(self, *shape: int, count: int | None = None) -> Tensor:
        kind = torch.int32 if self.spec["int32"] else torch.int64
        return torch.randint(count or self.vocab, shape, generator=self.generator).to(kind)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator)

    def mask(self, *shape: int) -> Tensor:
        kind = getattr(torch, self.spec["mask"])
        return (torch.rand(shape, generator=self.generator) < 0.6).to(kind)

    def outside(self, ids: Tensor) -> Tensor:
        """Some ids of every third row replaced by what is no id."""
        value = self.spec["outside"]
        if value is not None and ids.numel():
            flat = ids.view(self.size, -1)
            value = self.vocab if value == "vocab" else value
            flat[:: max(1, len(flat) // 2), -1] = max(-(2**31), min(value, 2**31 - 1)) if self.spec["int32"] else value
        return ids

    @property
    def size(self) -> int:
        return torch.Size(self.rows).numel()

    def constant(self, tensors: dict[str, Tensor]) -> None:
        """Make those that will be expanded constant along that dimension."""
        for name, t in tensors.items():
            layout = self.spec["layouts"].get(name)
            if layout in EXPANSIONS and t.dim() and t.numel():
                tensors[name] = (t[:1] if layout == "expanded over rows" else t[..., :1]).expand(t.shape).clone()


def pick(options: Spec, *names: str) -> Spec:
    return {n: options[n] for n in names if n in options}


def void(x: Tensor, rows: Tensor | None) -> Tensor:
    """NaN in rows that name what is no class."""
    return x if rows is None else x * torch.where(rows, NAN, 1.0).to(x.dtype).unsqueeze(-1)


def masked(x: Tensor, kept: Tensor | None) -> Tensor:
    """Zeros in rows that are not to be read."""
    return x if kept is None else torch.where(kept.unsqueeze(-1), x, 0.0)


def no_class(ids: Tensor, vocab: int, kept: Tensor | None, rows: tuple[int, ...]) -> Tensor:
    """Which rows have an id outside ``[0, vocab)``, of those that are kept."""
    bad = (ids < 0) | (ids >= vocab)
    if kept is not None:
        bad &= kept if kept.dim() == bad.dim() else kept.unsqueeze(-1)
    return bad.any(-1) if ids.dim() > len(rows) else bad


def direction_of(options: Spec) -> str:
    direction, beta = options.get("direction", "forward"), options.get("beta", 0.5)
    return ("reverse" if beta else "forward") if direction == "jsd" and beta in (0, 1) else direction


def reduced(loss: Tensor, count: Any, options: Spec, reduction: str) -> Tensor:
    reduction = options.get("reduction", reduction)
    if reduction == "none":
        return loss
    if options.get("num_items") is not None:
        return loss.sum() / options["num_items"]
    return loss.sum() if reduction == "sum" else loss.sum() / max(int(count), 1)


def magnitude_of(x: Tensor, **transforms: Any) -> float:
    z = transform(x.double(), **transforms)
    return max(1.0, z.nan_to_num(0, 0, 0).abs().max().item()) if z.numel() else 1.0


TRANSFORMS = ("temperature", "softcap", "logit_scale")
# Of the norm of a gradient that products and a rounded logit leave behind.
OF_PRODUCTS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 8e-2}


def head_of(s: Source) -> dict[str, Tensor]:
    width = s.spec["width"]
    hidden, weight = s.normal(*s.rows, width), s.normal(s.vocab, width, scale=width**-0.5)
    if s.spec["hard"] == "a row of NaN":
        hidden = in_row(hidden, slice(None), NAN)
    found = {"hidden": hidden, "weight": weight} | ({"bias": s.normal(s.vocab)} if s.spec["bias"] else {})
    if s.spec["rank"]:
        found |= {"a": s.normal(s.spec["rank"], width, scale=width**-0.5), "b": s.normal(s.vocab, s.spec["rank"])}
    return found


def given_logits(spec: Spec, s: Source) -> tuple[dict[str, Tensor], Callable[[dict[str, Any]], Any]]:
    """The leaves of the logits; and the logits, of leaves in float64 and the rows that are kept. Those of a head are
    rounded to the dtype of its products."""
    if not spec["head"]:
        return {"logits": s.logits()}, lambda t, kept: masked(t["logits"], kept)

    def of_head(t: dict[str, Any], kept: Tensor | None) -> Tensor:
        hidden = masked(t["hidden"], kept)
        x = hidden @ t["weight"].mT + t.get("bias", 0.0)
        x = x + 0.5 * (hidden @ t["a"].mT) @ t["b"].mT if "a" in t else x
        return x + (x.detach().to(s.dtype).double() - x.detach())

    return head_of(s), of_head


HEAD = ("hidden", "weight", "bias", "a", "b")


def adapter_of(t: dict[str, Any]) -> Any:
    return (t["a"], t["b"], 0.5) if "a" in t else None


def head_arguments(t: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a linear head."""
    return {n: t[n] for n in HEAD[:3] if n in t} | {"lora": adapter_of(t)}


def logits_or_head(t: dict[str, Any]) -> Any:
    if "logits" in t:
        return t["logits"]
    return onepass.LinearLogits(**head_arguments(t))


def tolerance(spec: Spec, tensors: dict[str, Tensor], size: float = 1.0, **more: Any) -> tuple[float, float] | float:
    if spec["head"]:
        return OF_PRODUCTS[dtype_of(spec)]
    transforms = pick(spec["options"], *TRANSFORMS)
    magnitude = magnitude_of(tensors["logits"], **transforms)
    slope = abs(transforms.get("logit_scale", 1.0)) / transforms.get("temperature", 1.0)
    return magnitude * size, 2 * max(slope, 1.0) * size * (1 + magnitude / 16)
