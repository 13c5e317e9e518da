"""What every process of test_vocab_parallel.py compiles: losses of sharded vocabularies, against eager mode.

All are compiled without graph breaks.
"""

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import onepass
from onepass.logits.vocab_parallel import _agreed
from vocab_parallel_cases import SPLITS, VOCAB, close, finite_rows, head_of, ids_of, rows_of, weights

_, TARGET, MASK = rows_of(torch.float32)
LABELS, CLASS_WEIGHTS = TARGET.clamp(min=0), weights()
IDS, LOG_PROBS = ids_of(TARGET)
TEACHER = finite_rows(torch.float32)[0].flip(0)
TRANSFORM = dict(temperature=0.7, softcap=30.0, logit_scale=0.5)
LOSSES = {
    "cross_entropy, every option": lambda x, n: onepass.cross_entropy(
        x, TARGET[:n], row_mask=MASK[:n], reduction="none", label_smoothing=0.1, z_loss_weight=1e-3,
        class_weights=CLASS_WEIGHTS, **TRANSFORM,
    ),
    "pair": lambda x, n: onepass.selective_log_softmax_and_entropy(x, LABELS[:n], row_mask=MASK[:n], **TRANSFORM),
    "statistics": lambda x, n: onepass.softmax_statistics(
        x, LABELS[:n], class_weights=CLASS_WEIGHTS, metrics=["is_top1", "log_sum_sq_probs", "mean_logit"]
    ),
    "topk_kl_div, renormalized": lambda x, n: onepass.topk_kl_div(x, IDS[:n], LOG_PROBS[:n], renormalize=True),
    "distillation_loss": lambda x, n: onepass.distillation_loss(x, TARGET[:n], IDS[:n], LOG_PROBS[:n]),
    "jsd": lambda x, n: onepass.kl_div(x, TEACHER[:n].to(x.dtype), direction="jsd", temperature=0.7),
    "kl_div": lambda x, n: onepass.kl_div(x, TEACHER[:n].to(x.dtype), row_mask=MASK[:n]),
}  # fmt: skip


def losses_of(x, *names):
    """Several losses of one source: a single graph is traced much faster than one for each."""
    return [r for name in names for r in listed(LOSSES[name](x, 3))]


def listed(results):
    if isinstance(results, onepass.SoftmaxStatistics):
        names = (
            "shift",
            "log_normalizer",
            "expected_logit",
            "selected",
            "weighted_logit",
            "is_top1",
            "log_sum_sq_probs",
            "mean_logit",
        )
        return [getattr(results, name) for name in names]
    return list(results) if isinstance(results, tuple) else [results]


def shard(rank, ranks):
    first = sum(SPLITS[ranks][:rank])
    return slice(first, first + SPLITS[ranks][rank])


def results_of(call, parts, *arguments):
    """The results of a call, and the gradients of its tensors."""
    parts = [p.detach().clone().requires_grad_() for p in parts]
    found = call(*parts, *arguments)
    found = list(found) if isinstance(found, (tuple, list)) else [found]
    used = [f for f in found if f.requires_grad]
    generator = torch.Generator().manual_seed(4)
    torch.autograd.backward(used, [torch.randn(f.shape, generator=generator).to(f.dtype) for f in used])
    return [f.detach() for f in found] + [p.grad for p in parts]


def compare(call, parts, what, *arguments, compiled=None, backend="aot_eager"):
    """A call in eager mode, and compiled."""
    if compiled is None:
        torch._dynamo.reset()
        compiled = torch.compile(call, fullgraph=True, backend=backend)
    both = results_of(compiled, parts, *arguments), results_of(call, parts, *arguments)
    for n, (a, b) in enumerate(zip(*both, strict=True)):
        a, b = (t.full_tensor() if isinstance(t, DTensor) else t for t in (a, b))
        close(a, b, 4e-6, f"{what}, {n}")


def logits_of(rank, ranks):
    return finite_rows(torch.float32)[0][..., shard(rank, ranks)]


def head_of_rank(rank, ranks):
    (hidden, weight, bias), *_ = head_of(torch.float32)
    return [hidden, *(t[shard(rank, ranks)] for t in (weight, bias))]


def logits(rank, ranks):
    """`VocabParallelLogits` that are made in the compiled function, or before; the group is an argument, or global."""
    x, group = logits_of(rank, ranks), dist.group.WORLD
    padded = torch.nn.functional.pad(x, (0, 3 * (rank == ranks - 1)), value=torch.nan)
    names = "cross_entropy, every option", "statistics", "topk_kl_div, renormalized", "kl_div"

    def losses(padded, x, argument):
        of_argument = onepass.entropy_from_logits(onepass.VocabParallelLogits(x, argument))
        return [*losses_of(onepass.VocabParallelLogits(padded, group, VOCAB), *names), of_argument]

    compare(losses, [padded, x], "logits", group)
    call = lambda x, of: of(onepass.VocabParallelLogits(x, group), 3)  # noqa: E731
    given(call, [x])


def given(call, parts):
    """A call whose last argument is a loss, which alone is compiled."""
    compiled = torch.compile(LOSSES["pair"], fullgraph=True, backend="aot_eager")
    for a, b in zip(results_of(call, parts, compiled), results_of(call, parts, LOSSES["pair"]), strict=True):
        close(a, b, 4e-6, "made before")


