"""How a router is recognized: it is run on a few numbers, and its results are compared with those of `route`.

Nothing depends on the name of its class. A twin of the router is run: an object of the same class, with tensors of the
same shapes in float32 on the CPU and without hooks, so that the module itself is neither called nor changed.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from onepass.core.dispatch import constant_in_trace
from onepass.core.memo import keep
from onepass.core.moe_options import GROUP_SCORES, MAX_EXPERTS, MAX_K, SCORES
from onepass.moe.family import FULL, Prepared, RouterDescription, full_output, routed_parts, unwrapped
from onepass.moe.probe import (
    OF_LOGITS,
    TOKENS,
    Probe,
    guard_settings,
    method,
    module_of,
    plain,
    settings,
    tensors_of,
)
from onepass.moe.router import Routing

EPS = (0.0, 1e-20, 1e-15, 1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5)
ORDINARY = 120  # the first of the tokens, by which the selection is found
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
DTYPES = (FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16)  # of tokens and weights

Others = list[tuple[Probe, tuple[Tensor, ...] | None]]  # of `_where_groups_matter`, and their results
MOST_KNOWN = 256  # descriptions that are kept
_known: dict[Any, RouterDescription | None] = {}
_last: "WeakKeyDictionary[nn.Module, dict[str, tuple[Any, RouterDescription | None]]]" = WeakKeyDictionary()


def described_method(module: nn.Module, name: str, function: int | None = None) -> RouterDescription | None:
    """The description of a method of a module, by its code and its settings; None if it computes something else.

    With ``function``, the ``id`` of a function, also if the method is another: a subclass may call that of its base.
    """
    if torch.compiler.is_compiling():  # before torch 2.13 a function that is called then takes no module, but numbers
        guard_settings(module)
        return described_object(id(module), name, function)
    return _described(module, name, function)


def described_object(number: int, name: str, function: int | None) -> RouterDescription | None:
    """`_described` of `module_of` the number."""
    return _described(module_of(number), name, function)


@contextmanager
def untraced() -> Iterator[None]:
    """A context that `torch.jit.trace` does not see."""
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


def _described(module: nn.Module, name: str, function: int | None) -> RouterDescription | None:
    """See `described_method`."""
    if function is not None and id(method(type(module), name)) != function:
        return None
    key = settings(module, name)
    last = _last.setdefault(module, {}).get(name)
    if last is not None and last[0] == key:
        return last[1]
    if key not in _known:
        with (
            _disable_current_modes(), torch._C.DisableTorchFunction(), torch.random.fork_rng(devices=[]),
            torch.no_grad(), torch.autocast("cpu", enabled=False), untraced(),
        ):  # fmt: skip
            torch.default_generator.manual_seed(0)  # `torch.manual_seed` would set those of all devices
            keep(_known, key, _recognized(module, name), MOST_KNOWN)
    _last[module][name] = key, _known[key]
    return _known[key]


constant_in_trace(described_object)


def _recognized(module: nn.Module, name: str) -> RouterDescription | None:
    function = method(type(module), name)
    shapes = {n: tuple(t.shape) for n, t in tensors_of(module) if t.is_floating_point()}
    matrices = [n for n, shape in shapes.items() if len(shape) > 1 and 1 not in shape]
    names = tuple(inspect.signature(function).parameters)[1:]
    gate = matrices[0] if name == "forward" and len(matrices) == 1 and len(shapes[matrices[0]]) == 2 else None
    if name == "forward" and (gate is None or shapes[gate][0] > MAX_EXPERTS):
        return None
    E, H = shapes[gate] if gate else (OF_LOGITS, 8)
    values = {n: torch.rand(shape, dtype=FLOAT32) * 2 for n, shape in shapes.items() if n not in matrices}
    if gate:
        values[gate] = torch.randn(E, H, dtype=FLOAT32) * 1.5 / H**0.5
        values[gate][:, 0] = 1.0  # so that the first hidden state is added to all logits
    inputs: tuple[Tensor, ...] = (_tokens(H), torch.rand(E, dtype=FLOAT32) * 2 if gate else _tokens(E, of_logits=True))
    inputs = inputs[: len(names)] if gate else inputs[2 - len(names) :]
    probe = Probe(module, function, name, gate, names, values, inputs)
    for dim in (2, 3):
        results = probe.run(dim)
        if results is not None:
            flat = tuple(r.reshape(TOKENS, -1) for r in results)
            others = [(p, p.run(dim)) for p in _where_groups_matter(probe)]
            for found in _hypotheses(probe, flat, others):
                complete = _completed(probe, found, others)
                if complete is not None:
                    return complete
    return None


def _tokens(n: int, of_logits: bool = False) -> Tensor:
    """Ordinary tokens, then some whose scores are far apart, and some whose scores are next to 0."""
    shift = torch.zeros(TOKENS, 1)
    shift[ORDINARY:] = -torch.linspace(12.0, 46.0, TOKENS - ORDINARY)[:, None]
    x = torch.randn(TOKENS, n, dtype=FLOAT32)
    x[:ORDINARY:2] *= 0.3  # so that the largest score does not decide about a group alone
    x[ORDINARY::2] *= 3
    x[-12:] *= 6
    return 1.5 * x + shift if of_logits else torch.cat([shift, x[:, 1:]], 1)


def _hypotheses(probe: Probe, results: tuple[Tensor, ...], others: Others) -> Iterator[RouterDescription]:
    """Descriptions by which `route` returns these results."""
    E, parts = probe.experts, probe.parts()
    vectors = [n for n, v in probe.values.items() if v.numel() == E and n != probe.gate]
    own = [v for _, v in plain(vars(probe.module)) if type(v) in (int, float)]
    factors = [float(v) for v in own if type(v) is float and v not in (0.0, 1.0)]
    for prepared, gate_bias in product(_prepared(probe, factors), [None, *vectors] if probe.gate else [None]):
        multipliers = [(f, None) for f in factors] if prepared is None else []
        for multiplier, cap in [(1.0, None), *multipliers, *((1.0, f) for f in factors if f > 0)]:
            d = RouterDescription(
                (("k", 1), ("softcap", cap)), probe.name, probe.names, probe.gate, gate_bias, prepared, multiplier
            )
            logits = routed_parts(parts, d, probe.inputs[0] if probe.gate else probe.inputs[-1])
            kinds = {kind: full_output(kind, logits, cap) for kind in FULL}
            read = _read(results, kinds, E)
            if read is not None:
                yield from _selections(probe, others, d, own, vectors, *read)


def _prepared(probe: Probe, factors: list[float]) -> Iterator[Prepared | None]:
    """No preparation, or a child that is no gate with the vectors and numbers of the router as factors."""
    yield None
    if probe.gate:
        H = probe.values[probe.gate].shape[1]
        norms = [n for n, _ in probe.module.named_children() if not probe.gate.startswith(f"{n}.")]
        scales = [None, *(n for n, v in probe.values.items() if v.shape == (H,))]
        yield from (Prepared(*chosen) for chosen in product(norms, scales, [1.0, *factors]))


def _read(
    results: tuple[Tensor, ...], kinds: dict[str, Tensor], E: int
) -> tuple[tuple[str, ...], Tensor, Tensor] | None:
    """What each result is, the experts of each token, and the weights over all experts; None if they are not known."""
    names: list[str] = []
    experts = dense = weights = None
    for r in results:
        kind = next(
            (n for n, t in kinds.items() if r.shape == t.shape and torch.allclose(r.float(), t, 1e-5, 1e-5)), ""
        )
        if kind:
            names.append(kind)
        elif not r.is_floating_point():
            experts = r
            names.append("experts")
        elif r.shape[1] == E and len(chosen := (r[:ORDINARY] != 0).sum(1).unique()) == 1 and chosen[0] < E:
            dense = r
            names.append("dense")
        else:
            weights = r
            names.append("weights")
    if len(set(names)) < len(names):
        return None
    if experts is None and dense is not None:
        experts = _weighted(dense)
    if experts is None or experts.shape[1] > MAX_K or experts.min() < 0 or experts.max() >= E:
        return None
    if dense is None:
        if weights is None or weights.shape != experts.shape:
            return None
        dense = torch.zeros(TOKENS, E).scatter(1, experts.long(), weights.float())
    return tuple(names), experts.long().sort()[0], dense


def _weighted(dense: Tensor) -> Tensor:
    """The experts with a weight, of which each token has as many."""
    return dense.ne(0).int().topk(int((dense[0] != 0).sum()))[1]


def _selections(
    probe: Probe, others: Others, d: RouterDescription, own: list[Any], vectors: list[str], outputs: tuple[str, ...],
    experts: Tensor, dense: Tensor,
) -> Iterator[RouterDescription]:  # fmt: skip
    """The ways to select these experts, and for each the ways to compute these weights."""
    E, K = probe.experts, experts.shape[1]
    given = [probe.names[1]] if probe.gate and len(probe.names) > 1 else []
    sizes = sorted({v for v in own if type(v) is int})
    groups = [(1, 1, "max")] + [
        (n, t, by) for n, t, by in product(sizes, sizes, GROUP_SCORES)
        if 1 <= t < n <= E and E % n == 0 and t * (E // n) >= K and (by == "max" or E // n > 1)
    ]  # fmt: skip
    biases = [(None, None), *((v, None) for v in vectors if v != d.gate_bias), *((None, g) for g in given)]
    ordinary, target = experts[:ORDINARY], dense[:ORDINARY].gather(1, experts[:ORDINARY])
    for score, after, (held, passed), (n, t, by) in product(SCORES, (False, True), biases, groups):
        options = {"k": K, "score": score, "n_group": n, "topk_group": t, "group_score": by, "score_after_topk": after}
        options |= dict(d.arguments) | {"k": K}
        bare = d._replace(arguments=tuple(options.items()), outputs=outputs, selection_bias=held, given_bias=passed)
        ours = _routing(probe, bare, renormalize=False).experts[:ORDINARY].sort()[0]
        if not torch.equal(ours, ordinary) or not all(_selects(bare, *other) for other in others):
            continue
        small = sorted({float(v) for v in own if 0 < v < 1})
        divisors = [(False, 0.0, 0.0), *((True, e, 0.0) for e in (*EPS, *small)), *((False, 0.0, s) for s in small)]
        for renormalize, eps, min_sum in divisors:
            options |= {"renormalize": renormalize, "eps": eps}
            whole = bare._replace(arguments=tuple(options.items()), min_sum=min_sum)
            found = _routing(probe, whole)
            ratio = target / torch.zeros(TOKENS, E).scatter(1, found.experts, found.weights)[:ORDINARY].gather(
                1, ordinary
            )
            for scaled in (None, *vectors):
                per = ratio if scaled is None else ratio / probe.values[scaled].flatten()[ordinary]
                if (per.max() - per.min()) > 2e-5 * per.abs().max() or not per.isfinite().all():
                    continue
                scale = _nearest(float(per.median()), [1.0, 1 / K, *map(float, own)])
                yield whole._replace(arguments=(*options.items(), ("scale", scale)), expert_scale=scaled)


def _nearest(value: float, known: list[float]) -> float:
    """The setting that a measured number is, if there is one."""
    return next((k for k in known if abs(k - value) <= 5e-6 * abs(value)), value)


def _selects(d: RouterDescription, probe: Probe, results: tuple[Tensor, ...] | None) -> bool:
    """Whether a description selects the experts of these results."""
    if results is None:
        return False
    of = {kind: r.reshape(TOKENS, -1) for kind, r in zip(d.outputs, results)}
    theirs = of["experts"].long() if "experts" in of else _weighted(of["dense"])
    return torch.equal(theirs.sort()[0], _routing(probe, d, renormalize=False).experts.sort()[0])


def _routing(probe: Probe, d: RouterDescription, **arguments: Any) -> Routing:
    """What `route` returns for a probe by a description. ``arguments`` are of `route`."""
    if d.given_bias:
        arguments["selection_bias"] = probe.inputs[1]
    hidden = probe.inputs[0] if probe.gate else probe.inputs[-1]
    return routed_parts(probe.parts(), d, hidden, **arguments).routing


def _completed(probe: Probe, d: RouterDescription, others: Others) -> RouterDescription | None:
    """The description with its dtypes and shapes; None if it does not give the results for all tokens."""
    dims, flat = [], True
    for dim in (2, 3):
        theirs = probe.run(dim)
        if theirs is None:
            continue
        flat_here = theirs[0].dim() == 2
        if _agree(d, theirs, probe.ours(d._replace(flat=flat_here), dim)):
            dims.append(dim)
            flat = flat_here
    d = d._replace(dims=tuple(dims), flat=flat)
    paired = probe.paired()
    for other, training in ((probe, True), (paired, False), *((other, False) for other, _ in others)):
        theirs = other.run(dims[0], training) if dims else None
        if theirs is None or not _agree(d, theirs, other.ours(d, dims[0]), ties=other is paired):
            return None
    return _with_dtypes(probe, d)


def _where_groups_matter(probe: Probe) -> Iterator[Probe]:
    """Probes with biases next to 0, where the experts of every second token depend on how experts are grouped.

    In such a token, either one expert of a group is the best of all and the others are the worst, so that the sum of
    two is the least of all groups; or each group has a single good expert. Groups may change nothing in other tokens.
    """
    E = probe.experts
    numbers = [n for n in range(2, E) if E % n == 0] or [1]
    H = probe.values[probe.gate].shape[1] if probe.gate else TOKENS // 2
    values = {n: v if n == probe.gate or v.dim() > 1 else 0.05 * v for n, v in probe.values.items()}
    inputs = tuple(0.05 * x if x.shape == (E,) else x for x in probe.inputs)
    few = min(H, TOKENS // 2)  # columns of the gate's weight that are the logits of a token each
    for first in range(0, max(4 * len(numbers), 64), few):
        logits = [_in_groups(E, numbers[i // 2 % len(numbers)], i % 2) for i in range(first, first + few)]
        weight = torch.cat([torch.stack(logits), torch.randn(H - few, E)])
        tokens = torch.zeros(TOKENS, H)
        tokens[::2, :few] = torch.eye(few).repeat(TOKENS // 2 // few + 1, 1)[: TOKENS // 2]
        tokens[::2] *= 0.8 + 0.4 * torch.rand(TOKENS // 2, 1)
        tokens[1::2] = torch.randn(TOKENS // 2, H) / (2 * H**0.5)
        if probe.gate:
            yield probe._replace(values=values | {probe.gate: weight.T.contiguous()}, inputs=(tokens, *inputs[1:]))
        else:
            yield probe._replace(values=values, inputs=(*inputs[:-1], tokens @ weight))


def _in_groups(E: int, n: int, single: int) -> Tensor:
    """Logits of one token for E experts in n groups; see `_where_groups_matter`."""
    good, bad = 0.3 + 0.3 * torch.rand(n, E // n), -4.0 + torch.rand(n, E // n)
    best = torch.arange(E // n) == torch.randint(E // n, (n, 1))
    if single:
        return torch.where(best, good, bad).flatten()
    one = torch.arange(n)[:, None] == torch.randint(n, ())
    return torch.where(one, torch.where(best, 2.2, bad), good).flatten()


def _agree(d: RouterDescription, theirs: tuple[Tensor, ...], ours: tuple[Tensor, ...], ties: bool = False) -> bool:
    """Whether results are equal up to rounding. With ties, any of the tied experts may be selected."""
    if [t.shape for t in theirs] != [t.shape for t in ours]:
        return False
    a, b = ({kind: t.reshape(TOKENS, -1) for kind, t in zip(d.outputs, of)} for of in (theirs, ours))
    if "experts" in a:
        for of in (a, b):
            of["experts"], order = of["experts"].sort()
            of["weights"] = of["weights"].gather(1, order)
    same = (a["experts"] == b["experts"]).all(1) if "experts" in a else (
        (a["dense"] != 0) == (b["dense"] != 0)).all(1)  # fmt: skip
    if ties:
        groups = dict(d.arguments)["n_group"] > 1
        if not groups and "weights" in a and d.expert_scale is None:
            return torch.allclose(a["weights"].sort()[0], b["weights"].sort()[0], 1e-5, 1e-6)
    elif not same[:ORDINARY].all() or same.float().mean() < 0.9:
        return False
    return all(
        torch.allclose(a[kind][rows].float(), b[kind][rows].float(), rtol, 1e-6)
        for kind in a if kind != "experts" for rows, rtol in ((same, 1e-4), (slice(ORDINARY), 2e-6))[: 1 if ties else 2]
    )  # fmt: skip


def _with_dtypes(probe: Probe, d: RouterDescription) -> RouterDescription | None:
    """The precision of the gate, and the dtypes of the results; None if they follow no rule."""
    ran = []
    for cast, autocast in [*((probe.cast(*dtypes), False) for dtypes in DTYPES), (probe, True)]:
        with torch.autocast("cpu", BFLOAT16, enabled=autocast):
            theirs = cast.run(d.dims[0])
        if theirs is not None:
            ran.append((cast, autocast, theirs))

    def ours(cast: Probe, autocast: bool, as_: RouterDescription) -> tuple[Tensor, ...]:
        with torch.autocast("cpu", BFLOAT16, enabled=autocast):
            return cast.ours(as_, d.dims[0])

    d = d._replace(full="float32")
    precise = [d._replace(float32=float32, autocast=a) for a in (True, False) for float32 in (False, True)]
    rounded = [r for r in ran if r[1] or r[0].inputs[0].dtype == BFLOAT16]
    d = min(precise, key=lambda p: sum(_distance(d, theirs, ours(cast, a, p)) for cast, a, theirs in rounded))
    rules = {"full": {"gate", "float32"}, "weights": {"float32", "gate", "hidden"}}
    for cast, autocast, theirs in ran:
        of_gate = ours(cast, autocast, d._replace(full="gate", weights="gate"))
        for kind, a, b in zip(d.outputs, theirs, of_gate):
            if kind != "experts":
                of = {"gate": b.dtype, "hidden": cast.inputs[0].dtype, "float32": FLOAT32}
                rules["weights" if kind == "weights" else "full"] &= {
                    rule for rule, dtype in of.items() if dtype == a.dtype
                }
    if not all(rules.values()):
        return None
    return d._replace(full=max(rules["full"]), weights=max(rules["weights"]))


def _distance(d: RouterDescription, theirs: tuple[Tensor, ...], ours: tuple[Tensor, ...]) -> float:
    """How far logits or scores are apart, or else the weights of all experts, which depend on the selection too."""
    full = {kind: (a, b) for kind, a, b in zip(d.outputs, theirs, ours) if kind in (*FULL, "dense")}
    if full:
        a, b = (t.float() for t in full[min(full, key=lambda kind: kind == "dense")])
    else:
        at, of = d.outputs.index("experts"), d.outputs.index("weights")
        E = 1 + int(max(theirs[at].max(), ours[at].max()))
        a, b = (torch.zeros(*t[at].shape[:-1], E).scatter(-1, t[at].long(), t[of].float()) for t in (theirs, ours))
    return float((a - b).abs().mean())


def adapters_of(router: nn.Module, d: RouterDescription) -> list[nn.Module]:
    """The adapters around the layer of a router that has the gate's weight."""
    adapters: list[nn.Module] = []
    for name in (d.gate or "").split(".")[:-1]:
        router, adapters = unwrapped(getattr(router, name))
    return adapters
