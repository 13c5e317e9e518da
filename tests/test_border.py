"""What every public function does with its arguments, whatever they are: generated from the signatures.

`border_cases` has a valid call of every function with every parameter; the first tests fail where one is missing. Each
tensor is then laid out in memory in every way, and written to between forward and backward; each number is given in
every type. What is refused is in test_border_errors.py; what a function makes of valid arguments is tested elsewhere.
"""

import math

import pytest
import torch
from torch import Tensor

import onepass
from border_call import Integer, Number, flattened, forms, integer_forms, parameters, public_names, root
from border_cases import CASES, EXEMPT, ROUTER, TEACHER, every_case, of_functions
from layouts import EXPANSIONS, LAYOUTS, Laid, tensors_of
from onepass.core.checks import INF, check_number, check_transform
from onepass.moe import route

pytestmark = pytest.mark.usefixtures("path")
every_function = pytest.mark.parametrize("case", of_functions(), ids=str)


# The table


def test_every_public_function_has_a_case():
    assert {c.function for c in CASES} | set(EXEMPT) == set(public_names())
    assert not {c.function for c in CASES} & set(EXEMPT)


# To which test_vocab_parallel.py and test_mean_group.py give values.
OF_PROCESSES = {"vocab_group", "sequence_parallel", "mean_group"}


@pytest.mark.parametrize("name", sorted({c.function for c in CASES}))
def test_every_parameter_has_a_value(name):
    """And not only None, which is a value that says nothing."""
    given = {root(leaf) for case in CASES if case.function == name for leaf, v in case.arguments.items()
             if v is not None}  # fmt: skip
    given |= OF_PROCESSES & set(parameters(name))
    assert given == set(parameters(name)), "give each parameter of the signature a value in border_cases.CASES"