def heads(rank, ranks):
    """Linear heads that are made in the compiled function, or before; all hidden states, or those of this process."""
    hidden, *shards = parts = head_of_rank(rank, ranks)
    group = dist.group.WORLD

    padded = [torch.nn.functional.pad(t, (0,) * (2 * t.dim() - 1) + (3 * rank,)) for t in shards]

    def of_heads(hidden, weight, bias, part, padded_weight, padded_bias):
        head = onepass.LinearLogits(hidden, weight, bias, vocab_group=group)
        sequence_parallel = onepass.LinearLogits(
            part, padded_weight, padded_bias, vocab_group=group, vocab_size=VOCAB, sequence_parallel=True
        )  # fmt: skip
        losses = losses_of(head, "cross_entropy, every option", "distillation_loss", "kl_div")
        return [*losses, onepass.cross_entropy(sequence_parallel, TARGET[:2])]

    compare(of_heads, [*parts, hidden[rank : rank + 1], *padded], "heads")
    given(lambda *parts: parts[-1](onepass.LinearLogits(*parts[:-1], vocab_group=group), 3), parts)


def dtensors(rank, ranks):
    """Logits that are a DTensor, and a head with a weight that is one."""
    _agreed.clear()  # on another vocabulary
    mesh = init_device_mesh("cpu", (ranks,))
    x = distribute_tensor(finite_rows(torch.float32)[0], mesh, [Shard(2)])
    compare(lambda x: LOSSES["pair"](x, 3), [x], "DTensor")
    hidden, weight, _ = head_of(torch.float32)[0]
    weight = distribute_tensor(weight.detach(), mesh, [Shard(0)])
    call = lambda h, w: onepass.linear_cross_entropy(h, w, TARGET, vocab_group=mesh)  # noqa: E731
    compare(call, [hidden, weight], "DTensor of a head")


def shapes(rank, ranks):
    """One graph for any number of rows."""
    hidden, weight, _ = head_of_rank(rank, ranks)
    target, group = TARGET.flatten(), dist.group.WORLD

    def call(hidden, weight, x, target):
        of_head = onepass.linear_cross_entropy(hidden, weight, target, vocab_group=group)
        return of_head, onepass.cross_entropy(onepass.VocabParallelLogits(x, group), target)

    counter, graphs = CompileCounterWithBackend("aot_eager"), []
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend=counter)
    hidden, x = (t.flatten(0, 1) for t in (hidden, logits_of(rank, ranks)))
    for n in (12, 7, 5):
        compare(call, [hidden[:n], weight, x[:n]], f"{n} rows", target[:n], compiled=compiled)
        graphs.append(counter.frame_count)
    assert graphs[0] == graphs[-1], graphs


def classes(rank, ranks):
    """Another number of selected classes."""
    (hidden, weight, _), x, group = head_of_rank(rank, ranks), logits_of(rank, ranks), dist.group.WORLD

    def call(hidden, weight, x, ids):
        sources = onepass.VocabParallelLogits(x, group), onepass.LinearLogits(hidden, weight, vocab_group=group)
        return [onepass.softmax_statistics(source, ids).log_probs for source in sources]

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for k in (3, 2, 5):
        ids = torch.arange(12 * k).view(3, 4, k) % VOCAB
        compare(call, [hidden, weight, x], f"{k} classes", ids, compiled=compiled)


def inductor(rank, ranks):
    def call(hidden, weight, bias, x):
        head = onepass.LinearLogits(hidden, weight, bias, vocab_group=dist.group.WORLD)
        logits = onepass.VocabParallelLogits(x, dist.group.WORLD)
        return onepass.cross_entropy(head, TARGET), *onepass.selective_log_softmax_and_entropy(logits, LABELS)

    compare(call, [*head_of_rank(rank, ranks), logits_of(rank, ranks)], "inductor", backend="inductor")


def refused(rank, ranks):
    """Processes that disagree raise the error of eager mode while the function is traced."""
    call = torch.compile(
        lambda x: onepass.entropy_from_logits(onepass.VocabParallelLogits(x, dist.group.WORLD, 7 + rank)),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    with pytest.raises(Exception, match=r"expected the same shape of the rows .* vocab_size .* on all ranks, got"):
        call(torch.zeros(3, 6))


def after_an_error(rank, ranks):
    """Without fullgraph the error is that of eager mode, and calls that follow have their backward."""
    _agreed.clear()
    hidden, *shards = head_of_rank(rank, ranks)
    padded = [torch.nn.functional.pad(t, (0,) * (2 * t.dim() - 1) + (3 * rank,)) for t in shards]

    def call(part, weight, bias, vocab_size):
        options = dict(vocab_group=dist.group.WORLD, vocab_size=vocab_size, sequence_parallel=True)
        return onepass.linear_cross_entropy(part, weight, TARGET[:2], bias=bias, **options)

    compiled = torch.compile(call, backend="eager")
    parts = [hidden[rank : rank + 1], *padded]
    with pytest.raises(ValueError, match=r"^vocab_size: expected 1 to \d+, the columns of all ranks, got 1000"):
        compiled(*parts, 1000)
    compare(lambda *parts: call(*parts, VOCAB), parts, "after an error", compiled=lambda *p: compiled(*p, VOCAB))
