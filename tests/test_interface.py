"""Public functions are alike: one name, kind and default for one thing, which a type checker sees."""

import inspect
import json
import os
import subprocess
import sys
import typing
import warnings
from pathlib import Path

import pytest
import torch

import onepass
from border_call import parameters, public_names, resolve
from border_cases import EXEMPT

EMPTY, KEYWORD = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
LOSSES = (
    "cross_entropy", "topk_kl_div", "distillation_loss", "kl_div", "linear_cross_entropy", "linear_topk_kl_div",
    "linear_kl_div", "linear_loss",
)  # fmt: skip
STATISTICS = (
    "softmax_statistics", "selective_log_softmax", "entropy_from_logits", "selective_log_softmax_and_entropy",
    "linear_softmax_statistics", "linear_selective_log_softmax_and_entropy",
)  # fmt: skip
# The order in which functions take what they take of this; no other option may be called anything else.
ORDER = (
    "self", "router_logits", "block", "hidden_states", "student_logits", "logits", "hidden", "weight", "target",
    "index", "loss_fn", "row_inputs", "teacher_logits", "teacher_ids", "teacher_log_probs", "bias", "lora",
    "class_weights", "ignore_index", "row_mask", "groups", "teacher_mask", "metrics", "expected_logit", "alpha",
    "direction", "beta", "renormalize", "label_smoothing", "z_loss_weight", "support", "vocab_size", "reduction",
    "num_items", "mean_group", "temperature", "softcap", "logit_scale", "teacher_temperature", "teacher_softcap",
    "teacher_logit_scale", "inplace_backward", "gradient_in_forward", "logits_dtype", "max_memory", "vocab_group",
    "sequence_parallel",
)  # fmt: skip
MODULES = ("CrossEntropyLoss", "LinearCrossEntropyLoss", "KLDivLoss", "TopKKLDivLoss")


def signature(name):
    return inspect.signature(resolve(name), eval_str=True).parameters


OF_LOGITS = {**{n: signature(n) for n in (*LOSSES, *STATISTICS)},
             **{n: signature(n) for n in MODULES},
             **{f"{n}.forward": inspect.signature(resolve(n).forward, eval_str=True).parameters
                for n in MODULES}}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in public_names() if inspect.isfunction(resolve(n)) or n in MODULES])
def test_nothing_hides_behind_other_options(name):
    for parameter in signature(name).values():
        assert parameter.kind is not parameter.VAR_KEYWORD, parameter
        assert parameter.annotation is not EMPTY and parameter.annotation is not typing.Any, parameter


@pytest.mark.parametrize("name", OF_LOGITS)
def test_options_have_one_name_and_one_order(name):
    names = [n for n in OF_LOGITS[name]]
    assert set(names) <= set(ORDER), f"{set(names) - set(ORDER)}: call it as its siblings do, or add it to ORDER"
    assert names == sorted(names, key=ORDER.index)


@pytest.mark.parametrize("option", ORDER)
def test_an_option_has_one_kind_default_and_type(option):
    """Of all functions of logits. What comes from a tensor that a function cannot do without has no default."""
    found = {n: p[option] for n, p in OF_LOGITS.items() if option in p}
    required = [n for n, p in found.items() if p.default is EMPTY and p.kind is not p.VAR_POSITIONAL]
    optional = {n: p for n, p in found.items() if p.default is not EMPTY}
    assert len({repr(p.default) for p in optional.values()}) <= 1, {n: p.default for n, p in optional.items()}
    if option not in ("index",):  # which statistics can do without
        assert not (required and optional), (required, list(optional))
    if optional and option != "index":
        assert {p.kind for p in optional.values()} == {KEYWORD}, {n: p.kind for n, p in optional.items()}
    kinds = {p.annotation for p in found.values()} - {inspect.Parameter.empty}
    assert len(kinds) <= (2 if option in ("index", "class_weights", "teacher_logits") else 1), kinds


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_a_mean_and_the_same_transform(name):
    options = OF_LOGITS[name]
    assert options["reduction"].default == "mean"
    assert options["num_items"].default is options["mean_group"].default is None
    assert {"temperature", "softcap", "logit_scale", "row_mask"} <= options.keys()


