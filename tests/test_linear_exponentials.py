"""The kernels that write exponentials of the logits of a linear head: against the definition, in float64."""

from importlib import import_module

import pytest
import torch

import definition
from onepass import kernels, reference
from onepass.core.options import PACKED, Inputs, Options, Transform, empty_results
from onepass.logits import tile_plan
from paths import interpreted

module = import_module("onepass.kernels.linear_exponentials")
FIELDS = ("log_probs", "log_probs entropy", "log_probs is_top1 shift log_normalizer", "log_probs entropy is_top1")
SHAPES = {  # rows, vocabulary, width
    "less than a part": (40, 600, 64),
    "two parts": (100, 300, 72),
    "three parts": (200, 1000, 128),
    "odd": (450, 999, 96),
    "one column more": (193, 513, 200),
}


def draw(device, shape, dtype, size=1.0, seed=0):
    """Operands whose products are small whole numbers times ``size``: no logit is rounded, and many are equal."""
    rows, vocab, width = shape
    g = torch.Generator().manual_seed(seed)
    a = torch.randint(-1, 2, (rows, width), generator=g) * size
    w = torch.randint(-1, 2, (vocab, width), generator=g)
    return a.to(dtype).to(device), w.to(dtype).to(device), torch.randint(vocab, (rows,), generator=g).to(device)


