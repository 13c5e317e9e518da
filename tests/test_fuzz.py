"""Random calls in a random order, each against a definition in float64: what no test thought of.

An example is a list of calls, since launches are remembered from call to call. A call is a dict of plain values, of
which `problem` makes tensors: what a failure prints can be put into `fuzz_corpus.EXAMPLES` as it is. Half a minute of
the same examples by default; with ``ONEPASS_FUZZ_SECONDS=3600`` as long as that with examples that nobody has seen.
"""

import os
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import onepass
from border_cases import EXPANSIONS, LAYOUTS, Laid, flattened
from definition import assert_close, assert_gradient_close, divergence, statistics, topk_divergence, transform
from fuzz_corpus import EXAMPLES
from onepass.moe import Routing, expert_mlp, group_by_expert, load_balancing_loss, route, router_z_loss
from onepass.moe import scattered_linear as scattered
from paths import interpreted

pytestmark = pytest.mark.usefixtures("one_thread")
INF, NAN = float("inf"), float("nan")
SECONDS = float(os.environ.get("ONEPASS_FUZZ_SECONDS", 0))
Spec = dict[str, Any]


def is_slow(device):
    """The interpreter takes a thousand times as long as eager, and a GPU has kernels to compile."""
    return interpreted(device) or device.type == "cuda"


# What is called, and what it should give


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


def problem(spec: Spec) -> Problem:
    return PROBLEMS[spec["function"]](spec)


