"""Small valid calls of every public function: what `test_border` and `test_border_errors` generate their tests from.

A `border_call.Case` gives a function a value for each of its parameters.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from border_call import INF, Case, Derived, E, H, I, Integer, K, N, Number, R, V
from onepass.moe import Groups, group_by_expert

OUTPUTS = 12

# What is public and takes neither tensors nor numbers, or only returns them.
EXEMPT = {
    "Attached": "is made by attach",
    "MaterializedLogits": "is a warning",
    "Patch": "is made by patch",
    "RatioReport": "is what ratio_report returns",
    "RowGroups": "is what linear_loss passes to a loss of groups",
    "SoftmaxStatistics": "is what softmax_statistics returns",
    "VocabParallelLogits": "takes a process group; test_vocab_parallel.py has its arguments",
    "attach": "takes a model; test_attach.py has its arguments",
    "batch_invariant": "takes no tensor",
    "gather_parameters": "takes a function",
    "moe": "is a module",
    "moe.ExpertCounts": "is made by count_experts",
    "moe.Groups": "is what group_by_expert returns",
    "moe.QuantizedWeight": "is what quantize returns",
    "moe.Replay": "is made by replay_routing",
    "moe.Routing": "is what route returns, and is taken apart in the cases that take one",
    "moe.RoutingRecord": "takes arrays; test_replay_arrays.py has its arguments",
    "moe.count_experts": "takes a model; test_selection_bias.py has its arguments",
    "moe.dequantize_experts": "takes a model; test_quantized_modules.py has its arguments",
    "moe.describe": "takes a model; test_quantized_modules.py has its arguments",
    "moe.quantize": "takes a weight; test_quantized.py has its arguments",
    "moe.quantize_experts": "takes a model; test_quantized_modules.py has its arguments",
    "moe.record_routing": "takes a model; test_replay_models.py has its arguments",
    "moe.replay_routing": "takes a model; test_replay_models.py has its arguments",
    "moe.set_decoding_memory": "takes a model; test_quantized_modules.py has its arguments",
    "moe.update_selection_bias": "writes to what it takes; test_selection_bias.py has its arguments",
    "patch": "takes names of libraries",
}


_generator = torch.Generator().manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_generator)


def rand(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_generator)


HUGE = 10**400  # no float
ABOVE_0 = (0, -1.0, INF, HUGE)
TEMPERATURE = Number(0.75, 2, (*ABOVE_0, 1e-40))
SOFTCAP = Number(5.5, 30, ABOVE_0)
SCALE = Number(1.5, 2, (INF, -INF, HUGE))
FRACTION = Number(0.25, 1, (-0.5, 1.5, INF, HUGE))
WEIGHT = Number(0.5, 1, (-1.0, HUGE))
ITEMS = Number(2.5, 7, (HUGE,))
MEMORY = Integer(1 << 28, (1, -1, "1 MiB"))
SCRATCH = Integer(1 << 28, (0, -1, "1 MiB"))
IGNORED = Integer(-100, (2**63, HUGE))

LOGITS, TEACHER = randn(N, V), randn(N, V)
INDEX, INDICES = torch.tensor([5, 0, 20]), torch.tensor([[5, 3], [0, 26], [20, 20]])
TARGET = torch.tensor([5, -100, 20])
MASK = torch.tensor([True, False, True])
IDS, LOG_T = torch.tensor([[5, 3], [0, 26], [20, 2]]), -0.5 - rand(N, K)
ID_MASK = torch.tensor([[True, False], [False, False], [True, True]])
CLASSES = 0.5 + rand(V)
HEAD = {"hidden": randn(N, H), "weight": randn(V, H) * 0.5}
BIAS = randn(V)
CLASSES_OF_HEAD, ALL_CLASSES = Integer(25, (0, V + 1, HUGE)), Integer(V, (0, V + 1, HUGE))
TRANSFORM = {"temperature": TEMPERATURE, "softcap": SOFTCAP, "logit_scale": SCALE}
DIVERGENCE = {"direction": "jsd", "beta": Number(0.25, 0, (-0.5, 1.5, INF, HUGE))}
ADAPTER = {
    "lora[0]": torch.linspace(-0.5, 0.5, R * H).view(R, H), "lora[1]": torch.linspace(0.2, -0.1, V * R).view(V, R),
    "lora[2]": Number(0.5, 2),
}  # fmt: skip
OF_HEAD = ("hidden", "weight", "bias", "lora[0]", "lora[1]")
OF_TEACHER = {"teacher_ids": IDS, "teacher_log_probs": LOG_T}


def head(name: str) -> dict[str, Tensor]:
    """A linear head in place of the logits ``name``."""
    return {f"{name}.{part}": t for part, t in (HEAD | {"bias": BIAS}).items()}


def loss_of_all(s: Any, advantages: Tensor, old_log_probs: Tensor) -> Tensor:
    """Has a gradient in every field and input."""
    policy = torch.sigmoid(s.log_probs - old_log_probs) * advantages + 0.05 * s.entropy
    return 0.01 * s.weighted_logit * (1 + s.is_top1.float()) - policy


def loss_of_groups(s: Any, advantages: Tensor, groups: Any) -> Tensor:
    return torch.sigmoid(groups.sum(s.log_probs * advantages)) - 0.05 * groups.mean(s.entropy)


EXPERTS = torch.tensor([[1, 2], [2, 0], [1, 2]])
LORA = {
    "lora_gate_up[0]": randn(E, R, H) * 0.5, "lora_gate_up[1]": randn(E, 2 * I, R) * 0.5,
    "lora_gate_up[2]": Number(0.5, 2), "lora_down[0]": randn(E, R, I) * 0.5, "lora_down[1]": randn(E, H, R) * 0.5,
    "lora_down[2]": Number(1.5, 1),
}  # fmt: skip
BLOCK = {
    "hidden": randn(N, H) * 0.5, "routing.weights": rand(N, K), "routing.experts": EXPERTS,
    "gate_up_weight": randn(E, 2 * I, H) * 0.5, "down_weight": randn(E, H, I) * 0.5,
    "gate_up_bias": randn(E, 2 * I), "down_bias": randn(E, H),
}  # fmt: skip
OF_BLOCK = tuple(name for name in BLOCK if name != "routing.experts")
SCATTERED = {
    "x": randn(N, H), "weight": randn(E, OUTPUTS, H) * 0.5, "experts": EXPERTS,
    "bias": randn(E, OUTPUTS), "weights": rand(N, K),
}  # fmt: skip
ROUTER, CORRECTION = randn(N, 8), randn(8) * 0.2
GROUPED = {"n_group": Integer(4, (0, 3, 9, HUGE)), "topk_group": Integer(2, (0, 5, HUGE)), "group_score": "max"}
ROUTE = {"router_logits": ROUTER, "k": Integer(2, (0, 9, HUGE)), "token_mask": MASK, "losses": True}
OF_ROUTE = {
    "selection_bias": CORRECTION, "scale": Number(2.5, 1, (INF, HUGE)), "eps": Number(0.5, 0, (-1.0, HUGE)),
    "softcap": SOFTCAP,
}  # fmt: skip


def _groups(values: dict[str, Any]) -> dict[str, Tensor]:
    experts, like = (values[n] for n in (("experts", "x") if "x" in values else ("routing.experts", "hidden")))
    groups = group_by_expert(experts, E, like)
    return {f"groups.{name}": t for name, t in groups._asdict().items()}


GROUPED_ROWS = {f"groups.{name}" for name in Groups._fields} | {"experts"}
LOSSES_OF_ROUTES = {
    "routing.experts": EXPERTS, "routing.counts": torch.tensor([1, 2, 3], dtype=torch.int32),
    "routing.prob_sums": rand(E), "routing.logsumexp": randn(N),
}  # fmt: skip

CASES = [
    Case("softmax_statistics", {
        "logits": LOGITS, "index": INDICES, **TRANSFORM, "row_mask": MASK, "class_weights": CLASSES,
        "metrics": ("is_top1", "log_sum_sq_probs", "mean_logit"), "expected_logit": True,
    }, ("logits",)),
    Case("softmax_statistics", {
        "logits": LOGITS.view(1, N, V), "index": INDEX.view(1, N).int(), "class_weights": SCALE, "expected_logit": True,
    }, ("logits",), "a number for all classes"),
    Case("softmax_statistics", {**head("logits"), "index": INDEX, "row_mask": MASK}, tuple(head("logits")), "a head"),
    Case("cross_entropy", {
        "logits": LOGITS, "target": TARGET, "class_weights": CLASSES, "ignore_index": IGNORED, "reduction": "mean",
        "row_mask": MASK.int(), "label_smoothing": FRACTION, "z_loss_weight": WEIGHT, **TRANSFORM,
    }, ("logits",)),
    Case("cross_entropy", {"logits": LOGITS, "target": TARGET, "row_mask": MASK, "num_items": ITEMS}, ("logits",),
         "of a batch"),
    Case("cross_entropy", {"logits": LOGITS, "target": TARGET, "gradient_in_forward": False}, ("logits",), "late"),
    Case("cross_entropy", {"logits": LOGITS, "target": TARGET, "ignore_index": IGNORED}, ("logits",), "few rows"),
    Case("cross_entropy", {"logits": LOGITS, "target": TARGET.int(), "reduction": "none", "inplace_backward": True},
         ("logits",), "in place", refused={"logits": "inplace_backward"}),
    Case("cross_entropy", {**head("logits"), "target": TARGET, "class_weights": CLASSES}, tuple(head("logits")),
         "a head"),
    Case("selective_log_softmax", {"logits": LOGITS, "index": INDICES, **TRANSFORM, "row_mask": MASK}, ("logits",)),
    Case("selective_log_softmax", {"logits": LOGITS, "index": INDEX, "inplace_backward": True}, ("logits",), "in place",
         refused={"logits": "inplace_backward"}),
    Case("entropy_from_logits", {"logits": LOGITS, **TRANSFORM, "row_mask": MASK.int(), "inplace_backward": False},
         ("logits",)),
    Case("selective_log_softmax_and_entropy", {
        "logits": LOGITS, "index": INDEX, **TRANSFORM, "row_mask": MASK, "inplace_backward": False,
    }, ("logits",)),
    Case("topk_kl_div", {
        "student_logits": LOGITS, **OF_TEACHER, "teacher_mask": ID_MASK, "row_mask": MASK, **TRANSFORM, **DIVERGENCE,
        "renormalize": False, "num_items": ITEMS,
    }, ("student_logits",)),
    Case("topk_kl_div", {
        "student_logits": LOGITS, **OF_TEACHER, "renormalize": True, "direction": "reverse", "reduction": "none",
    }, ("student_logits",), "renormalized"),
    Case("topk_kl_div", {"student_logits": LOGITS, **OF_TEACHER, "num_items": torch.tensor(2.5)}, ("student_logits",),
         "items in a tensor"),
    Case("distillation_loss", {
        "student_logits": LOGITS, "target": TARGET, **OF_TEACHER, "row_mask": MASK.float(), "alpha": FRACTION,
        "teacher_mask": ID_MASK, **TRANSFORM, **DIVERGENCE, "renormalize": False, "ignore_index": IGNORED,
        "reduction": "mean",
    }, ("student_logits",)),
    Case("distillation_loss", {
        **head("student_logits"), "target": TARGET, "teacher_ids": IDS.int(), "teacher_log_probs": LOG_T,
        "reduction": "mean", "num_items": ITEMS,
    }, tuple(head("student_logits")), "a head"),
    Case("kl_div", {
        "student_logits": LOGITS, "teacher_logits": TEACHER, "row_mask": MASK, **DIVERGENCE, **TRANSFORM,
        "teacher_temperature": Number(1.25, 1, (*ABOVE_0, 1e-40)), "teacher_softcap": SOFTCAP,
        "teacher_logit_scale": SCALE,
        "vocab_size": CLASSES_OF_HEAD, "num_items": ITEMS,
    }, ("student_logits", "teacher_logits")),
    Case("kl_div", {"student_logits": LOGITS, "teacher_logits": TEACHER, "direction": "forward", "reduction": "none"},
         ("student_logits", "teacher_logits"), "forward"),
    Case("LinearLogits", {**HEAD, **ADAPTER, "bias": BIAS, "max_memory": MEMORY, "vocab_size": CLASSES_OF_HEAD},
         OF_HEAD),
    Case("linear_softmax_statistics", {
        **HEAD, **ADAPTER, "index": INDICES, "bias": BIAS, "max_memory": MEMORY, **TRANSFORM, "row_mask": MASK,
        "vocab_size": ALL_CLASSES, "class_weights": CLASSES, "metrics": ("mean_logit",), "expected_logit": True,
    }, OF_HEAD),
    Case("linear_selective_log_softmax_and_entropy", {
        **HEAD, **ADAPTER, "index": INDEX, "bias": BIAS, **TRANSFORM, "row_mask": MASK, "max_memory": MEMORY,
        "vocab_size": ALL_CLASSES,
    }, OF_HEAD),
    Case("linear_cross_entropy", {
        **HEAD, **ADAPTER, "target": TARGET, "bias": BIAS, "class_weights": CLASSES, "ignore_index": IGNORED,
        "reduction": "mean",
        "label_smoothing": FRACTION, "z_loss_weight": WEIGHT, **TRANSFORM, "max_memory": MEMORY, "row_mask": MASK,
        "num_items": ITEMS,
    }, OF_HEAD),
    Case("linear_cross_entropy", {**HEAD, "target": TARGET, "class_weights": CLASSES, "reduction": "none"},
         ("hidden", "weight"), "of rows"),
    Case("linear_cross_entropy", {**HEAD, "target": INDEX.int(), "vocab_size": CLASSES_OF_HEAD}, ("hidden", "weight"),
         "at once"),
    Case("linear_topk_kl_div", {
        **HEAD, **ADAPTER, **OF_TEACHER, "row_mask": MASK, "teacher_mask": ID_MASK, "bias": BIAS, "max_memory": MEMORY,
        "vocab_size": ALL_CLASSES,
        **TRANSFORM, **DIVERGENCE, "renormalize": False, "num_items": ITEMS,
    }, OF_HEAD),
    Case("linear_topk_kl_div", {**HEAD, **OF_TEACHER, "reduction": "none", "renormalize": True}, ("hidden", "weight"),
         "of rows"),
    Case("linear_kl_div", {
        **HEAD, **ADAPTER, "teacher_logits": TEACHER, "row_mask": MASK, "bias": BIAS, "max_memory": MEMORY,
        **DIVERGENCE, **TRANSFORM, "teacher_temperature": Number(1.25, 1, ABOVE_0), "teacher_logit_scale": SCALE,
        "teacher_softcap": SOFTCAP, "vocab_size": CLASSES_OF_HEAD, "num_items": ITEMS,
    }, OF_HEAD),
    Case("linear_kl_div", {
        **HEAD, "teacher_logits.hidden": randn(N, 8), "teacher_logits.weight": randn(V, 8),
        "teacher_logits.bias": BIAS * 0.5, "row_mask": MASK, "reduction": "none",
    }, ("hidden", "weight"), "a head teaches, of rows"),
    Case("linear_kl_div", {**HEAD, "teacher_logits": TEACHER, "reduction": "none"}, ("hidden", "weight"), "of rows"),
    Case("linear_loss", {
        **HEAD, "index": INDEX, "loss_fn": loss_of_all, "row_inputs[0]": randn(N), "row_inputs[1]": -4 * rand(N),
        "vocab_size": ALL_CLASSES,
        **ADAPTER, "bias": BIAS, **TRANSFORM, "row_mask": MASK, "class_weights": CLASSES, "metrics": ("is_top1",),
        "expected_logit": True, "reduction": "mean", "num_items": ITEMS, "max_memory": MEMORY,
    }, (*OF_HEAD, "row_inputs[0]", "row_inputs[1]")),
    Case("linear_loss", {
        **HEAD, "index": INDEX, "loss_fn": loss_of_all, "row_inputs[0]": randn(N), "row_inputs[1]": -4 * rand(N),
        "row_mask": MASK, "class_weights": CLASSES, "metrics": ("is_top1",), "reduction": "none",
    }, ("hidden", "weight", "row_inputs[0]"), "of rows"),
    Case("linear_loss", {
        **HEAD, "index": INDEX, "loss_fn": loss_of_groups, "row_inputs[0]": BIAS[:N].clone(),
        "row_mask": MASK, "class_weights": CLASSES,
        "groups": torch.tensor([2, 1]), "reduction": "mean",
    }, ("hidden", "weight", "row_inputs[0]"), "of groups", frozenset(("groups",))),
    Case("CrossEntropyLoss", {
        "class_weights": CLASSES, "ignore_index": IGNORED, "reduction": "mean", "label_smoothing": FRACTION,
        "z_loss_weight": WEIGHT, **TRANSFORM, "inplace_backward": False, "gradient_in_forward": False, "logits": LOGITS,
        "target": TARGET,
        "row_mask": MASK, "num_items": ITEMS,
    }, ("logits",)),
    Case("LinearCrossEntropyLoss", {
        "class_weights": CLASSES, "ignore_index": IGNORED, "reduction": "mean", "label_smoothing": FRACTION,
        "z_loss_weight": WEIGHT, **TRANSFORM, "max_memory": MEMORY, **HEAD, **ADAPTER, "target": TARGET, "bias": BIAS,
        "row_mask": MASK, "num_items": ITEMS, "vocab_size": ALL_CLASSES,
    }, OF_HEAD),
    Case("KLDivLoss", {
        **DIVERGENCE, **TRANSFORM, "teacher_temperature": Number(1.25, 1, ABOVE_0), "teacher_logit_scale": SCALE,
        "teacher_softcap": SOFTCAP, "vocab_size": CLASSES_OF_HEAD, "reduction": "mean",
        "student_logits": LOGITS, "teacher_logits": TEACHER, "row_mask": MASK, "num_items": ITEMS,
    }, ("student_logits",)),
    Case("TopKKLDivLoss", {
        **TRANSFORM, **DIVERGENCE, "renormalize": False, "reduction": "mean", "student_logits": LOGITS,
        **OF_TEACHER, "row_mask": MASK, "teacher_mask": ID_MASK, "num_items": ITEMS,
    }, ("student_logits",)),
    Case("moe.route", {**ROUTE, **OF_ROUTE, **GROUPED, "score": "sigmoid", "renormalize": True}, ("router_logits",)),
    Case("moe.route", {**ROUTE, "score": "softmax", "score_after_topk": True, "scale": Number(2.5, 1), "losses": False,
                       "counts": False}, ("router_logits",), "score of the chosen"),
    Case("moe.route", {**ROUTE, **OF_ROUTE, "score": "sigmoid", "experts": EXPERTS + 3, "count_changed": True},
         ("router_logits",), "replayed", frozenset({"experts"})),
    Case("moe.softmax_topk", {**ROUTE, **{n: v for n, v in OF_ROUTE.items() if n != "selection_bias"},
                              "renormalize": False},
         ("router_logits",)),
    Case("moe.sigmoid_topk", {**ROUTE, **OF_ROUTE, **GROUPED, "renormalize": True},
         ("router_logits",)),
    Case("moe.load_balancing_loss", LOSSES_OF_ROUTES, ("routing.prob_sums",)),
    Case("moe.router_z_loss", LOSSES_OF_ROUTES, ("routing.logsumexp",)),
    Case("moe.route_block", {
        "block.weight": randn(E, H), "hidden_states": randn(N, H), "token_mask": MASK, "losses": True,
        "experts": EXPERTS, "count_changed": True,
    }, ("block.weight", "hidden_states"), "", frozenset({"experts"})),
    Case("ratio_report", {"log_probs": -rand(N, V), "sampler_log_probs": -rand(N, V), "row_mask": rand(N, V) < 0.7}),
    Case("moe.expert_mlp", {
        **BLOCK, **LORA, "activation": "swiglu_clamped", "alpha": Number(1.75, 2), "limit": Number(1.5, 7, ABOVE_0),
        "max_memory": SCRATCH,
    }, (*OF_BLOCK, *(name for name in LORA if not name.endswith("[2]")))),
    Case("moe.expert_mlp", {
        **BLOCK, "gate_up_weight": BLOCK["gate_up_weight"].mT.contiguous(),
        "down_weight": BLOCK["down_weight"].mT.contiguous(), "transposed": True, "interleaved": True,
        "max_memory": SCRATCH,
    }, OF_BLOCK, "transposed"),
    Case("moe.expert_mlp", {**BLOCK, "groups": Derived(_groups)}, OF_BLOCK, "grouped",
         frozenset({*GROUPED_ROWS, "routing.experts"})),
    Case("moe.scattered_linear", {
        **SCATTERED, "transposed": False, "max_memory": SCRATCH,
    }, ("x", "weight", "bias", "weights")),
    Case("moe.scattered_linear", {
        "x": randn(N * K, H), "weight": randn(E, H, OUTPUTS), "experts": EXPERTS.int(), "bias": SCATTERED["bias"],
        "groups": Derived(_groups), "transposed": True, "grouped_in": True, "grouped_out": True,
    }, ("x", "weight", "bias"), "grouped", frozenset(GROUPED_ROWS)),
    Case("moe.group_by_expert", {
        "experts": EXPERTS, "num_experts": Integer(E, (0, -1, HUGE)), "like": BLOCK["hidden"],
    }),
    Case("moe.group_by_expert", {
        "experts": EXPERTS.flatten().sort().values.unsqueeze(1), "num_experts": Integer(E, (0, -1, HUGE)),
        "like": BLOCK["hidden"], "counts": EXPERTS.flatten().bincount(minlength=E),
    }, (), "sorted", frozenset({"experts", "counts"})),
    Case("moe.ParallelExperts", {
        "num_experts": E, "input_size": H, "output_size": OUTPUTS, "bias": True, "x": SCATTERED["x"],
        "experts": EXPERTS, "groups": Derived(_groups), "weights": SCATTERED["weights"],
        "grouped_in": False, "grouped_out": False,
    }, ("x", "weights"), "", frozenset(GROUPED_ROWS)),
    Case("moe.GLUMLP", {
        "input_size": H, "hidden_size": I, "num_experts": E, "bias": True, "activation": "gelu",
        **{name: BLOCK[name] for name in ("hidden", "routing.weights", "routing.experts")},
    }, ("hidden", "routing.weights")),
]  # fmt: skip
for case in CASES:
    if "max_memory" in case.arguments and not case.function.startswith("moe."):
        case.arguments["logits_dtype"] = torch.float32
# Of which a support, and a temperature of each row, are cases of their own.
SUPPORTED = ("softmax_statistics", "selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy",
             "linear_softmax_statistics", "linear_selective_log_softmax_and_entropy", "linear_loss")  # fmt: skip
IDS_OF_ROWS = torch.tensor([[5, 3, 20], [0, 26, 7], [20, 2, 5]])
CASES += [
    replace(
        case,
        arguments=case.arguments | {"support": IDS_OF_ROWS} | changed,
        note="a support",
        fixed=frozenset(("support",)),
    )
    for case in CASES
    for changed in ({"metrics": ("is_top1",)} if case.function.endswith("statistics") else {},)
    if case.function in SUPPORTED and "temperature" in case.arguments
]
OWN = {"temperature": 0.5 + rand(N), "teacher_temperature": 0.5 + rand(N)}
CASES += [
    replace(case, arguments=case.arguments | {n: t for n, t in OWN.items() if n in case.arguments}, note="rows apart")
    for case in CASES
    if "temperature" in case.arguments and not case.is_module and "support" not in case.arguments
]


def of_functions() -> list[Case]:
    """The cases but those of modules, which only pass on what they are given."""
    return [case for case in CASES if not case.is_module]


every_case = pytest.mark.parametrize("case", CASES, ids=str)
