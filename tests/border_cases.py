"""Small valid calls of every public function: what `test_border` generates its tests from.

A `Case` gives a function a value for each of its parameters. What is in a parameter has a name of its own, as errors
have it: ``routing.weights``, ``lora_down[0]``, ``row_inputs[1]``, ``teacher.hidden``. So every tensor and every number
that reaches a function is a *leaf*, which a test can replace by another of the same value, or by a bad one.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import onepass
from onepass.core.moe_options import Groups
from onepass.losses.ratio_report import RatioReport
from onepass.moe import Routing, group_by_expert

INF, NAN = float("inf"), float("nan")
N, V, H, K, E, I, R = 3, 27, 16, 2, 3, 8, 2  # noqa: E741
OUTPUTS = 12

# What is public and takes neither tensors nor numbers, or only returns them.
EXEMPT = {
    "Attached": "is made by attach",
    "MaterializedLogits": "is a warning",
    "Patch": "is made by patch",
    "RowGroups": "is what linear_loss passes to a loss of groups",
    "SoftmaxStatistics": "is what softmax_statistics returns",
    "VocabParallelLogits": "takes a process group; test_vocab_parallel.py has its arguments",
    "attach": "takes a model; test_attach.py has its arguments",
    "batch_invariant": "takes no tensor",
    "gather_parameters": "takes a function",
    "moe": "is a module",
    "moe.ExpertCounts": "is made by count_experts",
    "moe.QuantizedWeight": "is what quantize returns",
    "moe.Replay": "is made by replay_routing",
    "moe.Routing": "is what route returns, and is taken apart in the cases that take one",
    "moe.RoutingRecord": "takes arrays; test_replay_models.py has its arguments",
    "moe.count_experts": "takes a model; test_selection_bias.py has its arguments",
    "moe.dequantize_experts": "takes a model; test_quantized_modules.py has its arguments",
    "moe.describe": "takes a model; test_quantized_modules.py has its arguments",
    "moe.quantize": "takes a weight; test_quantized.py has its arguments",
    "moe.quantize_experts": "takes a model; test_quantized_modules.py has its arguments",
    "moe.record_routing": "takes a model; test_replay_models.py has its arguments",
    "moe.replay_routing": "takes a model; test_replay_models.py has its arguments",
    "moe.update_selection_bias": "writes to what it takes; test_selection_bias.py has its arguments",
    "patch": "takes names of libraries",
}


@dataclass(frozen=True)
class Number:
    """A number of which tests try every type: one with a fraction, an integral one, and what is out of range."""

    value: float
    whole: int
    bad: tuple[Any, ...] = (INF,)


@dataclass(frozen=True)
class Integer:
    """An int, which may also be one of numpy or of a tensor without dimensions."""

    value: int
    bad: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Derived:
    """Leaves that are computed of others on the path that is tested."""

    of: Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A valid call.

    Attributes:
        function: its public name, those of mixtures of experts with ``moe.`` before it.
        arguments: the leaves and their values, on a CPU.
        grad: leaves of which a gradient is taken.
        note: tells cases of one function apart.
        fixed: leaves that other leaves follow from, so that only views of the same values can stand for them.
        refused: leaves whose last dimension must be contiguous, and what then begins the error.
    """

    function: str
    arguments: dict[str, Any]
    grad: tuple[str, ...] = ()
    note: str = ""
    fixed: frozenset[str] = frozenset()
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.function + (f", {self.note}" if self.note else "")

    @property
    def is_module(self) -> bool:
        return inspect.isclass(resolve(self.function)) and issubclass(resolve(self.function), nn.Module)

    def leaves(self, kind: type | tuple[type, ...]) -> list[str]:
        return [name for name, value in self.arguments.items() if isinstance(value, kind)]

    def values(self, device: Any = "cpu", **changes: Any) -> dict[str, Any]:
        """Fresh leaves, of which those in ``grad`` require a gradient. ``changes`` are taken as they are."""
        found: dict[str, Any] = {}
        for name, value in self.arguments.items():
            if isinstance(value, Derived):
                found |= value.of(found)
            elif isinstance(value, Tensor):
                found[name] = value.clone().to(device).requires_grad_(name in self.grad)
            else:
                found[name] = value.value if isinstance(value, (Number, Integer)) else value
        assert set(changes) <= set(found)
        return found | changes

    def call(self, values: dict[str, Any]) -> Any:
        arguments = assembled(values)
        function = resolve(self.function)
        if self.is_module:
            known = inspect.signature(function).parameters
            torch.manual_seed(0)
            module = function(**{n: v for n, v in arguments.items() if n in known})
            for parameter in module.parameters():
                parameter.data.normal_()
            device = next((v.device for v in values.values() if isinstance(v, Tensor)), "cpu")
            return module.to(device)(**{n: v for n, v in arguments.items() if n not in known})
        positional = []
        kinds = inspect.signature(function).parameters
        if any(p.kind is p.VAR_POSITIONAL for p in kinds.values()):
            for name, parameter in kinds.items():
                if parameter.kind is parameter.VAR_POSITIONAL:
                    positional += arguments.pop(name, [])
                    break
                positional.append(arguments.pop(name))
        result = function(*positional, **arguments)
        return onepass.entropy_from_logits(result) if function is onepass.LinearLogits else result

    def results(self, values: dict[str, Any]) -> dict[str, Tensor]:
        """All results and the gradients of `grad`, for one upstream gradient of each result."""
        outputs = flattened(self.call(values))
        return {n: t.detach() for n, t in outputs.items()} | self.gradients(outputs, values)

    def gradients(self, outputs: dict[str, Tensor], values: dict[str, Any]) -> dict[str, Tensor]:
        if not self.grad:
            return {}
        given = [t for t in outputs.values() if t.requires_grad]
        upstream = [torch.linspace(0.5, 1.5, t.numel()).view(t.shape).to(t) for t in given]
        found = torch.autograd.grad(given, [values[n] for n in self.grad], upstream, allow_unused=True)
        return {f"gradient of {n}": g for n, g in zip(self.grad, found) if g is not None}