HARD = {
    "none": lambda x: x,
    "scattered -inf": lambda x: x.masked_fill(torch.arange(x.shape[-1]) % 3 == 1, -INF),
    "a leading block -inf": lambda x: x.masked_fill(torch.arange(x.shape[-1]) < x.shape[-1] // 2, -INF),
    "1e4": lambda x: (x * 1e4).clamp(-6e4, 6e4),
    "constant": lambda x: torch.full_like(x, 2.5),
    "a row of NaN": lambda x: _in_row(x, slice(None), NAN),
    "one NaN": lambda x: _in_row(x, 0, NAN),
    "one +inf": lambda x: _in_row(x, -1, INF),
    "a row of -inf": lambda x: _in_row(x, slice(None), -INF),
}


def _in_row(x: Tensor, columns: Any, value: float) -> Tensor:
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
        hidden = _in_row(hidden, slice(None), NAN)
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


def of_statistics(spec: Spec) -> Problem:
    s, options = Source(spec), dict(spec["options"])
    tensors, logits_of = given_logits(spec, s)
    many = spec["k"]
    tensors["index"] = s.outside(s.ids(*s.rows, *(() if many is None else (many,))))
    if spec["mask"]:
        tensors["row_mask"] = s.mask(*s.rows)
    if spec["weights"]:
        tensors["class_weights"] = s.rand(s.vocab) / s.vocab
    s.constant(tensors)
    transforms = pick(options, *TRANSFORMS)
    kept = tensors["row_mask"] != 0 if spec["mask"] else None
    name = spec["function"]
    if name in ("selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy"):
        tensors.pop("class_weights", None)
    if name == "entropy_from_logits":
        tensors.pop("index")
    wanted = {
        "selective_log_softmax": ["log_probs"], "entropy_from_logits": ["entropy"],
        "selective_log_softmax_and_entropy": ["log_probs", "entropy"],
        "softmax_statistics": ["log_normalizer", "expected_logit", "selected", "shift", "mean_logit",
                               "log_sum_sq_probs"],
    }[name]  # fmt: skip
    if "class_weights" in tensors:
        wanted = [*wanted, "weighted_logit"]

    def call(t: dict[str, Any]) -> dict[str, Tensor]:
        function = getattr(onepass, name)
        given = {n: t[n] for n in ("index", "row_mask", "class_weights") if n in t}
        if spec["head"] and name in ("softmax_statistics", "selective_log_softmax_and_entropy"):
            given |= head_arguments(t)
            function = getattr(onepass, f"linear_{name}")
        else:
            given["logits"] = logits_or_head(t)
        if name == "softmax_statistics":
            given["metrics"] = ("mean_logit", "log_sum_sq_probs")
        found = function(**given, **options)
        return dict(zip(wanted, flattened(found).values())) if name != "softmax_statistics" else flattened(found)

    def define(t: dict[str, Any]) -> dict[str, Tensor]:
        index, x = t.get("index"), logits_of(t, kept_of(t))
        bad = None if index is None else no_class(index, s.vocab, kept_of(t), s.rows)
        weights = t.get("class_weights")
        found = statistics(void(x, bad), index, row_mask=t.get("row_mask"), class_weights=weights, **transforms)
        return {n: found[n] for n in wanted}

    def kept_of(t: dict[str, Any]) -> Tensor | None:
        return t["row_mask"] != 0 if "row_mask" in t else None

    repeats = max(1, many or 1)
    outside = None
    if "index" in tensors and spec["outside"] is not None:
        outside = no_class(tensors["index"], s.vocab, kept, s.rows), "index"
    return Problem(tensors, tuple(n for n in tensors if n in ("logits", *HEAD)), call, define, outside,
                   tolerance(spec, tensors, repeats))  # fmt: skip


def of_cross_entropy(spec: Spec) -> Problem:
    s, options = Source(spec), dict(spec["options"])
    tensors, logits_of = given_logits(spec, s)
    target = s.outside(s.ids(*s.rows))
    if target.numel() > 2:
        target.view(-1)[1] = -100
    tensors["target"] = target
    if spec["weights"]:
        tensors["weight of classes"] = s.rand(s.vocab) + 0.1
    s.constant(tensors)
    target = tensors["target"]
    reduction, ignored = options.get("reduction", "mean"), options.get("ignore_index", -100)
    smoothing, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss_weight", 0.0)

    def call(t: dict[str, Any]) -> dict[str, Tensor]:
        if spec["head"]:
            given = head_arguments(t) | {"target": t["target"]}
            given |= {"class_weights": t["weight of classes"]} if spec["weights"] else {}
            of_head = {name: value for name, value in options.items() if name != "gradient_in_forward"}
            return flattened(onepass.linear_cross_entropy(**given, **of_head))
        weight = t.get("weight of classes")
        return flattened(onepass.cross_entropy(t["logits"], t["target"], class_weights=weight, **options))

    def define(t: dict[str, Any]) -> dict[str, Tensor]:
        target, weight = t["target"], t.get("weight of classes")
        kept = target != ignored
        x = logits_of(t, kept)
        x = void(x, no_class(target, s.vocab, kept, s.rows))
        c = weight if weight is not None else 1.0
        of = statistics(x, target, row_mask=kept, class_weights=c, **pick(options, *TRANSFORMS))
        count = kept.double() if weight is None else weight[target.clamp(0, s.vocab - 1)] * kept
        total = float(s.vocab) if weight is None else weight.sum()
        score = (1 - smoothing) * count * of["log_probs"]
        if smoothing:
            score = score + smoothing / s.vocab * (of["weighted_logit"] - total * of["log_normalizer"])
        z = torch.zeros_like(of["shift"])
        if z_loss:
            z = z_loss * transform(x, **pick(options, *TRANSFORMS)).logsumexp(-1).masked_fill(~kept, 0.0).square()
        if reduction == "none":
            return {"result": z - score}
        if reduction == "sum":
            return {"result": (z - score).sum()}
        return {"result": score.sum() / -count.sum() + (z.sum() / kept.sum() if z_loss else 0.0)}

    kept = target != ignored
    bad = no_class(target, s.vocab, kept, s.rows)
    why = "none is left" if reduction == "mean" and not kept.any() else ""
    if bad.any() and spec["weights"] and reduction == "mean":
        why = "the weight of what is no class is not said"
    magnitude = 1.0 if spec["head"] else magnitude_of(tensors["logits"], **pick(options, *TRANSFORMS))
    size = (1 + 2 * z_loss * magnitude) * (max(1, s.size) if reduction == "sum" else 1)
    outside = (bad, "target") if spec["outside"] is not None else None
    grad = tuple(n for n in tensors if n in ("logits", *HEAD))
    return Problem(tensors, grad, call, define, outside, tolerance(spec, tensors, size), why)


LOSS_FUNCTIONS = {
    "policy": lambda s, a, b: -torch.sigmoid(s.log_probs - b) * a - 0.05 * s.entropy,
    "focal": lambda s, a, b: (1 - s.log_probs.exp()) ** 2 * -s.log_probs * a,
    "z-loss": lambda s, a, b: 0.01 * s.logsumexp.square() - s.log_probs,
    # Infinite at a probability of 1, where it has no gradient to speak of.
    "log of the rest": lambda s, a, b: -torch.log(1 - s.log_probs.exp()) * a,
}


def of_linear_loss(spec: Spec) -> Problem:
    s, options = Source(spec), dict(spec["options"])
    tensors, loss_fn = head_of(s), LOSS_FUNCTIONS[options.pop("loss_fn", "policy")]
    if options.pop("certain", False):  # of a probability that is 1
        tensors["hidden"].view(-1, spec["width"])[-1:] = 200.0
        tensors["weight"][0] = 1.0
    tensors["index"] = s.outside(s.ids(*s.rows))
    tensors["index"].view(-1)[-1:] = 0
    inputs = {"advantages": s.rand(*s.rows) + 0.5, "old": -s.rand(*s.rows)}
    if dtype_of(spec) == torch.float64:
        inputs = {n: t.double() for n, t in inputs.items()}
    tensors |= inputs
    if spec["mask"]:
        tensors["row_mask"] = s.mask(*s.rows)
    s.constant(tensors)
    transforms = pick(options, *TRANSFORMS)

    _, of_head = given_logits(spec | {"head": True}, s)

    def call(t: dict[str, Any]) -> dict[str, Tensor]:
        given = {n: t[n] for n in ("bias", "row_mask") if n in t}
        found = onepass.linear_loss(
            t["hidden"],
            t["weight"],
            t["index"],
            loss_fn,
            t["advantages"],
            t["old"],
            lora=adapter_of(t),
            **given,
            **options,
        )
        return flattened(found)

    def define(t: dict[str, Any]) -> dict[str, Tensor]:
        kept = t["row_mask"] != 0 if "row_mask" in t else None
        x = void(of_head(t, kept), no_class(t["index"], s.vocab, kept, s.rows))
        rows = torch.ones(s.rows, dtype=torch.bool) if kept is None else kept
        x, index = x[rows], t["index"][rows]  # what a function makes of the others may be infinite
        given = SimpleNamespace(
            **statistics(x, index, **transforms), logsumexp=transform(x, **transforms).logsumexp(-1)
        )
        loss = loss_fn(given, t["advantages"][rows], t["old"][rows])
        loss = torch.zeros(s.rows, dtype=torch.float64).masked_scatter(rows, loss)
        return {"result": reduced(loss, s.size if kept is None else kept.sum(), options, "mean")}

    kept = tensors["row_mask"] != 0 if spec["mask"] else None
    bad = no_class(tensors["index"], s.vocab, kept, s.rows)
    return Problem(tensors, tuple(n for n in tensors if n in (*HEAD, "advantages")), call, define,
                   (bad, "index") if spec["outside"] is not None else None, OF_PRODUCTS[dtype_of(spec)])  # fmt: skip


def of_topk(spec: Spec) -> Problem:
    """`topk_kl_div` and `distillation_loss`."""
    s, options, hard = Source(spec), dict(spec["options"]), spec["function"] == "distillation_loss"
    tensors, logits_of = given_logits(spec, s)
    K = spec["k"] or 1
    tensors["teacher_ids"] = s.outside(s.ids(*s.rows, K))
    if spec["ids_of_32_bits"]:
        tensors["teacher_ids"] = tensors["teacher_ids"].int()
    tensors["teacher_log_probs"] = -0.2 - 3 * s.rand(*s.rows, K)
    if spec["weights"]:  # tokens that are not given, as if they were masked
        share = 0.2 if spec["weights"] is True else spec["weights"]
        tensors["teacher_log_probs"].masked_fill_(s.rand(*s.rows, K) < share, -INF)
    if spec["mask"]:
        tensors["teacher_mask" if spec["mask_of_ids"] else "row_mask"] = s.mask(
            *s.rows, *((K,) if spec["mask_of_ids"] else ())
        )
    if hard:
        tensors["target"] = s.ids(*s.rows)
        if tensors["target"].numel() > 2:
            tensors["target"].view(-1)[1] = -100
        if spec["label"] is not None and tensors["target"].numel() and not spec["int32"]:
            tensors["target"].view(-1)[0] = spec["label"]
    s.constant(tensors)
    of_divergence = pick(options, "temperature", "beta", "renormalize") | {"direction": direction_of(options)}
    alpha, reduction = options.get("alpha", 0.5), options.get("reduction", "mean")

    def kept_ids(t: dict[str, Any]) -> Tensor:
        kept = torch.ones_like(t["teacher_ids"], dtype=torch.bool)
        if "row_mask" in t:
            kept = kept & (t["row_mask"] != 0).unsqueeze(-1)
        return kept & (t["teacher_mask"] != 0) if "teacher_mask" in t else kept

    def labelled_rows(t: dict[str, Any]) -> Tensor:
        valid = t["target"] != -100
        return valid & (t["row_mask"] != 0) if "row_mask" in t else valid

    def bad_rows(t: dict[str, Any]) -> Tensor:
        bad = no_class(t["teacher_ids"], s.vocab, kept_ids(t) & (t["teacher_log_probs"] > -INF), s.rows)
        if hard:
            bad = bad | no_class(t["target"], s.vocab, labelled_rows(t), s.rows)
        return bad

    def call(t: dict[str, Any]) -> dict[str, Tensor]:
        given = {n: t[n] for n in ("teacher_ids", "teacher_log_probs", "row_mask", "teacher_mask") if n in t} | options
        if hard:
            return flattened(onepass.distillation_loss(logits_or_head(t), t["target"], **given))
        if spec["head"]:
            return flattened(
                onepass.linear_topk_kl_div(t["hidden"], t["weight"], bias=t.get("bias"), lora=adapter_of(t), **given)
            )
        return flattened(onepass.topk_kl_div(t["logits"], **given))

    def define(t: dict[str, Any]) -> dict[str, Tensor]:
        kept, bad = kept_ids(t), bad_rows(t)
        given = (kept & (t["teacher_log_probs"] > -INF)).any(-1)  # rows without any token are not read
        x = logits_of(t, given | labelled_rows(t) if hard else given)
        ids = t["teacher_ids"].clamp(0, s.vocab - 1)
        soft = topk_divergence(x, ids, t["teacher_log_probs"], kept, **of_divergence)
        soft = torch.where(bad, NAN, soft)
        soft = reduced(soft, kept.any(-1).sum(), options, reduction)
        if not hard:
            return {"result": soft}
        labelled = labelled_rows(t)
        log_p = statistics(x, t["target"].clamp(0, s.vocab - 1))["log_probs"]
        ce = torch.where(bad, NAN, torch.where(labelled, -log_p, 0.0))
        return {"result": alpha * soft + (1 - alpha) * reduced(ce, labelled.sum(), options, reduction)}

    bad = bad_rows(tensors)
    outside = (bad, "target|teacher_ids") if bad.any() or spec["outside"] is not None else None
    magnitude = 1.0 if spec["head"] else magnitude_of(tensors["logits"], temperature=options.get("temperature", 1.0))
    size = K * max(1, s.size) * (1 + magnitude)
    bounds = tolerance(spec, tensors, size)
    if isinstance(bounds, tuple) and options.get("renormalize"):
        # What an id adds to the gradient is rounded each time that a row names it.
        bounds = bounds[0], max(bounds[1], K * torch.finfo(s.dtype).eps / (64 * torch.finfo(torch.float32).eps))
    grad = tuple(n for n in tensors if n in ("logits", *HEAD))
    return Problem(tensors, grad, call, define, outside, bounds, "a row has no class" if bad.any() else "")


def of_kl(spec: Spec) -> Problem:
    s, options = Source(spec), dict(spec["options"])
    tensors, logits_of = given_logits(spec, s)
    tensors["teacher_logits"] = s.logits()
    if spec["mask"]:
        tensors["row_mask"] = s.mask(*s.rows)
    s.constant(tensors)
    columns = options.get("vocab_size")
    columns = None if columns is None else max(1, min(columns, s.vocab))
    if columns is not None:
        options["vocab_size"] = columns
    temperature = options.get("temperature", 1.0)
    student_of = pick(options, "temperature", "softcap")
    teacher_of = {"temperature": options.get("teacher_temperature", temperature)}
    teacher_of |= {"softcap": options["teacher_softcap"]} if options.get("teacher_softcap") else {}

    def call(t: dict[str, Any]) -> dict[str, Tensor]:
        if spec["head"]:
            given = head_arguments(t) | {n: t[n] for n in ("teacher_logits", "row_mask") if n in t}
            return flattened(onepass.linear_kl_div(**given, **options))
        return flattened(onepass.kl_div(t["logits"], t["teacher_logits"], row_mask=t.get("row_mask"), **options))

    def define(t: dict[str, Any]) -> dict[str, Tensor]:
        kept = t["row_mask"] != 0 if "row_mask" in t else torch.ones(s.rows, dtype=torch.bool)
        x, y = logits_of(t, kept)[..., :columns], masked(t["teacher_logits"], kept)[..., :columns]
        log_s, log_t = (transform(x, **student_of).log_softmax(-1), transform(y, **teacher_of).log_softmax(-1))
        direction, beta = direction_of(options), options.get("beta", 0.5)
        nowhere = (log_s == -INF) & (log_t == -INF)  # nothing of either
        log_s, log_t = log_s.masked_fill(nowhere, -1e30), log_t.masked_fill(nowhere, -1e30)
        loss = torch.where(kept, divergence(log_t, log_s, direction, beta).sum(-1), 0.0)
        loss = torch.where((log_s.isnan() | log_t.isnan()).any(-1) & kept, NAN, loss)
        return {"result": reduced(loss, kept.sum(), options, "mean")}

    size = max(1, s.size) * max(magnitude_of(tensors["teacher_logits"], **teacher_of), 1.0)
    if not spec["head"]:
        size = max(size, max(1, s.size) * magnitude_of(tensors["logits"], **student_of))
    grad = HEAD if spec["head"] else ("logits", "teacher_logits")
    return Problem(tensors, tuple(n for n in grad if n in tensors), call, define, None, tolerance(spec, tensors, size))


def of_route(spec: Spec) -> Problem:
    """Properties of the choice, which rounding may turn, and the weights of what was chosen."""
    s, options = Source(spec), dict(spec["options"])
    E, k = s.vocab, min(spec["k"] or 1, s.vocab)
    groups = options.get("n_group", 1)
    if E % groups or E // groups < 2 or k > options.get("topk_group", 1) * (E // groups):
        for name in ("n_group", "topk_group"):
            options.pop(name, None)
    tensors = {"router_logits": s.logits()}
    if options.pop("saturated", False):
        tensors["router_logits"] = tensors["router_logits"] * 30
    if spec["weights"]:
        tensors["selection_bias"] = torch.randn(E, generator=s.generator) * 0.3
    if spec["mask"]:
        tensors["token_mask"] = s.mask(*s.rows)
    s.constant(tensors)
    chosen: dict[str, Tensor] = {}
    score, after = options.get("score", "softmax"), options.get("score_after_topk", False)

    def call(t: dict[str, Any]) -> dict[str, Tensor]:
        given = {n: t[n] for n in ("selection_bias", "token_mask") if n in t}
        routing = route(t["router_logits"], k, losses=True, **given, **options)
        chosen["experts"], chosen["counts"] = routing.experts.cpu(), routing.counts.cpu()
        found = {"weights": routing.weights, "logsumexp": routing.logsumexp, "prob_sums": routing.prob_sums}
        if spec["hard"] in ("none", "constant") and s.size:
            found |= {"balance": load_balancing_loss(routing), "z": router_z_loss(routing)}
        return found

    def scores(z: Tensor) -> Tensor:
        if score == "softmax":
            return z.softmax(-1)
        off = (z == -INF) | (z < -700)  # where a root of 0 has no slope
        z = z.masked_fill(off, 0.0)
        found = torch.sigmoid(z) if score == "sigmoid" else torch.log1p(z.clamp(max=300).exp()).sqrt()
        if score == "sqrtsoftplus":
            found = torch.where(z > 30, z.clamp(min=1).sqrt(), found)
        return found.masked_fill(off, 0.0)

    def renormalized(chosen: Tensor, z: Tensor, eps: float) -> Tensor:
        """The scores over their sum and eps, from their logarithms: float64 has no scores below exp(-745) either."""
        if score == "softmax":
            log = chosen - chosen.logsumexp(-1, keepdim=True) if after else chosen - z.logsumexp(-1, keepdim=True)
        elif score == "sigmoid":
            log = torch.nn.functional.logsigmoid(chosen)
        else:
            far = chosen < -40
            log = torch.where(far, chosen, scores(chosen.masked_fill(far, 0.0)).log() * 2) / 2
        top = log.detach().amax(-1, keepdim=True)
        top = top.masked_fill(top == -INF, 0.0)
        share = (log - top).exp()
        return share / (share.sum(-1, keepdim=True) + (eps * (-top).exp() if eps else 0.0))

    def define(t: dict[str, Any]) -> dict[str, Tensor]:
        kept = t["token_mask"] != 0 if "token_mask" in t else torch.ones(s.rows, dtype=torch.bool)
        x, experts = masked(t["router_logits"], kept), chosen["experts"]
        z = transform(x, **pick(options, "softcap"))
        lse = z.logsumexp(-1)
        nothing = lse.isfinite().logical_not()
        bad = nothing if score == "softmax" else z.isnan().any(-1) | ((score == "sqrtsoftplus") & (z == INF).any(-1))
        assert experts.shape == (*s.rows, k) and ((experts >= 0) & (experts < E)).all()
        assert all(len(set(row)) == k for row in experts.view(-1, k).tolist())
        assert (experts[bad | ~kept] == torch.arange(k)).all() or (~kept).any()
        assert (experts[bad & kept] == torch.arange(k)).all()
        count = torch.bincount(experts[kept].flatten(), minlength=E).int()
        assert torch.equal(chosen["counts"], count)
        check_choice(x, z.detach(), experts, t, kept & ~bad)
        w = scores(z.gather(-1, experts)) if after else scores(z).gather(-1, experts)
        if options.get("renormalize", True):
            w = renormalized(z.gather(-1, experts), z, options.get("eps", 1e-20))
        w = torch.where(bad.unsqueeze(-1), NAN, w * options.get("scale", 1.0))
        p = torch.where(kept.unsqueeze(-1), z.softmax(-1), 0.0).reshape(-1, E).sum(0)
        lse = torch.where((z == INF).any(-1), NAN, lse)
        found = {"weights": torch.where(kept.unsqueeze(-1), w, 0.0), "logsumexp": torch.where(kept, lse, 0.0),
                 "prob_sums": p}  # fmt: skip
        if spec["hard"] in ("none", "constant") and s.size:
            tokens = kept.sum().double()
            found["balance"] = E * (count / tokens * p / tokens).sum()
            found["z"] = found["logsumexp"].square().sum() / tokens
        return found

    def check_choice(x: Tensor, z: Tensor, experts: Tensor, t: dict[str, Any], rows: Tensor) -> None:
        value = z if after else scores(z)
        bias = t.get("selection_bias")
        value = (value if bias is None else value + bias).masked_fill(z == -INF, -INF)
        got = value.gather(-1, experts)
        slack = 1e-5 * (1 + value.masked_fill(value == -INF, 0.0).abs().amax(-1, keepdim=True))
        in_order = (got[..., 1:] <= got[..., :-1] + slack) | (got[..., 1:] == -INF)
        assert in_order[rows].all(), "not in descending order"
        if options.get("n_group", 1) == 1:
            others = value.scatter(-1, experts, -INF).amax(-1, keepdim=True)
            assert (others <= got[..., -1:] + slack)[rows].all(), "a better expert was left out"
        if bias is None and options.get("n_group", 1) == 1 and options.get("softcap"):
            # A soft-cap that saturates makes many equal: they stay in the order of their logits.
            best = x.sort(dim=-1, descending=True, stable=True)[1][..., :k]
            assert torch.equal(experts[rows], best[rows]), "not in the order of the logits"

    extreme = spec["hard"] in ("one +inf", "a row of -inf", "one NaN", "a row of NaN")
    scale = abs(options.get("scale", 1.0)) * max(1, s.size)
    magnitude = magnitude_of(tensors["router_logits"], **pick(options, "softcap"))
    bounds = scale * magnitude, 4 * scale * (1 + magnitude)
    why = "a token has no answer" if extreme else ""
    return Problem(tensors, ("router_logits",), call, define, None, bounds, why)


ACTIVATIONS = {
    "silu": lambda g, u: torch.nn.functional.silu(g) * u,
    "gelu": lambda g, u: torch.nn.functional.gelu(g) * u,
    "gelu_tanh": lambda g, u: torch.nn.functional.gelu(g, approximate="tanh") * u,
    "swiglu_clamped": lambda g, u: (u.clamp(-7, 7) + 1) * g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7)),
}


