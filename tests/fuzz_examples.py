"""Which calls test_fuzz.py draws: the functions, and strategies of hypothesis for their arguments and order."""

from typing import Any

from hypothesis import strategies as st

from fuzz_experts import ACTIVATIONS, of_experts, of_route, of_scattered
from fuzz_losses import of_cross_entropy, of_kl, of_linear_loss, of_statistics, of_topk
from fuzz_problem import HARD, Problem, Spec
from layouts import EXPANSIONS, LAYOUTS


def problem(spec: Spec) -> Problem:
    return PROBLEMS[spec["function"]](spec)


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
    if options.get("reduction", "mean") != "mean":
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
