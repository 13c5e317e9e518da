"""Random calls of statistics and losses, and what they should give: for test_fuzz.py."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import onepass
from border_call import flattened
from definition import divergence, statistics, topk_divergence, transform
from fuzz_problem import (
    HEAD,
    INF,
    NAN,
    OF_PRODUCTS,
    TRANSFORMS,
    Problem,
    Source,
    Spec,
    adapter_of,
    direction_of,
    dtype_of,
    given_logits,
    head_arguments,
    head_of,
    logits_or_head,
    magnitude_of,
    masked,
    no_class,
    pick,
    reduced,
    tolerance,
    void,
)


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