def experts_of(s: Source, spec: Spec, E: int, K: int) -> Tensor:
    """Ids, of which some are no expert's."""
    count = s.size
    ids = torch.randint(E, (count, K), generator=s.generator)
    if spec["outside"] is not None and ids.numel():
        ids[:: max(1, count // 2), -1] = E if spec["outside"] == "vocab" else max(-1, min(spec["outside"], 2**31 - 1))
    return ids.view(*s.rows, K).to(torch.int32 if spec["int32"] else torch.int64)


def of_experts(spec: Spec) -> Problem:
    s, options = Source(spec), dict(spec["options"])
    E, K, H, I, R = 1 + s.vocab % 4, spec["k"] or 0, spec["width"], 8, spec["rank"]  # noqa: E741
    flip, interleaved = options.get("transposed", False), options.get("interleaved", False)
    normal = lambda *shape: s.normal(*shape, scale=0.4)  # noqa: E731
    hidden = normal(*s.rows, H)
    tensors = {
        "hidden": _in_row(hidden, slice(None), NAN) if spec["hard"] == "a row of NaN" else hidden,
        "weights": s.rand(*s.rows, K).to(torch.float64 if s.dtype == torch.float64 else torch.float32),
        "experts": experts_of(s, spec, E, K),
        "gate_up": normal(E, H, 2 * I) if flip else normal(E, 2 * I, H),
        "down": normal(E, I, H) if flip else normal(E, H, I),
    }  # fmt: skip
    if spec["bias"]:
        tensors |= {"gate_up_bias": normal(E, 2 * I), "down_bias": normal(E, H)}
    if R:
        tensors |= {"a1": normal(E, R, H), "b1": normal(E, 2 * I, R), "a2": normal(E, R, I), "b2": normal(E, H, R)}
    s.constant(tensors)

    def call(t: dict[str, Any]) -> dict[str, Tensor]:
        given = {n: t[n] for n in ("gate_up_bias", "down_bias") if n in t}
        if R:
            given |= {"lora_gate_up": (t["a1"], t["b1"], 0.5), "lora_down": (t["a2"], t["b2"], 1.5)}
        routing = Routing(t["weights"], t["experts"], None)
        return flattened(expert_mlp(t["hidden"], routing, t["gate_up"], t["down"], **given, **options))

    def define(t: dict[str, Any]) -> dict[str, Tensor]:
        x, weights, experts = (t[n].reshape(s.size, t[n].shape[-1]) for n in ("hidden", "weights", "experts"))
        out = torch.zeros_like(x)
        for e in range(E):
            first, second = (t[n][e].mT if flip else t[n][e] for n in ("gate_up", "down"))
            if R:
                first, second = first + 0.5 * t["b1"][e] @ t["a1"][e], second + 1.5 * t["b2"][e] @ t["a2"][e]
            token, slot = (experts == e).nonzero(as_tuple=True)
            h = x[token] @ first.mT + (t["gate_up_bias"][e] if "gate_up_bias" in t else 0.0)
            gate, up = (h[:, ::2], h[:, 1::2]) if interleaved else h.chunk(2, -1)
            y = ACTIVATIONS[options.get("activation", "silu")](gate, up) @ second.mT
            y = y + (t["down_bias"][e] if "down_bias" in t else 0.0)
            out = out.index_add(0, token, y * weights[token, slot, None])
        return {"result": out.view(t["hidden"].shape)}

    grad = tuple(n for n in tensors if n != "experts")
    of = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-2, torch.bfloat16: 0.15}[s.dtype]
    return Problem(tensors, grad, call, define, None, of)


def of_scattered(spec: Spec) -> Problem:
    s, options = Source(spec), dict(spec["options"])
    E, K, H, outputs = 1 + s.vocab % 4, max(1, spec["k"] or 1), spec["width"], 12
    T = s.size
    s.rows = (T,)
    weighted, grouped = options.pop("weighted", False), options.pop("grouped", False)
    if weighted:
        options.pop("grouped_out", None)
    if not grouped:
        options.pop("grouped_in", None)
        options.pop("grouped_out", None)
    flip, grouped_in, grouped_out = (options.get(n, False) for n in ("transposed", "grouped_in", "grouped_out"))
    tensors = {
        "x": s.normal(T * K if grouped_in else T, H), "experts": experts_of(s, spec, E, K),
        "weight": s.normal(E, H, outputs, scale=0.4) if flip else s.normal(E, outputs, H, scale=0.4),
    }  # fmt: skip
    if spec["bias"]:
        tensors["bias"] = s.normal(E, outputs)
    if weighted:
        tensors["weights"] = s.rand(T, K).to(torch.float64 if s.dtype == torch.float64 else torch.float32)
    s.constant(tensors)

    def call(t: dict[str, Any]) -> dict[str, Tensor]:
        groups = group_by_expert(t["experts"], E, t["x"]) if grouped else None
        given = {n: t[n] for n in ("bias", "weights") if n in t}
        return flattened(scattered(t["x"], t["weight"], t["experts"], groups, **given, **options))

    def define(t: dict[str, Any]) -> dict[str, Tensor]:
        ids = t["experts"].reshape(-1).long()
        ids = torch.where((ids >= 0) & (ids < E), ids, E)
        order = ids.sort(stable=True)[1]
        slots = torch.arange(T * K)
        x = t["x"][order.argsort()] if grouped_in else t["x"][slots // K]  # of each slot
        weight = t["weight"].mT if flip else t["weight"]
        weight = torch.cat([weight, torch.zeros_like(weight[:1])])
        y = (weight[ids] @ x.unsqueeze(-1)).squeeze(-1)
        if "bias" in t:
            y = y + torch.cat([t["bias"], torch.zeros_like(t["bias"][:1])])[ids]
        if weighted:
            return {"result": (y.view(T, K, outputs) * t["weights"].unsqueeze(-1)).sum(1)}
        return {"result": y[order] if grouped_out else y}

    grad = tuple(n for n in tensors if n != "experts")
    of = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-2, torch.bfloat16: 0.15}[s.dtype]
    return Problem(tensors, grad, call, define, None, of)


PROBLEMS = {
    "softmax_statistics": of_statistics,
    "selective_log_softmax": of_statistics,
    "entropy_from_logits": of_statistics,
    "selective_log_softmax_and_entropy": of_statistics,
    "cross_entropy": of_cross_entropy,
    "linear_loss": of_linear_loss,
    "topk_kl_div": of_topk,
    "distillation_loss": of_topk,
    "kl_div": of_kl,
    "route": of_route,
    "expert_mlp": of_experts,
    "scattered_linear": of_scattered,
}


# Examples

PLAIN: Spec = {
    "function": "", "seed": 0, "rows": (3,), "vocab": 27, "width": 16, "dtype": "float32", "hard": "none", "k": None,
    "int32": False, "mask": None, "mask_of_ids": False, "weights": False, "bias": False, "head": False, "rank": 0,
    "outside": None, "label": None, "ids_of_32_bits": False, "layouts": {}, "options": {},
}  # fmt: skip
ANY_LAYOUT = (*LAYOUTS, *EXPANSIONS)
NUMBERS = {"temperature": [1, 0.7, 2], "softcap": [30, 5.5], "logit_scale": [1, 1.5, -1]}
REDUCTIONS = {"reduction": ["sum", "mean", "none"]}
OF_DIVERGENCE = {"direction": ["forward", "reverse", "jsd"], "beta": [0, 0.3, 0.5, 1], "temperature": [1, 2, 0.7]}
IN_PLACE = {**NUMBERS, "inplace_backward": [True]}
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "softmax_statistics": NUMBERS,
    "selective_log_softmax": IN_PLACE,
    "entropy_from_logits": IN_PLACE,
    "selective_log_softmax_and_entropy": IN_PLACE,
    "cross_entropy": {**IN_PLACE, **REDUCTIONS, "gradient_in_forward": [True, False], "label_smoothing": [0, 0.1, 1],
                      "z_loss_weight": [0, 1, 0.01]},
    "linear_loss": {**NUMBERS, **REDUCTIONS, "loss_fn": ["policy", "focal", "z-loss", "log of the rest"],
                    "num_items": [3, 2.5]},
    "topk_kl_div": {**OF_DIVERGENCE, **REDUCTIONS, "renormalize": [True], "num_items": [3, 2.5]},
    "distillation_loss": {**OF_DIVERGENCE, **REDUCTIONS, "renormalize": [True], "alpha": [0, 0.3, 1],
                          "num_items": [3, 2.5]},
    "kl_div": {**OF_DIVERGENCE, **REDUCTIONS, "softcap": [30, 5.5], "teacher_temperature": [1, 1.5],
               "teacher_softcap": [20, 7.5], "vocab_size": [1, 3, 20], "num_items": [3, 2.5]},
    "route": {"score": ["softmax", "sigmoid", "sqrtsoftplus"], "renormalize": [False, True], "scale": [1, 2.5],
              "eps": [0, 1e-20, 1e-6], "score_after_topk": [True], "softcap": [30, 5.5], "n_group": [2, 3, 4],
              "topk_group": [1, 2], "group_score": ["max", "top2_sum"], "saturated": [True]},
    "expert_mlp": {"activation": list(ACTIVATIONS), "transposed": [True], "interleaved": [True]},
    "scattered_linear": {"weighted": [True], "grouped": [True], "grouped_in": [True], "grouped_out": [True],
                         "transposed": [True]},
}  # fmt: skip
OF_EXPERTS = ("expert_mlp", "scattered_linear")
HEADS = ("softmax_statistics", "selective_log_softmax_and_entropy", "cross_entropy", "topk_kl_div",
         "distillation_loss", "kl_div")  # fmt: skip
