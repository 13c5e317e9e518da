"""Examples that failed once: each is a list of calls, of which `fuzz_examples.PLAIN` says what they leave out."""

from typing import Any

INT_FIRST = {"function": "route", "k": 2, "vocab": 8}
OF_TEACHER = {"function": "topk_kl_div", "head": True, "k": 3}
BIASED = {"function": "expert_mlp", "k": 2, "bias": True, "rank": 2}
SCATTERED = {"function": "scattered_linear", "k": 2, "bias": True}
SLICED, EXPANDED = ("a slice", "transposed", "misaligned"), ("expanded over rows", "expanded over columns")
BIASES = ("gate_up_bias", "down_bias")

EXAMPLES: dict[str, list[dict[str, Any]]] = {
    **{
        f"labels of a linear head, {layout}, {reduction}": [
            # Of two rows none is ignored: the labels are read as they lie.
            {"function": "cross_entropy", "head": True, "rows": rows, "layouts": {"target": layout},
             "options": {"reduction": reduction}}
            for rows in ((2,), (3,))
        ]
        for layout in ("transposed", "every second", "expanded over rows")
        for reduction in ("mean", "sum")
    },
    **{
        f"teacher ids, {layout}": [OF_TEACHER | {"layouts": {"teacher_ids": layout}, "options": {"renormalize": r}}
                                   for r in (False, True)]
        for layout in (*SLICED, *EXPANDED)
    },
    **{
        f"{bias} of experts, {layout}": [BIASED | {"layouts": {bias: layout}}]
        for bias in BIASES
        for layout in (*SLICED, *EXPANDED)
    },
    **{
        f"bias of scattered rows, {layout}": [SCATTERED | {"layouts": {"bias": layout}, "options": {"weighted": True}}]
        for layout in (*SLICED, *EXPANDED)
    },
    "an adapter of a slice": [BIASED | {"layouts": dict.fromkeys(("a1", "b1", "a2", "b2"), "a slice")}],
    "scale, an int first": [INT_FIRST | {"options": {"scale": v}} for v in (1, 2.5, 1)],
    "scale, a fraction first": [INT_FIRST | {"options": {"scale": v}} for v in (2.5, 1, 2.5)],
    "eps, an int first": [INT_FIRST | {"options": {"score": "sigmoid", "eps": v}} for v in (0, 1e-20, 0.5)],
    "softcap of a router, an int first": [INT_FIRST | {"options": {"softcap": v}} for v in (30, 5.5)],
    "softcap, an int first": [
        {"function": "softmax_statistics", "options": {"softcap": v, "temperature": t, "logit_scale": t}}
        for v, t in ((30, 1), (5.5, 0.7))
    ],
    "beta, an int first": [
        {"function": "kl_div", "options": {"direction": "jsd", "beta": v, "temperature": t}}
        for v, t in ((0, 1), (0.3, 0.7), (1, 2))
    ],
    **{
        f"class weights and a target that is no class, {'a head' if head else 'logits'}, {reduction}": [
            {"function": "cross_entropy", "head": head, "weights": True, "outside": "vocab",
             "options": {"reduction": reduction, "label_smoothing": smoothing}}
            for smoothing in (0, 0.1)
        ]
        for head in (False, True)
        for reduction in ("mean", "sum", "none")
    },
    "a loss that is infinite in one row": [
        {"function": "linear_loss", "options": {"loss_fn": "log of the rest", "certain": True, "reduction": r}}
        for r in ("none", "sum", "mean")
    ],
    "a row of NaN and a z-loss": [
        {"function": "linear_loss", "hard": "a row of NaN", "rows": (1,), "options": {"loss_fn": "z-loss"}},
        {"function": "linear_loss", "hard": "a row of NaN", "rows": (3,), "options": {"loss_fn": "z-loss"}},
        {"function": "linear_loss", "hard": "a row of NaN", "options": {"loss_fn": "policy", "reduction": "sum"}},
    ],
    "no choice of an expert": [
        {"function": "expert_mlp", "k": 0, "bias": True},
        {"function": "expert_mlp", "k": 0, "rank": 2, "rows": (2, 2)},
    ],
    **{
        f"a logit of a router that is +inf, {score}": [
            {"function": "route", "hard": "one +inf", "k": 2, "vocab": 8, "options": {"score": score}}
        ]
        for score in ("softmax", "sigmoid", "sqrtsoftplus")
    },
    **{
        f"a soft-cap that saturates, {after}, {score}": [
            {"function": "route", "k": 4, "vocab": 12, "seed": seed, "dtype": dtype,
             "options": {"softcap": 5.5, "saturated": True, "score": score, "score_after_topk": after}}
            for seed, dtype in ((1, "float32"), (2, "float64"), (3, "float16"))
        ]
        for after in (True, False)
        for score in ("softmax", "sigmoid")
    },
    **{
        f"all scores of a router are tiny, {score}": [
            {"function": "route", "k": 2, "vocab": 8, "hard": "1e4", "weights": weights, "dtype": dtype,
             "options": {"score": score, "eps": eps}}
            for dtype in ("float32", "float64")
            for weights in (False, True)
            for eps in (0, 1e-20)
        ]
        for score in ("softmax", "sigmoid", "sqrtsoftplus")
    },
    "a label of more than 32 bits": [
        {"function": "distillation_loss", "k": 2, "int32": False, "label": 2**32 + 5, "head": head,
         "ids_of_32_bits": True, "options": {"reduction": reduction}}
        for head in (False, True)
        for reduction in ("none", "mean")
    ],
    **{
        f"a head of no row dimension, {function}": [
            {"function": function, "head": True, "rows": (), "k": 2, "bias": True, "options": {"reduction": "none"}
             if "entropy" not in function or function == "cross_entropy" else {}}
        ]
        for function in ("cross_entropy", "selective_log_softmax_and_entropy", "topk_kl_div", "distillation_loss",
                         "kl_div")
    },
    "scattered rows of no token": [
        {"function": "scattered_linear", "rows": (0,), "k": k, "bias": True, "dtype": dtype,
         "options": {"weighted": True, "grouped": grouped, "grouped_in": grouped}}
        for k, dtype, grouped in ((3, "float32", False), (1, "float64", True))
    ],
    "ids that lie by columns": [
        {"function": "cross_entropy", "rows": (2, 2), "layouts": {"target": "transposed"}},
        {"function": "selective_log_softmax", "rows": (2, 2), "k": 3, "layouts": {"index": "transposed"}},
        {"function": "topk_kl_div", "rows": (5,), "k": 3, "layouts": {"teacher_ids": "transposed"}},
        {"function": "softmax_statistics", "rows": (5,), "k": 3, "head": True, "layouts": {"index": "transposed"}},
        {"function": "expert_mlp", "rows": (5,), "k": 2, "layouts": {"weights": "transposed", "experts": "transposed"}},
    ],
    **{
        f"a row of NaN that the teacher says nothing of, {function}, {direction}": [
            {"function": function, "rows": (3,), "vocab": 3, "hard": "a row of NaN", "weights": True, "seed": seed,
             "options": {"direction": direction}}
            for seed in (0, 4)
        ]
        for function in ("topk_kl_div", "distillation_loss")
        for direction in ("forward", "reverse", "jsd")
    },
    "a gradient that float16 has no number for": [
        {"function": "cross_entropy", "rows": (3,), "vocab": 1, "dtype": "float16", "hard": "1e4",
         "options": {"reduction": "sum", "z_loss_weight": 1}}
    ],
    "tiny scores that experts are not selected by": [
        {"function": "route", "vocab": 1, "options": {"score": "sigmoid", "eps": 0, "score_after_topk": True,
                                                      "saturated": True}}
    ],
    "a large logit in float64": [
        {"function": "route", "rows": (3,), "vocab": 1, "seed": 1, "dtype": "float64",
         "options": {"score": "sqrtsoftplus", "renormalize": False, "saturated": True}}
    ],
    "sums of tokens in float64": [{"function": "route", "k": 3, "vocab": 8, "dtype": "float64", "mask": "bool"}],
    # A log-prob of -inf says that a token is not given, as a mask does: what is in its place is not read.
    **{
        f"{what} where the teacher gives no token, {function}, {'a head' if head else 'logits'}": [
            {"function": function, "head": head, "k": 2, "weights": share, **more} for share in (1.0, True)
        ]
        for what, more in (("a row of NaN", {"hard": "a row of NaN"}), ("no class", {"outside": "vocab"}))
        for function in ("topk_kl_div", "distillation_loss")
        for head in (False, True)
    },
    "a mask of floats": [
        {"function": function, "mask": "float32", "head": head, "k": 2}
        for function, head in (
            ("softmax_statistics", False), ("softmax_statistics", True), ("selective_log_softmax", False),
            ("entropy_from_logits", False), ("kl_div", False), ("kl_div", True), ("topk_kl_div", False),
            ("distillation_loss", False), ("linear_loss", False), ("route", False),
        )
    ],
}  # fmt: skip