def padded(rows, vocab, like):
    """An output with rows that begin at multiples of 16 bytes; beyond them it is 0."""
    step = 16 // like.element_size()
    return like.new_zeros((rows, -(-vocab // step) * step))[:, :vocab]


def compared(a, w, inputs, options, backend=kernels, split=None):
    """Compare all results with their definition in float64, and return the exponentials.

    From column ``split`` on, these are in another tensor.
    """
    index, mask = inputs[:2]
    parts = [padded(len(a), columns, a) for columns in ([len(w)] if split is None else [split, len(w) - split])]
    results = empty_results(parts[0], index, options)
    factors = backend.linear_exponentials(a, w.t(), inputs, options, results, *parts)
    out = torch.cat(parts, 1)
    assert factors.shape == (len(a),)
    active = torch.ones_like(index, dtype=torch.bool) if mask is None else mask != options.masked
    x = (a.double() @ w.double().t()).to(a.dtype).double().requires_grad_()
    inside = (index >= 0) & (index < len(w))
    t = options.transform
    expected = definition.statistics(
        x, index.where(inside, 0).long(), temperature=t.temperature, logit_scale=t.logit_scale
    )
    (gradient,) = torch.autograd.grad(expected["log_probs"].sum(), x)
    outside = active & ~inside
    for field in options.names():
        value = expected[field].detach()
        if field == "is_top1":
            assert torch.equal(results[2], value & inside & active)
            continue
        value = value.masked_fill(outside, torch.nan).masked_fill(~active, 0.0)
        found = results[1] if field == "log_probs" else results[0][PACKED.index(field)]
        definition.assert_close(found, value, scale=32.0, name=field)
    gradient = gradient.masked_fill(outside[:, None], torch.nan).masked_fill(~active[:, None], 0.0)
    found = out.double() * factors.double()[:, None]
    assert torch.equal(found.isnan().any(1), gradient.isnan().any(1))
    sound = ~gradient.isnan().any(1)
    if a.dtype == torch.bfloat16:  # each number is rounded once
        torch.testing.assert_close(found[sound], gradient[sound], rtol=2**-8, atol=1e-6)
    else:
        torch.testing.assert_close(found[sound], gradient[sound], rtol=1e-5, atol=2e-6)
    for part in parts:
        padding = part.as_strided((len(a), part.stride(0)), (part.stride(0), 1))[:, part.shape[1] :]
        assert not padding.any(), "the padding"
    assert not out[~active].any() and not factors[~active].any()
    return out


class Emulated:
    """`linear_exponentials_kernel` in plain PyTorch, for the two kernels around it, which Triton's interpreter runs."""

    def __init__(self, monkeypatch):
        self.launch, self.computed = module.launch, []
        self.moved: dict[int, float] = {}  # what is added to all logits of a row, which no probability depends on
        monkeypatch.setattr(module, "launch", self)
        monkeypatch.setattr(module, "plan_for", "products", raising=True)

    def __call__(self, plan, about, tensors):
        if plan != "products":
            return self.launch(plan, about, tensors)
        a, w, reference, index, marks, due, out, rest, states, selected, ties = tensors
        (rows, V, _), n_tiles = about[:3], states.shape[1]
        factor = about[-1].transform.factors()[0] * module.LOG2E.value
        z = (a.float() @ w.float().t()).to(a.dtype).float()
        for row, number in self.moved.items():
            z[row] += number
        y = z * factor - reference[:, None]
        tiles = torch.arange(rows) // module.TILE_ROWS
        for row in range(rows):
            tile = tiles[row]
            if due is not None and not (due[0] and due[1 + tile]):
                continue
            self.computed.append(row)
            out[row] = y[row, : out.shape[1]].exp2()
            if rest is not None:
                rest[row] = y[row, out.shape[1] :].exp2()
            third = row % module.TILE_ROWS >= module.TILE_ROWS - module.PART
            label = int(index[row])
            for n in range(n_tiles):
                first = n * module.WIDTH
                parts = [(row, first, first + module.WIDTH)]
                if third:
                    second = rows + tile * module.PART + row % module.PART
                    middle = first + module.WIDTH // 2
                    parts = [(row, first, middle), (second, middle, first + module.WIDTH)]
                for slot, begin, end in parts:
                    some, of = z[row, begin:end], y[row, begin:end]
                    e = of.exp2()
                    # As on a GPU, whose maximum ignores NaN.
                    some = some.nan_to_num(-torch.inf, torch.inf, -torch.inf)
                    states[0, n, slot] = some.max() if len(some) else -torch.inf
                    states[1, n, slot] = e.sum()
                    if len(states) == 3:
                        states[2, n, slot] = (e * of.clamp(min=-1e18)).sum()
                    if begin <= label < min(end, V) and marks[row // module.PART, n]:  # else the row is masked
                        selected[row] = z[row, label]
                        if ties is not None:
                            ties[row] = int((z[row, begin:label] == z[row, label]).any())


@pytest.fixture(params=["interpreted", "compiled"])
def place(request, device, monkeypatch):
    """The device, and the dtype that is multiplied there. In the interpreter, plain PyTorch multiplies, and `tl.dot`
    takes no bfloat16."""
    if request.param == "interpreted":
        if not interpreted(device):
            pytest.skip("takes Triton's interpreter")
        return device, torch.float32, Emulated(monkeypatch)
    if device.type != "cuda" or torch.cuda.get_device_capability() != (9, 0) or not module.SUPPORTED:
        pytest.skip("takes a Hopper GPU, and Triton 3.6 or later")
    return device, torch.bfloat16, None


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_definition(place, shape, fields):
    device, dtype, _ = place
    for seed, (transform, masked) in enumerate(((Transform(), False), (Transform(0.7, None, 1.5), True))):
        a, w, index = draw(device, SHAPES[shape], dtype, 0.25, seed)
        x = (a @ w.t()).float()
        largest = x == x.amax(1, keepdim=True)
        index[::4] = x[::4].argmax(1)  # the first of several largest logits, or the last, which is not the argmax
        index[1::4] = len(w) - 1 - largest[1::4].flip(1).int().argmax(1)
        mask = (torch.arange(len(a), device=device) % 3 != 0) if masked else None
        split = 256 if masked or shape == "two parts" else None
        for backend in (kernels, reference):
            compared(a, w, Inputs(index, mask), Options(fields, transform), backend, split)


@pytest.mark.parametrize("width", (72, 600))
def test_references(place, width):
    """The largest logit of a row at the indices of its block of 16 rows, those in the vocabulary and not masked."""
    device, dtype, _ = place
    rows, vocab = 310, 700
    a, w, index = draw(device, (rows, vocab, width), dtype, 0.25)
    a[32:48], index[32:48] = -w[9], 9  # all logits of these indices are negative
    index[3], index[36], index[300] = -100, vocab, -1
    a[17], w[index[80]] = torch.nan, torch.inf
    mask = torch.arange(rows, device=device) % 5 != 1
    parts, tiles, m_tiles = -(-rows // module.PART), -(-vocab // module.WIDTH), -(-rows // module.TILE_ROWS)
    reference = a.new_full((rows,), 7.0, dtype=torch.float32)
    marks = a.new_zeros((parts, tiles), dtype=torch.int8)
    due = a.new_full((1 + m_tiles,), 7, dtype=torch.int32)
    options = Options("log_probs", Transform(0.5))
    about = rows, vocab, width, (a.stride(0), w.stride(0)), options
    module.launch(module.plan_of_reference, about, (a, w, index, mask, reference, marks, due))

    kept = mask & (index >= 0) & (index < vocab)
    logits = (a.double() @ w.double().t()).to(dtype).double() * 2.0 * module.LOG2E.value
    expected, marked = torch.full((rows,), torch.inf, dtype=torch.float64, device=device), torch.zeros_like(marks)
    for row in range(rows):
        first = row // 16 * 16
        indices = index[first : first + 16][kept[first : first + 16]]
        if kept[row]:
            marked[row // module.PART, index[row] // module.WIDTH] = 1
            found = logits[row, indices].nan_to_num(-torch.inf, torch.inf).amax()
            expected[row] = torch.nan if logits[row, index[row]].isnan() else found
        elif mask[row]:
            expected[row] = torch.nan
    torch.testing.assert_close(reference.double(), expected, equal_nan=True, rtol=1e-6, atol=0.0)
    assert torch.equal(marks, marked) and not due.any()
    assert (expected.isfinite() & (expected < 0)).any() and expected.isnan().any()


def test_labels_that_are_far_below_the_largest_logit(place):
    """Only the tiles of rows that have one are computed again, relative to the largest logit."""
    device, dtype, emulated = place
    options = Options("log_probs entropy is_top1")
    a, w, index = draw(device, (500, 700, 64), dtype)
    a[:200] *= 4.0
    a[7] = a[130] = 4.0 * w[300]
    w[77] = -w[300]
    index[7], index[130] = 77, 300
    compared(a, w, Inputs(index), options)
    if emulated is not None:
        again = emulated.computed[len(a) :]
        assert 7 in again and {row // module.TILE_ROWS for row in again} <= {0, 1}, "tiles without such a row"
    compared(256 * a, w, Inputs(index), options, split=512)  # logits of more than 1e4
    index[::5] = -100
    compared(a, w, Inputs(index, index), options._replace(masked=-100))


def test_references_that_are_far_above_all_logits(place):
    """As after a large sum that is rounded to the other side: all exponentials are 0 until they are computed again."""
    device, dtype, emulated = place
    if emulated is None:
        pytest.skip("takes an emulated product")
    a, w, index = draw(device, (250, 300, 64), dtype, 0.25)
    emulated.moved = {3: -300.0, 201: -200.0}
    compared(a, w, Inputs(index), Options("log_probs entropy is_top1"))
    assert {row // module.TILE_ROWS for row in emulated.computed[len(a) :]} == {0, 1}


@pytest.mark.parametrize("width", (64, 192, 200, 328, 896))
def test_programs_of_several_tiles(place, width):
    """From four steps on, one group of warps is a step ahead of the other. The last tile has rows for one or both."""
    device, dtype, emulated = place
    if emulated is not None:
        pytest.skip("the interpreter does not run the product")
    a, w, index = draw(device, (1060, 12000, width), dtype, 0.25)
    compared(a, w, Inputs(index), Options("log_probs"))
    a, index = a[:1000], index[:1000]
    for tile in (1, 4):  # which are computed again
        row = tile * module.TILE_ROWS + 70
        a[row] *= 64.0
        index[row] = (a[row].float() @ w.float().t()).argmin()
    compared(a, w, Inputs(index), Options("log_probs entropy is_top1"), split=8192)


def test_many_tiles_of_columns(place):
    """The sums of more tiles than are merged at once, and references from more columns than are read at once."""
    device, dtype, emulated = place
    first = module.TILES * module.WIDTH  # class of those that are merged next
    a, w, index = draw(device, (41, first + module.WIDTH + 8, module.BLOCK_K + 8), dtype, 0.25)
    index[::2] = (a[::2] @ w.t()).argmax(1)
    index[5], index[6] = len(w) - 1, len(w)
    a[:, -1], w[:, -1] = 0.25, 1024.0  # added to all logits: references without it would be far from them
    a[8] = a[7]
    w[[first, -1], :-1] = a[7, :-1].sign()  # both have the largest logit
    index[7], index[8] = len(w) - 1, first
    compared(a, w, Inputs(index), Options(" ".join(sorted(module.FIELDS))))
    assert emulated is None or len(emulated.computed) == len(a), "tiles are computed again"


def test_hard_rows(place):
    """NaN and infinite rows, logits of -inf, indices outside of the vocabulary; such rows may be masked."""
    device, dtype, _ = place
    options = Options(" ".join(sorted(module.FIELDS)))
    a, w, index = draw(device, (420, 520, 64), dtype, 0.25)
    a[0] = a[5] = a[250] = torch.nan
    a[1, 0] = a[6, 0] = torch.inf
    index[3], index[4], index[7] = len(w), -1, 2**40
    compared(a, w, Inputs(index), options)
    mask = torch.ones(len(a), dtype=torch.bool, device=device)
    mask[[1, 3, 5, 9, 250, 300]] = False
    for split in (None, 256, 512):
        compared(a, w, Inputs(index, mask), options, split=split)
    a, w, index = draw(device, (420, 520, 64), dtype, 0.25)
    a[:, 0], w[:, 0] = 1.0, 0.0
    w[99, 0] = w[480, 0] = -torch.inf  # of probability 0
    index[8], index[200], index[390] = 99, 480, 99
    found = compared(a, w, Inputs(index), options)
    assert not found[:8, 99].any()


def test_layouts(place):
    """Rows of operands may be apart or not aligned, and an index may be int32."""
    device, dtype, _ = place
    options = Options("log_probs")
    a, w, index = draw(device, (210, 300, 64), dtype, 0.25)
    for extra in (8, 5):
        apart = a.new_zeros((len(a), 64 + extra))[:, :64].copy_(a)
        compared(apart, w, Inputs(index), options)
    for strided in (
        a.new_zeros((*a.shape, 2))[..., 0],
        a.new_zeros((64, 1024)).t()[: len(a)],
        a[:1].expand(len(a), 64),
    ):
        strided = strided.copy_(a) if strided.stride(0) else strided
        compared(strided, w, Inputs(index), options)
    compared(a, w.new_zeros((len(w), 128))[:, :64].copy_(w), Inputs(index.int()), options)


def test_what_the_kernel_takes(monkeypatch):
    monkeypatch.setattr(module, "SUPPORTED", True)
    monkeypatch.setattr(module.layout, "compute_capability", lambda *_: 90)
    monkeypatch.setattr(module.layout, "one_at_a_time", lambda: False)
    monkeypatch.setattr(module, "LEAST_LOGITS", 2**12 * 300)
    w, index = torch.zeros(300, 64, dtype=torch.bfloat16), torch.zeros(2**12, dtype=torch.long)
    plain = torch.bfloat16, 2**12, w.t(), Inputs(index), Options("log_probs")
    assert kernels.supports_linear_exponentials(*plain)
    assert kernels.supports_linear_exponentials(*plain[:2], w.float().t(), *plain[3:]), "it is cast"
    assert kernels.supports_linear_exponentials(*plain[:4], Options(" ".join(module.FIELDS)))
    assert not reference.supports_linear_exponentials(*plain)
    row = torch.ones(2**12)
    others = (
        {0: torch.float16}, {0: torch.float32}, {1: 2**12 - 1},
        {2: w.t().contiguous()}, {2: torch.zeros(300, 60, dtype=torch.bfloat16).t()},
        {2: torch.zeros(300, 68, dtype=torch.bfloat16)[:, 4:].t()}, {2: torch.zeros(0, 64, dtype=torch.bfloat16).t()},
        {3: Inputs()}, {3: Inputs(index[:, None])}, {3: Inputs(index, temperature=row)},
        {3: Inputs(index, class_weights=row[:300])}, {3: Inputs(index, support=index[:, None])},
        {4: Options("selected")}, {4: Options("log_probs weighted_logit")}, {4: Options("log_probs mean_logit")},
        {4: Options("log_probs", Transform(1.0, 30.0))}, {4: Options("log_probs", Transform(1.0, None, -1.0))},
        {4: Options("log_probs", invariant=True)},
    )  # fmt: skip
    for changed in others:
        assert not kernels.supports_linear_exponentials(*[changed.get(n, p) for n, p in enumerate(plain)]), changed
    monkeypatch.setattr(module.layout, "compute_capability", lambda *_: 100)
    assert not kernels.supports_linear_exponentials(*plain)


@pytest.mark.skipif(not module.SUPPORTED, reason="takes Triton 3.6 or later")
def test_the_tiles_of_both_files_are_the_same():
    tiles = import_module("onepass.kernels.hopper_tiles")
    assert [n.value for n in (tiles.PART, tiles.PARTS, tiles.WIDTH)] == [module.PART, module.PARTS, module.WIDTH]
    assert tile_plan.SPLIT % module.WIDTH == 0, "whole tiles are on either side of a split"


@pytest.mark.skipif(not module.SUPPORTED, reason="takes Triton 3.6 or later")
def test_numbers_of_rows_share_the_compiled_kernels(monkeypatch):
    """The split of a tile follows from the number of valid rows, which is another one in every step."""
    monkeypatch.setattr(module.layout, "multiprocessors", lambda *_: 132)
    monkeypatch.setattr(module.layout, "shared_memory", lambda *_: 232448)
    options = Options("log_probs entropy")
    found = []
    for rows, split in ((500, 512), (501, 256)):
        places = split, split, 1000 - split
        plans = (
            module.plan_for(rows, 1000, 64, (64, 64), places, torch.device("cpu"), options),
            *[module.plan_of_merge(rows, 1000, places, last, options) for last in (False, True)],
            module.plan_of_factors(rows, 1000, places, 1),
        )
        assert all(set(places) <= set(plan.numbers) for plan in plans)
        found.append([(plan.kernel, plan.constexprs, plan.num_warps) for plan in plans])
    assert found[0] == found[1]


@pytest.mark.parametrize("time", range(5))
@pytest.mark.parametrize("expanded", (False, True))
def test_factors_times_upstream_gradients(place, expanded, time):
    """Several times: the kernel overwrites factors that other warps may not have read yet."""
    device, dtype, emulated = place
    if time and emulated is not None:
        pytest.skip("the interpreter has no warps")
    backends = (kernels, reference)
    factors = torch.randn(70, device=device)
    factors[[3, 40]], factors[[5, 41, 69]] = 0.0, torch.nan
    out, rest = (padded(70, n, torch.zeros(1, dtype=dtype, device=device)) + 1.0 for n in (300, 50))
    for part in (out, rest):
        part[[5, 41, 69]] = torch.nan
        part[[3, 40]] = 0.0
    upstream = torch.randn(70, 2, device=device)[:, 0]
    upstream[[5, 6, 69]], upstream[3] = 0.0, torch.inf
    upstream = upstream[5].expand(70) if expanded else upstream
    given = [(factors.clone(), out.clone(), None if expanded else rest.clone()) for _ in backends]
    for backend, (f, *parts) in zip(backends, given):
        backend.scale_exponentials(f, upstream, *parts)
        assert not f[[3, 5, 6, 69]].any() and (expanded or f[41].isnan())
        for x in parts:
            assert x is None or not x[[3, 5, 69]].any()
            assert expanded or x[41].isnan().all()
    torch.testing.assert_close(given[0][0], given[1][0], equal_nan=True)