# A row with +inf, or with nothing but -inf, is NaN throughout; what is said of single values is tested elsewhere.
HARD_OF = {
    "topk_kl_div": ["none", "1e4", "a row of NaN", "constant"],
    "distillation_loss": ["none", "1e4", "a row of NaN", "constant"],
    "kl_div": ["none", "scattered -inf", "a leading block -inf", "1e4", "a row of NaN", "constant"],
    "expert_mlp": ["none", "a row of NaN"],
    "scattered_linear": ["none"],
    "linear_loss": ["none", "a row of NaN"],
}


def reasonable(spec: Spec) -> Spec:
    """The nearest call that is allowed."""
    options = dict(spec["options"])
    if options.get("reduction") == "none":
        options.pop("num_items", None)
    if options.get("group_score") and "n_group" not in options:
        options.pop("group_score")
    if "topk_group" in options and options["topk_group"] > options.get("n_group", 1):
        options.pop("topk_group")
    if options.get("direction") != "jsd":
        options.pop("beta", None)
    layouts = dict(spec["layouts"])
    if spec["head"]:
        options.pop("inplace_backward", None)
    if options.get("inplace_backward") and layouts.get("logits") not in (None, "a slice", "offset", "misaligned"):
        layouts.pop("logits")
    spec = spec | {"options": options, "layouts": layouts}
    if spec["head"] and spec["hard"] not in ("none", "a row of NaN"):
        spec["hard"] = "none"
    if spec["hard"] not in HARD_OF.get(spec["function"], list(HARD)):
        spec["hard"] = "none"
    no_slope = (
        options.get("eps") == 0 or options.get("activation") == "swiglu_clamped" or options.get("alpha") in (0, 1)
    )
    if no_slope or options.get("saturated") or (spec["head"] and options.get("renormalize")):
        spec["hard"] = "none"
    return spec


