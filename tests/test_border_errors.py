"""Numbers, choices, bools and tensors that every public function refuses, each by an error that names the argument."""

import numpy
import pytest
import torch
from torch import Tensor

import onepass
from border_call import NAN, Integer, Number, parameters, resolve, root, signature
from border_cases import HUGE, every_case

pytestmark = pytest.mark.usefixtures("path")
LONG = [0.5] * 100_000


# What else an error may begin with: of two arguments that do not fit, either may be named.
ALIASES = {
    "teacher": {"teacher_logits"},
    "weight": {"bias", "class_weights", "teacher_logits", "num_experts"},
    "gate_up_weight": {"down_weight", "num_experts"},
    "lora[0]": {"lora[1]"},
    "lora_gate_up[0]": {"lora_gate_up[1]"},
    "lora_down[0]": {"lora_down[1]"},
    "routing.counts": {"routing.prob_sums"},
}
FIRST = ("log_probs", "logits", "student_logits", "hidden", "x", "router_logits", "hidden_states", "experts", "like")


def names_of(case, leaf):
    """What an error about a leaf may begin with."""
    names = {leaf, root(leaf), leaf.rpartition(".")[2]}
    return names.union(*(ALIASES.get(name, ()) for name in names))


def names_of_all(case):
    return set().union(*(names_of(case, leaf) for leaf in case.values() if leaf != "loss_fn"))


def check_error(case, device, leaf, value, names, what):
    try:
        case.call(case.values(device, **{leaf: value}))
    except (TypeError, ValueError) as error:
        message = str(error)
        name = message.partition(":")[0]
        assert name in names, f"{leaf}, {what}: names {name[:80]!r} in {message[:200]!r}"
        assert len(message) < 500, f"{leaf}, {what}: {len(message)} characters, {message[:200]}"
        assert "\n" not in message, f"{leaf}, {what}: several lines, {message[:200]!r}"
        about = (case.function, *case.arguments)
        has_logits = {"hidden", "weight"} <= {*about} or "moe.route_block" in about or any("logits" in n for n in about)
        assert has_logits or "logits" not in message, f"{leaf}, {what}: {message[:200]!r}"
    except Exception as error:
        pytest.fail(f"{leaf}, {what}: {type(error).__name__}: {str(error)[:200]}")
    else:
        pytest.fail(f"{leaf}, {what}: no error")


def every_error(checks):
    """Run all and report all, since one that is missing says nothing of the next."""
    failed = []
    for check in checks:
        try:
            check_error(*check)
        except BaseException as error:
            if not isinstance(error, (AssertionError, pytest.fail.Exception)):
                raise
            failed.append(str(error).split("\nassert")[0])
    if failed:
        pytest.fail("\n" + "\n".join(failed), pytrace=False)


def optional(case, leaf):
    if leaf != root(leaf):
        return leaf.endswith(".bias")
    return parameters(case.function)[leaf].default is None or (case.function, leaf) == ("linear_loss", "index")


@every_case
def test_numbers_that_are_refused(device, case):
    checks = []
    for leaf in case.leaves((Number, Integer)):
        number = case.arguments[leaf]
        wrong = [("a bool", True), ("a string", "1"), ("NaN", NAN), ("many numbers", LONG), ("two", torch.ones(2))]
        wrong += [("one that requires a gradient", torch.tensor(0.5, requires_grad=True))]
        wrong += [("an infinite tensor", torch.tensor(float("inf")))] if number.bad and number.bad != (HUGE,) else []
        wrong += [("a fraction", 1.5)] if isinstance(number, Integer) else []
        wrong += [] if optional(case, leaf) else [("None", None)]
        wrong += [(repr(b)[:20], b) for b in number.bad]
        if leaf == "class_weights":
            wrong = [w for w in wrong if w[0] != "two"] + [("two", torch.ones(2))]
        checks += [(case, device, leaf, value, names_of(case, leaf), what) for what, value in wrong]
    every_error(checks)


CHOICES = ("reduction", "direction", "score", "group_score", "activation")


@every_case
def test_choices_that_are_refused(device, case):
    checks = []
    for leaf in [n for n in case.arguments if n in (*CHOICES, "metrics")]:
        wrong = {"another": "unknown", "a number": 3, "many numbers": LONG, "a long name": "x" * 100_000}
        if leaf == "metrics":
            wrong |= {"another in a list": ["unknown"]}
        else:
            wrong |= {"None": None, "a list": [case.arguments[leaf]]}
        checks += [(case, device, leaf, value, {leaf}, what) for what, value in wrong.items()]
    every_error(checks)