def test_every_reduction_may_be_a_mean_over_a_group():
    taken = [set(parameters(n)) for n in public_names() if n not in EXEMPT]
    assert [p for p in taken if len({"reduction", "num_items", "mean_group"} & p) in (1, 2)] == []
    assert sum("mean_group" in p for p in taken) == len(LOSSES) + len(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_takes_what_its_function_takes(name):
    function = {"CrossEntropyLoss": "cross_entropy", "LinearCrossEntropyLoss": "linear_cross_entropy",
                "KLDivLoss": "kl_div", "TopKKLDivLoss": "topk_kl_div"}[name]  # fmt: skip
    both = set(OF_LOGITS[name]) | set(OF_LOGITS[f"{name}.forward"]) - {"self"}
    assert both - {"self"} == set(OF_LOGITS[function])


LOGITS, TARGET = torch.randn(4, 9), torch.tensor([1, 2, -100, 3])
IDS, LOG_PROBS = torch.tensor([[1, 2]] * 4), torch.full((4, 2), -1.0)
MASK, ID_MASK = torch.tensor([1, 0, 1, 1]), torch.tensor([[1, 0]] * 4)
H, W = torch.randn(4, 3), torch.randn(9, 3)
OLD_CALLS = {
    "cross_entropy(weight)": (
        lambda: onepass.cross_entropy(LOGITS, TARGET, weight=torch.ones(9)),
        lambda: onepass.cross_entropy(LOGITS, TARGET, class_weights=torch.ones(9)),
    ),
    "cross_entropy by position": (
        lambda: onepass.cross_entropy(LOGITS, TARGET.abs() % 9, None, 2, "sum", 0.1),
        lambda: onepass.cross_entropy(LOGITS, TARGET.abs() % 9, ignore_index=2, reduction="sum", label_smoothing=0.1),
    ),
    "kl_div(mask)": (
        lambda: onepass.kl_div(LOGITS, LOGITS.flip(-1), MASK),
        lambda: onepass.kl_div(LOGITS, LOGITS.flip(-1), row_mask=MASK),
    ),
    "topk_kl_div(mask of rows)": (
        lambda: onepass.topk_kl_div(LOGITS, IDS, LOG_PROBS, mask=MASK),
        lambda: onepass.topk_kl_div(LOGITS, IDS, LOG_PROBS, row_mask=MASK),
    ),
    "topk_kl_div(mask of tokens)": (
        lambda: onepass.topk_kl_div(LOGITS, IDS, LOG_PROBS, ID_MASK),
        lambda: onepass.topk_kl_div(LOGITS, IDS, LOG_PROBS, teacher_mask=ID_MASK),
    ),
    "distillation_loss(labels)": (
        lambda: onepass.distillation_loss(LOGITS, labels=TARGET, teacher_ids=IDS, teacher_log_probs=LOG_PROBS),
        lambda: onepass.distillation_loss(LOGITS, TARGET, IDS, LOG_PROBS),
    ),
    "distillation_loss(mask of rows)": (
        lambda: onepass.distillation_loss(LOGITS, TARGET, IDS, LOG_PROBS, MASK),
        lambda: onepass.distillation_loss(LOGITS, TARGET, IDS, LOG_PROBS, teacher_mask=MASK[:, None].expand(4, 2)),
    ),
    "linear_kl_div(teacher)": (
        lambda: onepass.linear_kl_div(H, W, teacher=LOGITS, mask=MASK),
        lambda: onepass.linear_kl_div(H, W, LOGITS, row_mask=MASK),
    ),
    "linear_topk_kl_div(mask)": (
        lambda: onepass.linear_topk_kl_div(H, W, IDS, LOG_PROBS, ID_MASK),
        lambda: onepass.linear_topk_kl_div(H, W, IDS, LOG_PROBS, teacher_mask=ID_MASK),
    ),
    "CrossEntropyLoss(weight)": (
        lambda: onepass.CrossEntropyLoss(torch.ones(9), 2)(LOGITS, TARGET.abs() % 9),
        lambda: onepass.CrossEntropyLoss(class_weights=torch.ones(9), ignore_index=2)(LOGITS, TARGET.abs() % 9),
    ),
    "KLDivLoss(mask)": (
        lambda: onepass.KLDivLoss()(LOGITS, LOGITS.flip(-1), MASK),
        lambda: onepass.KLDivLoss()(LOGITS, LOGITS.flip(-1), row_mask=MASK),
    ),
    "LinearCrossEntropyLoss(bias)": (
        lambda: onepass.LinearCrossEntropyLoss()(H, W, TARGET, torch.ones(9)),
        lambda: onepass.LinearCrossEntropyLoss()(H, W, TARGET, bias=torch.ones(9)),
    ),
    "sigmoid_topk(selection_bias)": (
        lambda: onepass.moe.sigmoid_topk(LOGITS, 2, torch.ones(9)).weights,
        lambda: onepass.moe.sigmoid_topk(LOGITS, 2, selection_bias=torch.ones(9)).weights,
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", OLD_CALLS)
def test_old_names_work_with_a_warning(call):
    old, new = OLD_CALLS[call]
    with pytest.warns(DeprecationWarning, match="onepass: .*: pass ") as warned:
        got = old()
    told = [w for w in warned if w.category is DeprecationWarning]
    assert [w.filename for w in told] == [__file__] * len(told) and len(told) <= 2, "which points at the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        assert torch.equal(got, new())


def test_an_old_name_beside_the_new_one_is_an_error():
    with pytest.raises(TypeError, match="got class_weights twice"):
        onepass.cross_entropy(LOGITS, TARGET, weight=torch.ones(9), class_weights=torch.ones(9))
    with pytest.raises(TypeError, match="positional arguments"):
        onepass.cross_entropy(LOGITS, TARGET, None, 2, "sum", 0.1, 0.2)
    with pytest.raises(TypeError, match=r"positional arguments|multiple values"):
        onepass.cross_entropy(LOGITS, TARGET, None, 2, ignore_index=3)
    with pytest.raises(TypeError, match="unexpected keyword"):
        onepass.kl_div(LOGITS, LOGITS, masks=MASK)


def test_a_state_with_the_old_name_is_loaded():
    module = onepass.CrossEntropyLoss(class_weights=torch.ones(9))
    module.load_state_dict({"weight": torch.full((9,), 2.0)})
    assert (module.class_weights == 2).all() and list(module.state_dict()) == ["class_weights"]

    class WithOwnWeight(onepass.CrossEntropyLoss):
        def __init__(self):
            super().__init__(class_weights=torch.ones(9))
            self.weight = torch.nn.Parameter(torch.zeros(2))

    WithOwnWeight().load_state_dict(WithOwnWeight().state_dict())


def test_a_weight_in_a_state_that_is_not_the_old_name():
    module = onepass.CrossEntropyLoss(class_weights=torch.ones(9))
    state = {"weight": torch.full((9,), 2.0), "class_weights": torch.full((9,), 3.0)}
    assert module.load_state_dict(state, strict=False).unexpected_keys == ["weight"]
    assert (module.class_weights == 3).all()

    class WithOwnWeight(onepass.CrossEntropyLoss):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(9))

    module = WithOwnWeight()
    module.load_state_dict({"weight": torch.full((9,), 2.0)})
    assert (module.weight == 2).all() and module.class_weights is None


USER = """
import torch
import onepass

x, t = torch.randn(3, 10), torch.tensor([1, 2, 3])
loss: torch.Tensor = onepass.cross_entropy(x, t, reduction="mean", num_items=3)
onepass.cross_entropy(x, t, reduction="avg")  # wrong
onepass.cross_entropy(x, t, label_smooting=0.1)  # wrong
onepass.kl_div(x, x, direction="backward")  # wrong
onepass.linear_kl_div(x, x, x, tempo=2.0)  # wrong
onepass.softmax_statistics(x, t, metrics=["top1"])  # wrong
onepass.moe.route(x, 2, score="softmx")  # wrong
onepass.moe.softmax_topk(x, 2, renormalise=False)  # wrong
onepass.moe.route(x, 2).weights.sum()
onepass.CrossEntropyLoss(reduction="sum")(x, t).backward()
module = onepass.CrossEntropyLoss()
smoothing: float = module.label_smoothing
module.temperature = 2.0
beta: float = onepass.KLDivLoss().beta * 2
"""
WRONG = [n for n, line in enumerate(USER.splitlines(), 1) if line.endswith("# wrong")]


def test_a_type_checker_sees_a_misspelt_option(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "user.py"
    file.write_text(USER)
    (tmp_path / "mypy.ini").write_text(  # without the types of torch and of other libraries, which take long to read
        "[mypy]\nstrict = True\nfollow_imports = skip\n[mypy-onepass,onepass.*]\nfollow_imports = silent\n"
    )
    command = [sys.executable, "-m", "mypy", file.name]
    environment = os.environ | {"MYPYPATH": str(Path(onepass.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    found = {int(line.split(":")[1]) for line in done.stdout.splitlines() if line.startswith("user.py:")}
    assert sorted(found) == WRONG, done.stdout


@pytest.mark.exhaustive
def test_pyright_sees_the_same(tmp_path):
    """And that every type which a user's file gets from onepass is known, in its strict mode."""
    pytest.importorskip("basedpyright")  # pyright in a wheel, which installs without a download of its own
    (tmp_path / "user.py").write_text(USER)
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(Path(onepass.__file__).parents[1])]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    found = {d["range"]["start"]["line"] + 1 for d in json.loads(done.stdout)["generalDiagnostics"]}
    assert sorted(found) == WRONG, done.stdout


@pytest.mark.parametrize("name", MODULES)
def test_a_number_in_a_tensor_is_not_moved(name):
    """Like a float; a temperature of each row goes with the module."""
    for shape in ((), (3,)):
        module = getattr(onepass, name)(temperature=torch.full(shape, 2.0))
        moved = module.half().temperature.dtype, module.to("meta").temperature.device.type
        assert moved == ((torch.float16, "meta") if shape else (torch.float32, "cpu"))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_keeps_and_shows_every_option(name):
    module = getattr(onepass, name)
    defaults = {p.name: p.default for p in inspect.signature(module).parameters.values()}
    assert repr(module()) == f"{name}()"
    for option in defaults:
        value = torch.ones(3) if option in ("class_weights", "temperature") else object()
        made = module(**{option: value})
        assert made.options() == defaults | {option: value}
        assert f"{option}=" in repr(made)

    class Own(module):  # as one that an earlier version has pickled: no constructor of onepass has run
        def __init__(self, **options):
            torch.nn.Module.__init__(self)
            vars(self).update(options)

    assert Own(**defaults).options() == defaults and repr(Own(**defaults)) == "Own()"
    assert repr(Own(**defaults | {"logit_scale": 2.0})) == "Own(logit_scale=2.0)"