LOGITS = ("logits", "hidden", "weight", "bias", "a", "b")
OF_IDS = (*LOGITS, "index", "row_mask", "class_weights")
OF_TEACHER = (*LOGITS, "teacher_ids", "teacher_log_probs", "mask", "labels")
LEAVES = {
    "softmax_statistics": OF_IDS,
    "selective_log_softmax": OF_IDS,
    "entropy_from_logits": ("logits", "row_mask"),
    "selective_log_softmax_and_entropy": OF_IDS,
    "cross_entropy": (*LOGITS, "target", "weight of classes"),
    "linear_loss": (*LOGITS[1:], "index", "row_mask", "advantages", "old"),
    "topk_kl_div": OF_TEACHER,
    "distillation_loss": OF_TEACHER,
    "kl_div": (*LOGITS, "teacher", "mask"),
    "route": ("router_logits", "selection_bias", "token_mask"),
    "expert_mlp": ("hidden", "weights", "experts", "gate_up", "down", "gate_up_bias", "down_bias", "a1", "b1", "a2",
                   "b2"),
    "scattered_linear": ("x", "weight", "experts", "bias", "weights"),
}  # fmt: skip


@st.composite
def calls(draw, function=None):
    function = draw(st.sampled_from(sorted(PROBLEMS))) if function is None else function
    options = {n: draw(st.sampled_from(v)) for n, v in OPTIONS[function].items() if draw(st.booleans())}
    of_experts = function in OF_EXPERTS
    layouts = {n: draw(st.sampled_from(ANY_LAYOUT)) for n in LEAVES[function] if draw(st.integers(0, 2)) == 0}
    return reasonable({
        "function": function,
        "seed": draw(st.integers(0, 99)),
        "rows": draw(st.sampled_from([(3,), (1,), (5,), (0,), (2, 2), (1, 3), *(() if of_experts else ((2, 0), ()))])),
        "vocab": draw(st.sampled_from([1, 2, 4, 8, 12, 33] if function == "route" else [1, 2, 3, 8, 27, 31, 64, 67])),
        "width": draw(st.sampled_from([1, 3, 16, 19])),
        "dtype": draw(st.sampled_from(["float32", "float32", "float64", "float16", "bfloat16"])),
        "hard": draw(st.sampled_from(["none", *HARD_OF.get(function, list(HARD))])),
        "k": draw(st.sampled_from([None, 1, 2, 3, 0] if function == "expert_mlp" else [None, 1, 2, 3])),
        "int32": draw(st.booleans()),
        "mask": draw(st.sampled_from([None, None, "bool", "int64", "uint8", "float32"])),
        "mask_of_ids": draw(st.booleans()),
        "weights": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "head": function in HEADS and draw(st.booleans()),
        "rank": draw(st.sampled_from([0, 0, 2])),
        "outside": draw(st.sampled_from([None, None, None, "vocab", -1, 2**31 + 1, -(2**40)])),
        "label": draw(st.sampled_from([None, None, 2**32 + 5, -1])),
        "ids_of_32_bits": draw(st.booleans()),
        "layouts": layouts,
        "options": options,
    })  # fmt: skip


