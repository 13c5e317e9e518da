"""What a linear head costs: products only of what is needed, and no more memory than is allowed."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import onepass
from linear_cases import LOSSES, H, V, assert_all_close, batch, exact, gradients
from onepass.cli.measure import peak_memory
from onepass.logits.head import Head, HeadTensors, Settings
from onepass.logits.tile_plan import BLOCKS, INDEX, PASS, ROW, WAVE, Use, equal, in_waves, plan

pytestmark = pytest.mark.usefixtures("uninitialised_memory_is_nan")


# What is not needed costs nothing.


class Products(TorchDispatchMode):
    """Counts the multiplications of matrix products, and the rows of what has as many columns as logits."""

    def __init__(self):
        super().__init__()
        self.multiplications, self.rows = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            self.multiplications += a.shape[0] * a.shape[1] * b.shape[1]
        if isinstance(result, torch.Tensor) and result.dim() == 2 and V <= result.shape[1] < V + 16:
            self.rows = max(self.rows, result.shape[0])
        return result


@pytest.mark.parametrize("loss", ["cross_entropy", "pair, masked", "kl_div", "topk_kl_div"])
def test_rows_left_out_take_part_in_no_product(device, tile, loss):
    rows = 40
    hidden, weight, bias, target = batch(device, rows=(rows,))
    kept = int((target != -100).sum())
    assert kept < rows
    with Products() as products:
        gradients(LOSSES[loss](onepass.LinearLogits(hidden, weight, bias), target).sum(), (hidden, weight, bias))
    count = 4 if loss == "pair, masked" else 3
    assert products.multiplications == count * kept * H * V
    if tile < rows and loss != "kl_div":  # which makes its teacher here
        assert products.rows <= H < rows  # the logits never exist; H × V is the weight, turned


@pytest.mark.parametrize("frozen", ["weight", "hidden", "bias"])
@pytest.mark.parametrize("loss", ["cross_entropy", "pair", "kl_div, none"])
def test_what_is_frozen_has_no_product(device, frozen, loss):
    parts = dict(zip(("hidden", "weight", "bias"), batch(device)[:3]))
    target = batch(device)[3].abs() % V
    parts[frozen].requires_grad_(False)
    with Products() as products:
        LOSSES[loss](onepass.LinearLogits(**parts), target).sum().backward()
    reads = 1 if loss == "cross_entropy" else 2
    kept = (target != -100).sum()
    compared = V - 7 if loss == "kl_div, none" else V  # the gradient of the hidden states sums over these columns
    columns = reads * V + (frozen != "hidden") * compared + (frozen != "weight") * V
    assert products.multiplications == columns * kept * H
    reference = dict(zip(parts, exact(*parts.values())))
    LOSSES[loss](F.linear(*reference.values()), target).sum().backward()
    for name, part in parts.items():
        if name == frozen:
            assert part.grad is None
        else:
            assert_all_close([part.grad], [reference[name].grad], name)


def time(count, rows, width, of_pass):
    """What the GEMMs of all tiles take, in waves of programs of the best block, and a pass for each tile."""
    tiles = [min(rows, count - n) for n in range(0, count, rows)]
    gemms = [
        min(-(-(-(-n // a) * -(-width // b)) // WAVE) * a * b for a, b in BLOCKS) for n in tiles
    ]  # fmt: skip
    return sum(gemms) + len(tiles) * of_pass


def test_tiles_fill_the_device():
    """At most as many rows as fit and one tile more than of equal size, and no fewer rows at once for nothing."""
    assert in_waves(16384, 5799, 896, PASS * 896) == 5632  # 3 passes; with 4 of 4096 rows it takes 4% longer (H200)
    assert in_waves(16384, 5318, 2880, PASS * 2880) == 4864  # 4 tiles of 4096 rows take 3% longer
    assert in_waves(32768, 6360, 2048, PASS * 2048) == 6144
    assert in_waves(16384, 2196, 2048, 2048) == 2048
    assert in_waves(100, 1000, 64, 0) == 100 and in_waves(0, 5, 64, 0) == 1 and in_waves(10, 3, 64, 0) == 3
    for count in (1, 300, 4096, 5000, 16384, 40001):
        for most in (1, 100, 1024, 1800, 2300, 6678, 50000):
            for width in (64, 896, 1536, 2048, 2880, 4096):
                for of_pass in (width, PASS * width):
                    rows, same = in_waves(count, most, width, of_pass), equal(count, most)
                    assert 1 <= rows <= max(most, 1) and -(-count // rows) <= -(-count // same) + 1
                    if rows != same:
                        assert time(count, rows, width, of_pass) <= time(count, same, width, of_pass)


@pytest.mark.parametrize("rows", [(0,), (2, 0), (1,)])
@pytest.mark.parametrize("width, vocab", [(1, 1), (3, 2), (19, 5)])
def test_small_shapes(device, rows, width, vocab):
    hidden, weight, bias, _ = batch(device, rows=rows, width=width, vocab=vocab)
    target = torch.zeros(rows, dtype=torch.long, device=device)
    got = onepass.linear_cross_entropy(hidden, weight, target, bias=bias, reduction="sum")
    parts = exact(hidden, weight, bias)
    expected = F.cross_entropy(F.linear(*parts).view(-1, vocab), target.view(-1), reduction="sum")
    assert_all_close([got.detach()], [expected.detach()], "loss")
    assert_all_close(gradients(got, (hidden, weight, bias)), gradients(expected, parts))


def test_all_rows_ignored(device):
    hidden, weight, bias, target = batch(device)
    target[:] = -100
    assert onepass.linear_cross_entropy(hidden, weight, target, bias=bias).isnan()  # as in torch
    total = onepass.linear_cross_entropy(hidden, weight, target, bias=bias, reduction="sum")
    assert total == 0
    for gradient, part in zip(gradients(total, (hidden, weight, bias)), (hidden, weight, bias)):
        assert gradient.shape == part.shape and (gradient == 0).all()


def test_any_layout(device):
    hidden, weight, bias, target = batch(device, rows=(3, 5))
    h, w, b = exact(hidden, weight, bias)
    columns = weight.detach().t().contiguous().t().requires_grad_()
    got = onepass.linear_cross_entropy(hidden[:, :-1], columns, target[:, 1:], bias=bias)
    expected = F.cross_entropy(F.linear(h[:, :-1], w, b).flatten(0, 1), target[:, 1:].flatten())
    assert_all_close(gradients(got, (hidden, columns, bias)), gradients(expected, (h, w, b)))


# Memory.

SHAPES = [(1, 64, 50257), (300, 64, 50257), (1000, 127, 5003), (4096, 256, 1000), (64, 1024, 32000), (777, 65, 151936)]


def head_of(rows, width, vocab):
    with torch.device("meta"):
        hidden, weight = (torch.empty(n, width, dtype=torch.bfloat16) for n in (rows, vocab))
    return lambda max_memory: Head(HeadTensors(hidden, weight), Settings(torch.bfloat16, torch.bfloat16, max_memory))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_plans_keep_to_the_memory(shape, trained):
    rows, width, vocab = shape
    head = head_of(*shape)
    for megabytes in (40, 100, 400, 4000):
        total = 4 * vocab * width * trained
        try:
            cut = plan([head(megabytes * 10**6)], None, Use(weight_gradient=trained))
        except ValueError as error:
            assert "max_memory: expected at least" in str(error)
            least = int(str(error).split()[4])
            assert least > megabytes * 10**6 and plan([head(least)], None, Use(weight_gradient=trained)).rows == 1
            continue
        several = cut.rows < rows
        assert cut.rows * (head(None).logits_bytes(torch.bfloat16)) + total * several <= megabytes * 10**6
        assert sum(r.n for r in cut.row_tiles()) == rows
        if several:  # tiles are as large as they may be, or as equal tiles of whole blocks are
            assert -(-rows // cut.rows) <= 2 * -(
                -rows * (head(None).logits_bytes(torch.bfloat16) + ROW + INDEX) // (megabytes * 10**6 - total - 2**17)
            )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_slices_keep_to_the_memory(shape, trained):
    """Where rows are known tiles are slices, unless all fits in one or slices do not."""
    rows, width, vocab = shape
    head = head_of(*shape)
    shapes = set()
    for megabytes in (8, 20, 60, 200, 2000, 10000):
        try:
            cut = plan([head(megabytes * 10**6)], None, Use(weight_gradient=trained, known=True))
        except ValueError:
            continue
        slices = [c for c in cut.slices() if cut.sliced]
        assert cut.sliced == bool(slices) and (cut.rows == rows or not cut.sliced)
        if cut.sliced:
            assert 2 * rows * cut.columns + 4 * rows * width <= megabytes * 10**6
            assert [c.start for c in slices] == [0, *[c.stop for c in slices[:-1]]] and slices[-1].stop == vocab
        shapes.add((cut.rows < rows, cut.sliced))
    assert (False, False) in shapes and ((False, True) in shapes or rows < 300 or vocab < 4 * rows)


@pytest.mark.parametrize("shape", [(300, 16, 5003), (64, 32, 16000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "loss", ["cross_entropy", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in ("pair", "kl_div"))]
)
def test_max_memory_is_kept_on_a_cpu(monkeypatch, shape, dtype, loss):
    if shape[0] == 64 and (loss, dtype) != ("cross_entropy", torch.float32):
        pytest.skip("one case shows that a wide head keeps to it too")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    rows, width, vocab = shape
    hidden, weight, _, target = batch("cpu", dtype, (rows,), width, vocab)
    target = target.abs() % vocab
    least = 2**26 + 2**18 + 8 * vocab * width * (dtype == torch.bfloat16)
    for max_memory in (least + 2**21, least + 2**25, None):
        x = onepass.LinearLogits(hidden, weight, max_memory=max_memory)

        def step(x=x):
            hidden.grad = weight.grad = None
            step_of(loss, x, target)

        step()
        peak = peak_memory(step, torch.device("cpu"))  # before or after there are gradients
        assert peak <= (max_memory or 2**27) + hidden.nbytes + weight.nbytes, (peak, max_memory)


def step_of(loss, x, target):
    if loss == "kl_div":
        onepass.kl_div(x, onepass.LinearLogits(x.hidden.detach(), x.weight.detach())).backward()
    elif loss == "pair":
        torch.stack(onepass.selective_log_softmax_and_entropy(x, target)).sum().backward()
    else:
        onepass.cross_entropy(x, target).backward()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("loss", ["cross_entropy", "pair", "kl_div", "masked"])
def test_max_memory_is_kept(shape, trained, loss):
    rows, width, vocab = shape
    hidden, weight, _, target = batch("cuda", torch.bfloat16, (rows,), width, vocab)
    target = target.abs() % vocab
    if loss == "masked":
        target[::2] = -100
    weight.requires_grad_(trained)
    least = 4 * vocab * width * trained
    for max_memory in (least + 3 * 2**20, least + 40 * 2**20, least + 400 * 2**20, None):
        x = onepass.LinearLogits(hidden, weight, max_memory=max_memory)

        def step(x=x):
            step_of(loss, x, target)

        step()  # compiles, and makes the products' own workspace
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        gradient_bytes = sum(p.grad.numel() * 2 for p in (hidden, weight) if p.grad is not None)
        extra = torch.cuda.max_memory_allocated() - before - gradient_bytes
        hidden.grad = weight.grad = None
        assert extra <= (max_memory or 2**32), (extra, max_memory)


@pytest.mark.gpu
def test_a_forward_holds_no_logits():
    vocab = 151936
    hidden, weight, _, target = batch("cuda", torch.bfloat16, (4096,), 64, vocab)
    for differentiable in (True, False):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.set_grad_enabled(differentiable):
            onepass.linear_selective_log_softmax_and_entropy(hidden, weight, target.abs() % vocab)
        whole = (torch.cuda.max_memory_allocated() - before) / (hidden.shape[0] * vocab * 2)
        assert whole < 0.05, whole


@pytest.mark.parametrize("adapter", [False, True], ids=["", "adapter"])
def test_a_reduced_loss_keeps_its_gradients_alone(monkeypatch, adapter):
    """Not the weight in the dtype of autocast, nor the gradient of the logits in that dtype."""
    alive = set()
    monkeypatch.setattr(Head, "__init__", noting(alive, Head.__init__))
    hidden, weight = torch.randn(64, H), torch.randn(V, H)
    lora = (torch.randn(4, H), torch.randn(V, 4), 2.0) if adapter else None
    for t in (hidden, weight, *(lora or ())[:2]):
        t.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logits = onepass.LinearLogits(hidden, weight, lora=lora, logits_dtype=torch.float32, max_memory=1 << 19)
        loss = onepass.cross_entropy(logits, torch.arange(64) % V)
    assert alive and all(head.held is None and head.rest is None for head in alive)
    node = loss.grad_fn
    while not hasattr(node, "gradients"):
        node = node.next_functions[0][0]
    assert node.gradients.batch is None
    loss.backward()
    assert weight.grad.isfinite().all() and weight.grad.any()


def noting(found, function):
    def call(self, *args):
        found.add(self)
        function(self, *args)

    return call