@every_case
def test_every_number_of_a_case_says_what_it_may_be(case):
    """A plain int or float in a case would be tested in no other type; only sizes of modules are such."""
    sizes = {"num_experts", "input_size", "output_size", "hidden_size"} if case.is_module else set()
    plain = {n for n, v in case.arguments.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
    assert plain <= sizes


# Layouts

_expected: dict[tuple[str, str], dict[str, Tensor]] = {}


def expected_of(case, device, path):
    """What the case gives as it stands in the table; computed once on each path."""
    if (str(case), path) not in _expected:
        _expected[str(case), path] = case.results(case.values(device))
    return _expected[str(case), path]


def differing(case, device, layouts, expected=None):
    """The results and gradients that the layouts of leaves change, and the leaves whose memory was written to.

    ``expected`` are the results of contiguous tensors; without, the layouts change values, and these are computed.
    """
    values = case.values(device)
    laid = {n: Laid(values[n].detach(), of, harmless=root(n) == "groups") for n, of in layouts.items()}
    if expected is None:
        plain = {n: each.plain.requires_grad_(n in case.grad) for n, each in laid.items()}
        expected = case.results(case.values(device, **plain))
    views = {n: each.view.requires_grad_(n in case.grad) for n, each in laid.items()}
    got = case.results(case.values(device, **views))
    written = [n for n, each in laid.items() if not each.is_untouched(inside=not writes(case, n))]
    return [f"the memory of {n}" for n in written] + [
        n for n in expected if n not in got or not close(got[n], expected[n])
    ]


def writes(case, leaf):
    return leaf in case.refused and case.arguments.get("inplace_backward", False)


TOLERANCE = {"cpu": 1e-6, "cuda": 5e-6}  # whose products of float32 are three of tf32


def close(got, expected):
    """Bitwise, or within what another order of the same sums makes."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if not got.is_floating_point():
        return torch.equal(got, expected)
    bound = (
        TOLERANCE[got.device.type] * max(expected.abs().nan_to_num(0, 0, 0).max().item(), 1.0)
        if expected.numel()
        else 0.0
    )
    return bool(((got == expected) | (got.isnan() & expected.isnan()) | ((got - expected).abs() <= bound)).all())


def wrong_layouts(case, device, layouts, expected=None):
    """All at once, which is few calls; where something differs, one after the other says which tensor it was."""
    layouts = {n: of for n, of in layouts.items() if not (n in case.refused and of in NOT_CONTIGUOUS)}
    together = outcome(case, device, layouts, expected)
    if not together:
        return []
    alone = {f"{n}, {of}": outcome(case, device, {n: of}, expected) for n, of in layouts.items()}
    wrong = {name: what for name, what in alone.items() if what} or {f"only together: {layouts}": together}
    return [f"{name}: {what}" for name, what in wrong.items()]


def outcome(*arguments):
    try:
        return differing(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


STRIDED = ("every second", "transposed")
NOT_CONTIGUOUS = (*STRIDED, *EXPANSIONS)


def turns(names, path):
    """In as many turns as there are layouts each tensor has had each of them. In the interpreter, which is slow, each
    has those of another stride, and one of the others."""
    if path != "interpreter":
        for turn in range(len(LAYOUTS)):
            yield {n: LAYOUTS[(turn + place) % len(LAYOUTS)] for place, n in enumerate(names)}
        return
    others = [layout for layout in LAYOUTS if layout not in STRIDED]
    for turn in range(2):
        yield {n: STRIDED[(turn + place) % 2] for place, n in enumerate(names)}
    yield {n: others[place % len(others)] for place, n in enumerate(names)}


@every_function
def test_layouts(device, path, case):
    expected, names = expected_of(case, device, path), list(tensors_of(case.values(device)))
    wrong = [w for layouts in turns(names, path) for w in wrong_layouts(case, device, layouts, expected)]
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


@every_function
def test_expanded_tensors(device, path, case):
    """Of tensors that are constant along a dimension, beside their copies. In the interpreter along one of two."""
    names, wrong = [n for n in tensors_of(case.values(device)) if n not in case.fixed], []
    for turn in [next(n for n, c in enumerate(CASES) if c is case) % 2] if path == "interpreter" else range(2):
        wrong += wrong_layouts(case, device, {n: EXPANSIONS[(turn + place) % 2] for place, n in enumerate(names)})
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


@pytest.mark.parametrize("case", [c for c in CASES if c.refused], ids=str)
@pytest.mark.parametrize("layout", NOT_CONTIGUOUS)
def test_layouts_that_are_refused(device, case, layout):
    for leaf, name in case.refused.items():
        laid = Laid(case.values(device)[leaf].detach(), layout)
        with pytest.raises(ValueError, match=f"^{name}: "):
            case.call(case.values(device, **{leaf: laid.view.requires_grad_()}))
        assert laid.is_untouched()


# Numbers


def same(got, expected):
    return list(got) == list(expected) and all(
        torch.equal(got[n].nan_to_num(), expected[n].nan_to_num()) and got[n].dtype == expected[n].dtype for n in got
    )


@every_case
def test_numbers_in_every_type(device, path, case):
    """An int first and then a fraction, and the other way round: what is kept of a call must not make the next one."""
    if path == "interpreter":
        pytest.skip("takes fewer calls, of all numbers at once")
    plain = expected_of(case, device, path)
    for leaf in case.leaves(Number):
        number = case.arguments[leaf]
        expected = {number.value: plain}
        for turn, value in enumerate((number.whole, number.value, number.whole)):
            for kind, given in reversed(forms(value).items()):
                if turn == 2 and kind not in ("int", "float"):  # again, after the fraction
                    continue
                got = case.results(case.values(device, **{leaf: given}))
                assert same(got, expected.setdefault(value, got)), f"{leaf} = {value} as {kind}"
    for leaf in case.leaves(Integer):
        for kind, given in integer_forms(case.arguments[leaf].value).items():
            assert same(case.results(case.values(device, **{leaf: given})), plain), f"{leaf} as {kind}"


@pytest.fixture
def types_of_numbers(monkeypatch):
    """Of each call of an interpreted kernel, the types of its numbers: a compiled one is compiled for those."""
    from triton.runtime.interpreter import InterpretedFunction

    seen = {}
    original = InterpretedFunction.run

    def run(self, *args, **options):
        types = tuple(type(a).__name__ for a in args if not isinstance(a, Tensor) and a is not None)
        seen.setdefault((self.__name__, len(types)), set()).add(types)
        return original(self, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return seen


@pytest.mark.parametrize("case", [c for c in of_functions() if c.leaves((Number, Integer))], ids=str)
def test_numbers_reach_kernels_in_one_type(device, path, case, types_of_numbers):
    """A kernel that was compiled for an int is launched again with what comes: a float would be read as an int."""
    if path != "interpreter":
        pytest.skip("looks at what is interpreted")
    case.results(case.values(device, **{n: case.arguments[n].whole for n in case.leaves(Number)}))
    turned = {}
    for place, leaf in enumerate(case.leaves((Number, Integer))):
        of = case.arguments[leaf]
        given = list((forms if isinstance(of, Number) else integer_forms)(of.value).values())
        turned[leaf] = given[place % len(given)]
    assert same(case.results(case.values(device, **turned)), expected_of(case, device, path))
    several = {kernel: types for kernel, types in types_of_numbers.items() if len(types) > 1}
    assert not several


MASK_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.int8,
    torch.int64,
    torch.float16,
    torch.float64,
)


def masks_of(case):
    return [name for name, value in case.arguments.items() if name.endswith("_mask") and isinstance(value, Tensor)]


@pytest.mark.parametrize("case", [c for c in of_functions() if masks_of(c)], ids=str)
def test_masks_in_every_dtype(device, path, case):
    plain = expected_of(case, device, path)
    for dtype in MASK_DTYPES if path != "interpreter" else (torch.uint16,):
        masks = {name: case.arguments[name].to(device, dtype) for name in masks_of(case)}
        assert same(case.results(case.values(device, **masks)), plain), dtype


AFTER = {
    "scale": (lambda x, v: route(x, 2, scale=v).weights, 1, 2.5),
    "eps": (lambda x, v: route(x, 2, score="sigmoid", eps=v).weights, 0, 1e-20),
    "router softcap": (lambda x, v: route(x, 2, softcap=v).weights, 30, 5.5),
    "softcap": (lambda x, v: onepass.entropy_from_logits(x, softcap=v), 30, 5.5),
    "temperature": (lambda x, v: onepass.entropy_from_logits(x, temperature=v), 1, 0.7),
    "logit_scale": (lambda x, v: onepass.entropy_from_logits(x, logit_scale=v), 1, 0.7),
    "beta": (lambda x, v: onepass.kl_div(x, TEACHER[:, : x.shape[-1]].to(x), direction="jsd", beta=v), 0, 0.3),
    "class_weights": (lambda x, v: onepass.softmax_statistics(x, class_weights=v).weighted_logit, 1, 0.25),
}


@pytest.mark.parametrize("name", AFTER)
@pytest.mark.parametrize("turned", [False, True], ids=["an int first", "a fraction first"])
def test_a_number_after_another(device, name, turned):
    function, *values = AFTER[name]
    exact = ROUTER.double()
    for value in values[::-1] if turned else values:
        got, expected = (function(x, value) for x in (ROUTER.to(device), exact))
        torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-6)


# Writes between forward and backward

# A write need not be an error where the gradient was taken in the forward pass: by a linear head, of a sum or mean.
GRADIENT_IS_TAKEN = {
    "cross_entropy, a head", "linear_cross_entropy", "linear_cross_entropy, at once", "linear_topk_kl_div",
    "linear_kl_div", "linear_loss", "linear_loss, of groups",
}  # fmt: skip
# Nor where a copy was taken of what is small, or where a tensor only selects or is not in the gradient.
MAY_BE_WRITTEN = {
    "cross_entropy": {"row_mask"},
    "cross_entropy, of a batch": {"row_mask"},
    "topk_kl_div": {"teacher_ids", "teacher_log_probs", "teacher_mask", "row_mask"},
    "topk_kl_div, renormalized": {"student_logits", "teacher_ids", "teacher_log_probs"},
    "topk_kl_div, items in a tensor": {"teacher_ids", "teacher_log_probs", "num_items"},
    "distillation_loss": {"target", "teacher_ids", "teacher_log_probs", "teacher_mask", "row_mask"},
    "distillation_loss, a head": {"target", "teacher_ids", "teacher_log_probs"},
    "LinearLogits": {"lora[0]"},
    "linear_softmax_statistics": {"lora[0]"},
    "linear_selective_log_softmax_and_entropy": {"lora[0]"},
    "linear_cross_entropy, of rows": {"class_weights"},
    "linear_topk_kl_div, of rows": {"teacher_ids", "teacher_log_probs"},
    "linear_kl_div, a head teaches, of rows": {"row_mask"},
    "linear_loss, of rows": {"row_mask", "row_inputs[0]", "row_inputs[1]"},
    "moe.route": {"selection_bias"},
    "moe.route, replayed": {"selection_bias"},
    "moe.sigmoid_topk": {"selection_bias"},
    "moe.load_balancing_loss": {"routing.experts", "routing.counts", "routing.prob_sums", "routing.logsumexp"},
    "moe.router_z_loss": {"routing.experts", "routing.counts", "routing.prob_sums"},
}


def write(tensor):
    with torch.no_grad():
        if tensor.dtype == torch.bool:
            tensor.logical_not_()
        elif tensor.is_floating_point():
            tensor.add_(1)
        else:
            tensor.zero_()


@pytest.mark.parametrize("case", [c for c in of_functions() if c.grad], ids=str)
def test_a_write_before_the_backward(device, path, case):
    """It is an error, or the gradient is that of the forward pass."""
    expected, known = (
        expected_of(case, device, path),
        str(case).removesuffix(", rows apart").removesuffix(", a support"),
    )
    wrong = []
    for leaf in [n for n, value in case.values(device).items() if isinstance(value, Tensor) and value.numel()]:
        values = case.values(device)
        outputs = flattened(case.call(values))
        write(values[leaf])
        try:
            got = case.gradients(outputs, values)
        except RuntimeError:
            continue
        if not same(got, {n: expected[n] for n in got}):
            wrong.append(f"{leaf}: another gradient")
        elif known not in GRADIENT_IS_TAKEN and leaf not in MAY_BE_WRITTEN.get(known, ()):
            wrong.append(f"{leaf}: no error")
    if wrong:
        pytest.fail("; ".join(wrong), pytrace=False)


@pytest.mark.parametrize("case", [c for c in of_functions() if c.grad], ids=str)
def test_second_derivatives_and_batched_gradients(device, path, case):
    """Both raise an error of onepass, or the gradients are right."""
    values = case.values(device)
    output = next(t for t in flattened(case.call(values)).values() if t.requires_grad)
    leaves = [values[n] for n in case.grad]
    for how, shape in (("create_graph", output.shape), ("is_grads_batched", (2, *output.shape))):
        upstream = torch.ones(shape, dtype=output.dtype, device=device)
        batched = how == "is_grads_batched"
        try:
            got = torch.autograd.grad(output, leaves, upstream, allow_unused=True, retain_graph=True, **{how: True})
        except (RuntimeError, NotImplementedError) as error:
            assert str(error).startswith("onepass: "), error
            continue
        one = upstream[0] if batched else upstream
        expected = torch.autograd.grad(output, leaves, one, allow_unused=True, retain_graph=True)
        for g, e in zip(got, expected):
            assert (g is None) == (e is None)
            for each in () if g is None else g if batched else [g]:
                torch.testing.assert_close(each.detach(), e)


def test_what_may_be_written_is_in_the_table():
    cases = {str(case): case for case in CASES}
    assert set(cases) >= GRADIENT_IS_TAKEN
    for name, leaves in MAY_BE_WRITTEN.items():
        assert leaves <= {n for n, value in cases[name].values().items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("zero", (-0.0, torch.tensor(-0.0)))
def test_minus_zero_is_zero(zero):
    """Options that were checked for 0.0 serve for -0.0 too, which is the same key."""
    for checked in (check_number(zero, "logit_scale", -INF), check_transform(1.7, None, zero)[2]):
        assert math.copysign(1.0, checked) == 1.0