@st.composite
def examples(draw):
    """A call, and others: the same with some things changed, or another function."""
    found = [draw(calls())]
    for _ in range(draw(st.integers(0, 2))):
        other = draw(calls(found[0]["function"] if draw(st.integers(0, 3)) else None))
        if other["function"] == found[0]["function"]:
            changed = [n for n in other if draw(st.booleans())]
            other = reasonable(found[0] | {n: other[n] for n in changed})
        found.append(other)
    return found


# The check


def laid_out(tensor: Tensor, layout: str | None) -> Laid | None:
    return None if layout is None or not tensor.dim() or not tensor.numel() else Laid(tensor, layout)


def takes_kernels(spec: Spec, device: torch.device) -> bool:
    return spec["dtype"] != "float64" and (device.type == "cuda" or interpreted(device))


def check(spec: Spec, device: torch.device) -> dict[str, Tensor] | None:
    """Results and gradients of a call, compared with their definition."""
    spec = PLAIN | spec
    if interpreted(device) and spec["function"] in OF_EXPERTS and spec["dtype"] == "bfloat16":
        spec["dtype"] = "float32"  # the interpreter has no products of bfloat16
    p = problem(spec)
    laid = {n: laid_out(t.to(device), spec["layouts"].get(n)) for n, t in p.tensors.items()}
    values = {n: p.tensors[n].to(device) if each is None else each.view for n, each in laid.items()}
    exact = {n: t.detach().cpu().contiguous().clone() for n, t in values.items()}
    exact = {n: t.double().requires_grad_(n in p.grad) if t.is_floating_point() else t for n, t in exact.items()}
    values = {n: t.detach().requires_grad_(n in p.grad) for n, t in values.items()}
    if p.outside is not None and p.outside[0].any() and device.type == "cpu" and not takes_kernels(spec, device):
        with pytest.raises(IndexError, match=rf"^({p.outside[1]})\b"):
            p.call(values)
        return None
    got = p.call(values)
    written = bool(spec["options"].get("inplace_backward"))
    expected = p.define(exact)
    assert set(expected) <= set(got)
    for name, e in expected.items():
        assert got[name].shape == e.shape, f"{name}: {tuple(got[name].shape)}, expected {tuple(e.shape)}"
        compare(got[name].detach().cpu(), e.detach(), p.tolerance, name)
    found = {n: t.detach().clone() for n, t in got.items()}
    if not p.values_only:
        found |= gradients(p, values, exact, got, expected, spec["seed"])
    for n, each in laid.items():
        assert each is None or each.is_untouched(inside=not (written and n == "logits")), f"the memory of {n}"
    return found