@every_case
def test_bools_that_are_refused(device, case):
    wrong = {"a string": "no", "two": 2, "None": None, "a tensor": torch.ones(2), "an array": numpy.ones(2)}
    every_error([(case, device, leaf, value, {leaf}, what) for leaf in case.leaves(bool)
                 for what, value in wrong.items()])  # fmt: skip


def test_bools_of_what_has_no_case():
    model, weight = torch.nn.Linear(2, 2), torch.randn(2, 4, 64)
    calls = {
        "strict": lambda v: onepass.patch(strict=v), "metrics": lambda v: onepass.attach(model, metrics=v),
        "nested": lambda v: onepass.moe.quantize(weight, "nf4", nested=v),
    }  # fmt: skip
    for name, call in calls.items():
        for value in ("no", torch.ones(2)):
            with pytest.raises(TypeError, match=f"{name}: expected a bool"):
                call(value)


# Shapes that no other argument contradicts.
FITTING = {
    ("LinearLogits", "hidden", "one row fewer"),
    ("LinearLogits", "hidden", "one dimension more"),
    ("linear_cross_entropy", "weight", "one row fewer"),
    ("linear_topk_kl_div", "weight", "one row fewer"),
    *((function, "class_weights", "no dimension")
      for function in ("softmax_statistics", "linear_softmax_statistics", "linear_loss")),
    ("moe.router_z_loss", "routing.counts", "one row fewer"),
    ("moe.group_by_expert", "experts", "one row fewer"),
    *(("moe.group_by_expert", "like", what) for what in ("no dimension", "one dimension more", "one row fewer")),
}  # fmt: skip
# Of these only some of what is in them is read.
UNREAD = {
    "moe.load_balancing_loss": {"routing.experts", "routing.logsumexp"},
    "moe.router_z_loss": {"routing.experts", "routing.prob_sums"},
}
# All in the dtype of the hidden states.
ONE_DTYPE = {"weight", "bias", "gate_up_weight", "down_weight", "gate_up_bias", "down_bias", "lora_gate_up[0]",
             "lora_gate_up[1]", "lora_down[0]", "lora_down[1]"}  # fmt: skip

ANY_INTEGERS = ("moe.route", "moe.route_block")


def wrong_dtypes(case, leaf, tensor):
    if tensor.dtype == torch.bool or "mask" in leaf:
        return (torch.complex64,)
    if leaf == "routing.counts":
        return (torch.complex64,)
    if root(leaf) == "row_inputs":
        return ()  # what the function takes
    if not tensor.is_floating_point():
        of_any_size = case.function in ANY_INTEGERS and leaf == "experts"
        return (torch.float32, torch.bool) if of_any_size else (torch.float32, torch.bool, torch.int16)
    found = (torch.int64, torch.bool, torch.complex64)
    in_head = "hidden" in case.arguments or "x" in case.arguments
    return (*found, torch.float64, torch.float16) if leaf in ONE_DTYPE and in_head else found


@every_case
def test_tensors_that_are_refused(device, path, case):
    checks = []
    for leaf, tensor in case.values(device).items():
        unread = leaf in UNREAD.get(case.function, ()) or root(leaf) == "block" or leaf.startswith("groups.tile")
        if not isinstance(tensor, Tensor) or unread:
            continue
        names, tensor = names_of(case, leaf), tensor.detach()
        either = names_of_all(case) if leaf.rpartition(".")[2] in FIRST else names
        wrong = {} if optional(case, leaf) or leaf == "num_items" else {"None": None}
        wrong |= {"many numbers": LONG, "a string": "one", "tensors": [tensor, {"x": tensor}]}
        if case.is_module and leaf in signature(resolve(case.function)).parameters:
            wrong = {}  # which torch refuses to register
        if tensor.dim():
            wrong |= {str(dtype): tensor.to(dtype) for dtype in wrong_dtypes(case, leaf, tensor)}
        else:
            wrong |= {"complex": tensor.to(torch.complex64), "two": torch.ones(2, device=device)}
        checks += [(case, device, leaf, value, names, what) for what, value in wrong.items()]
        if not tensor.dim():
            continue
        shapes = {"no dimension": tensor.new_zeros(()), "one dimension more": tensor.unsqueeze(0),
                  "one row fewer": tensor[:-1], "on another device": tensor.to("meta")}  # fmt: skip
        if case.function == "moe.GLUMLP" and leaf == "hidden":
            shapes.pop("on another device")  # where the module is moved to
        checks += [
            (case, device, leaf, value, either, what)
            for what, value in shapes.items()
            if (case.function, leaf, what) not in FITTING
        ]
    every_error(checks)