def resolve(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(onepass.moe if module else onepass, last)


def public_names() -> list[str]:
    return [*onepass.__all__, *(f"moe.{name}" for name in onepass.moe.__all__)]


def parameters(name: str) -> dict[str, inspect.Parameter]:
    """All that a public function takes; of a module what its forward takes too."""
    function = resolve(name)
    signatures = [inspect.signature(function)]
    if inspect.isclass(function) and issubclass(function, nn.Module):
        signatures.append(inspect.signature(function.forward))
    found: dict[str, inspect.Parameter] = {}
    for parameter in [p for s in signatures for p in s.parameters.values() if p.name != "self"]:
        assert parameter.kind is not parameter.VAR_KEYWORD, f"{name}: **{parameter.name} hides what may be given"
        found[parameter.name] = parameter
    return found


def root(leaf: str) -> str:
    return re.split(r"[.\[]", leaf)[0]


class MixtralSparseMoeBlock(nn.Module):
    """A block of a family that `route_block` knows by its name."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.gate, self.top_k = nn.Linear(H, E, bias=False), K
        del self.gate.weight
        self.gate.weight = weight


def _routing(**given: Any) -> Routing:
    return Routing(**(dict.fromkeys(("weights", "experts", "counts")) | given))


CONTAINERS = {
    "routing": _routing,
    "groups": Groups,
    "block": lambda weight: MixtralSparseMoeBlock(weight),
    **dict.fromkeys(("logits", "student_logits", "teacher_logits"), onepass.LinearLogits),
}


def assembled(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments of which these are the leaves."""
    found: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name == root(name):
            found[name] = value
        elif name.endswith("]"):
            found.setdefault(root(name), []).append(value)
        else:
            parts.setdefault(root(name), {})[name.partition(".")[2]] = value
    return found | {name: CONTAINERS[name](**given) for name, given in parts.items()}


def flattened(result: Any) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {"result": result}
    named = vars(result) if isinstance(result, (onepass.SoftmaxStatistics, RatioReport)) else None
    if named is None:
        named = result._asdict() if hasattr(result, "_asdict") else {f"result {n}": t for n, t in enumerate(result)}
    return {name: t for name, t in named.items() if t is not None}


def forms(value: float) -> dict[str, Any]:
    """The same number in every type that one may come in."""
    found: dict[str, Any] = {"float": float(value)}
    found |= {"numpy.float32": numpy.float32(value), "numpy.float64": numpy.float64(value)}
    found |= {"tensor": torch.tensor(float(value)), "float64 tensor": torch.tensor(value, dtype=torch.float64)}
    if value == int(value):
        found |= {"int": int(value), "numpy.int64": numpy.int64(value), "int64 tensor": torch.tensor(int(value))}
    return found


def integer_forms(value: int) -> dict[str, Any]:
    return {
        "int": value, "numpy.int64": numpy.int64(value), "numpy.int32": numpy.int32(value),
        "int64 tensor": torch.tensor(value), "int32 tensor": torch.tensor(value, dtype=torch.int32),
    }  # fmt: skip


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
        "reduction": "sum", "num_items": ITEMS,
    }, tuple(head("student_logits")), "a head"),
    Case("kl_div", {
        "student_logits": LOGITS, "teacher_logits": TEACHER, "row_mask": MASK, **DIVERGENCE, **TRANSFORM,
        "teacher_temperature": Number(1.25, 1, (*ABOVE_0, 1e-40)), "teacher_softcap": SOFTCAP,
        "teacher_logit_scale": SCALE,
        "vocab_size": Integer(25, (0, 28, HUGE)), "num_items": ITEMS,
    }, ("student_logits", "teacher_logits")),
    Case("kl_div", {"student_logits": LOGITS, "teacher_logits": TEACHER, "direction": "forward", "reduction": "none"},
         ("student_logits", "teacher_logits"), "forward"),
    Case("LinearLogits", {**HEAD, **ADAPTER, "bias": BIAS, "max_memory": MEMORY}, OF_HEAD),
    Case("linear_softmax_statistics", {
        **HEAD, **ADAPTER, "index": INDICES, "bias": BIAS, "max_memory": MEMORY, **TRANSFORM, "row_mask": MASK,
        "class_weights": CLASSES, "metrics": ("mean_logit",), "expected_logit": True,
    }, OF_HEAD),
    Case("linear_selective_log_softmax_and_entropy", {
        **HEAD, **ADAPTER, "index": INDEX, "bias": BIAS, **TRANSFORM, "row_mask": MASK, "max_memory": MEMORY,
    }, OF_HEAD),
    Case("linear_cross_entropy", {
        **HEAD, **ADAPTER, "target": TARGET, "bias": BIAS, "class_weights": CLASSES, "ignore_index": IGNORED,
        "reduction": "mean",
        "label_smoothing": FRACTION, "z_loss_weight": WEIGHT, **TRANSFORM, "max_memory": MEMORY, "row_mask": MASK,
        "num_items": ITEMS,
    }, OF_HEAD),
    Case("linear_cross_entropy", {**HEAD, "target": TARGET, "class_weights": CLASSES, "reduction": "none"},
         ("hidden", "weight"), "of rows"),
    Case("linear_cross_entropy", {**HEAD, "target": INDEX.int()}, ("hidden", "weight"), "at once"),
    Case("linear_topk_kl_div", {
        **HEAD, **ADAPTER, **OF_TEACHER, "row_mask": MASK, "teacher_mask": ID_MASK, "bias": BIAS, "max_memory": MEMORY,
        **TRANSFORM, **DIVERGENCE, "renormalize": False, "num_items": ITEMS,
    }, OF_HEAD),
    Case("linear_topk_kl_div", {**HEAD, **OF_TEACHER, "reduction": "none", "renormalize": True}, ("hidden", "weight"),
         "of rows"),
    Case("linear_kl_div", {
        **HEAD, **ADAPTER, "teacher_logits": TEACHER, "row_mask": MASK, "bias": BIAS, "max_memory": MEMORY,
        **DIVERGENCE, **TRANSFORM, "teacher_temperature": Number(1.25, 1, ABOVE_0), "teacher_logit_scale": SCALE,
        "teacher_softcap": SOFTCAP, "vocab_size": Integer(25, (0, 28, HUGE)), "num_items": ITEMS,
    }, OF_HEAD),
    Case("linear_kl_div", {
        **HEAD, "teacher_logits.hidden": randn(N, 8), "teacher_logits.weight": randn(V, 8),
        "teacher_logits.bias": BIAS * 0.5, "row_mask": MASK, "reduction": "none",
    }, ("hidden", "weight"), "a head teaches, of rows"),
    Case("linear_kl_div", {**HEAD, "teacher_logits": TEACHER, "reduction": "none"}, ("hidden", "weight"), "of rows"),
    Case("linear_loss", {
        **HEAD, "index": INDEX, "loss_fn": loss_of_all, "row_inputs[0]": randn(N), "row_inputs[1]": -4 * rand(N),
        **ADAPTER, "bias": BIAS, **TRANSFORM, "row_mask": MASK, "class_weights": CLASSES, "metrics": ("is_top1",),
        "expected_logit": True, "reduction": "sum", "num_items": ITEMS, "max_memory": MEMORY,
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
        "class_weights": CLASSES, "ignore_index": IGNORED, "reduction": "sum", "label_smoothing": FRACTION,
        "z_loss_weight": WEIGHT, **TRANSFORM, "inplace_backward": False, "gradient_in_forward": False, "logits": LOGITS,
        "target": TARGET,
        "row_mask": MASK, "num_items": ITEMS,
    }, ("logits",)),
    Case("LinearCrossEntropyLoss", {
        "class_weights": CLASSES, "ignore_index": IGNORED, "reduction": "sum", "label_smoothing": FRACTION,
        "z_loss_weight": WEIGHT, **TRANSFORM, "max_memory": MEMORY, **HEAD, **ADAPTER, "target": TARGET, "bias": BIAS,
        "row_mask": MASK, "num_items": ITEMS,
    }, OF_HEAD),
    Case("KLDivLoss", {
        **DIVERGENCE, **TRANSFORM, "teacher_temperature": Number(1.25, 1, ABOVE_0), "teacher_logit_scale": SCALE,
        "teacher_softcap": SOFTCAP, "vocab_size": Integer(25, (0, 28, HUGE)), "reduction": "mean",
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


LAYOUTS = ("a slice", "every second", "transposed", "offset", "misaligned")
EXPANSIONS = ("expanded over rows", "expanded over columns")


class Laid:
    """A tensor of the values of ``tensor`` that lies in memory as ``layout`` says, amid what must not be read: NaN, ids
    of nothing, or zeros where no kernel can look what it reads (``harmless``)."""

    def __init__(self, tensor: Tensor, layout: str, *, harmless: bool = False) -> None:
        shape, last = tensor.shape, tensor.shape[-1]
        outside: Any = NAN if tensor.is_floating_point() else True
        if tensor.dtype in (torch.int32, torch.int64):
            outside = 0 if harmless else 2**30 if tensor.dtype == torch.int32 else 2**40

        def around(*sizes: int) -> Tensor:
            return torch.full(sizes, outside, dtype=tensor.dtype, device=tensor.device)

        if layout == "a slice":
            view = around(*shape[:-1], last + 3)[..., :last]
        elif layout == "every second":
            view = around(*shape[:-1], 2 * last)[..., ::2]
        elif layout == "transposed":
            view = around(last, 3)[:, 1] if tensor.dim() == 1 else around(*shape[:-2], last, shape[-2] + 1).mT
            view = view if tensor.dim() == 1 else view[..., : shape[-2], :]
        elif layout == "offset":
            view = around(tensor.numel() + 4)[1 : 1 + tensor.numel()].view(shape)
        elif layout == "misaligned":  # each row in another way
            rows = tensor[..., 0].numel()
            view = around(rows * (last + 1) + 3)[3:].view(rows, last + 1)[:, :last].unflatten(0, shape[:-1] or (1,))
            view = view if tensor.dim() > 1 else view[0]
        elif layout == "expanded over rows":
            tensor = tensor[:1].expand(shape)
            view = around(1, *shape[1:-1], last + 3)[..., :last] if tensor.dim() > 1 else around(4)[:1]
            view.copy_(tensor[:1])
            view = view.expand(shape)
        else:
            tensor = tensor[..., :1].expand(shape)
            view = around(*shape[:-1], 2)[..., :1]
            view.copy_(tensor[..., :1])
            view = view.expand(shape)
        if 0 not in view.stride():
            view.copy_(tensor)
        self.view = view.detach()
        self.layout_of_view = view.dtype, view.shape, view.stride(), view.storage_offset()
        self.storage = view.untyped_storage()  # a view that was written over refuses to say where it lies
        self.plain = tensor.detach().clone(memory_format=torch.contiguous_format)
        self.before = self.memory().clone()
        same = (self.view == self.plain) | (self.view != self.view)  # NaN is not what it is
        assert self.view.shape == shape and same.all()

    def memory(self) -> Tensor:
        """The bytes of its storage."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)

    def is_untouched(self, inside: bool = True) -> bool:
        """Whether no byte changed, or none around the view."""
        if inside:
            return torch.equal(self.memory(), self.before)
        after, (dtype, *where) = self.memory().clone(), self.layout_of_view
        after.view(dtype).as_strided(*where).copy_(self.before.view(dtype).as_strided(*where))
        return torch.equal(after, self.before)


def tensors_of(values: dict[str, Any]) -> Iterator[str]:
    """The leaves that can be laid out in another way."""
    return (name for name, value in values.items() if isinstance(value, Tensor) and value.dim() and value.numel())