def compare(got: Tensor, expected: Tensor, tolerance: Any, name: str) -> None:
    if isinstance(tolerance, tuple):
        assert_close(got, expected, scale=tolerance[0], name=name)
    else:
        compare_norms(got, expected, tolerance, name)


def compare_norms(got: Tensor, expected: Tensor, bound: float, name: str) -> None:
    got = got.double()
    odd, same = ~expected.isfinite(), (got == expected) | (got.isnan() & expected.isnan())
    error, norm = (got - expected)[~odd].norm(), expected[~odd].norm()
    if not (bool(same[odd].all()) and bool(error <= bound * (norm + 0.1 * max(1, expected.numel()) ** 0.5))):
        raise AssertionError(f"{name}: off by {error} of {norm}; got {got}, expected {expected}"[:2000])


def gradients(
    p: Problem, values: dict[str, Tensor], exact: dict[str, Tensor], got: dict[str, Tensor],
    expected: dict[str, Tensor], number: int,
) -> dict[str, Tensor]:  # fmt: skip
    """Of each tensor, for one upstream gradient of each result; none through what is infinite."""
    names = [n for n in expected if expected[n].requires_grad and got[n].requires_grad]
    infinite = [expected[n].detach().isinf() for n in names]
    if not names or any(i.dim() == 0 and i for i in infinite):
        return {}
    generator = torch.Generator().manual_seed(number)
    upstream = [torch.rand(i.shape, generator=generator).add(0.5).masked_fill(i, 0.0) for i in infinite]
    ours = [u.to(got[n]) for u, n in zip(upstream, names)]
    found = torch.autograd.grad([got[n] for n in names], [values[n] for n in p.grad], ours, allow_unused=True)
    true = torch.autograd.grad(
        [torch.where(i, 0.0, expected[n]) for i, n in zip(infinite, names)],
        [exact[n] for n in p.grad],
        [u.cpu().double() for u in ours],
        allow_unused=True,
    )
    results = {}
    for name, g, e in zip(p.grad, found, true):
        g, e = (torch.zeros_like(exact[name]) if x is None else x.detach().cpu() for x in (g, e))
        results[f"gradient of {name}"] = g
        assert g.shape == e.shape, f"gradient of {name}"
        if any(i.any() for i in infinite):  # the definition has no gradient there, and may have none beside it
            g, e = (torch.where(e.isnan(), 0.0, x) for x in (g, e))
        if isinstance(p.tolerance, tuple):
            assert_gradient_close(g, e, upstream=p.tolerance[1] * 1.5)
        else:
            compare_norms(g, e, p.tolerance, f"gradient of {name}")
    return results


def run(example: list[Spec], device: torch.device) -> None:
    """Each call, and the first once more: what was kept of the others must not change it."""
    first, *_ = [check(spec, device) for spec in example]
    again = check(example[0], device) if len(example) > 1 else first
    for name in first or ():
        assert torch.equal(first[name].nan_to_num(), again[name].nan_to_num()), f"{name}, the second time"


# Tests

UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
QUICK: dict[str, Any] = {"derandomize": True, "phases": (Phase.explicit, Phase.generate), **UNTIMED}


@pytest.mark.parametrize("name", EXAMPLES)
def test_known_defects(device, name):
    run(EXAMPLES[name], device)


@pytest.mark.parametrize("value", [1e-40, 10**400, 1e-320], ids=["1e-40", "10**400", "1e-320"])
@pytest.mark.parametrize("prefix", ["", "teacher_"], ids=["student", "teacher"])
def test_a_temperature_that_float32_cannot_divide_by(device, value, prefix):
    x = torch.randn(3, 10, device=device)
    given = {f"{prefix}temperature": value}
    calls = [lambda: onepass.kl_div(x, x, **given)]
    if not prefix:
        calls += [lambda: onepass.entropy_from_logits(x, **given), lambda: onepass.softmax_statistics(x, **given)]
    for call in calls:
        with pytest.raises(ValueError, match=f"^{prefix}temperature: ") as error:
            call()
        assert len(str(error.value)) < 500


@pytest.mark.parametrize("shape, strides", [((3, 10), (5, 1)), ((2, 3, 8), (8, 8, 1)), ((3, 8), (7, 1))])
def test_logits_that_overlap_are_not_written_over(device, shape, strides):
    x = torch.randn(64, device=device).as_strided(shape, strides)
    before = x.clone()
    target = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"^inplace_backward: "):
        onepass.cross_entropy(x.requires_grad_(), target, inplace_backward=True)
    assert torch.equal(x.detach(), before)
    view = torch.randn(64, device=device).as_strided((3, 10), (12, 1)).requires_grad_()  # which do not
    onepass.cross_entropy(view, target.flatten()[:3], inplace_backward=True).backward()


@pytest.mark.parametrize("function", sorted(PROBLEMS))
def test_random_calls(device, function):
    @settings(max_examples=6 if is_slow(device) else 30, **QUICK)
    @given(spec=calls(function))
    def of_function(spec):
        check(spec, device)

    of_function()


def test_random_calls_in_a_random_order(device):
    @settings(max_examples=15 if is_slow(device) else 60, **QUICK)
    @given(example=examples())
    def in_order(example):
        run(example, device)

    in_order()


@pytest.mark.skipif(not SECONDS, reason="ONEPASS_FUZZ_SECONDS says for how long")
def test_calls_that_nobody_has_seen(device):
    """What fails is printed, as small as it can be made: it belongs into `fuzz_corpus.EXAMPLES`."""
    end = time.monotonic() + SECONDS / 2  # there are two paths on any machine
    while time.monotonic() < end:
        number = random.SystemRandom().randrange(2**32)

        @seed(number)
        @settings(max_examples=50, print_blob=False, **UNTIMED)
        @given(example=examples())
        def unseen(example):
            run(example, device)

        unseen()
