"""Logits, heads and losses of them, and the columns of each process: for the tests of a sharded vocabulary."""

import math

import torch
import torch.distributed as dist

import onepass
from onepass.core.shard import NOT_SHARDED
from onepass.logits.vocab_parallel import VocabParallelLogits

INF = math.inf
ROWS, VOCAB = (3, 4), 37
SPLITS = {1: [37], 2: [20, 17], 3: [5, 13, 19], 4: [12, 12, 12, 1]}


def rows_of(dtype, seed=0):
    """Logits with hard rows, labels in every shard, and a mask."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*ROWS, VOCAB, generator=generator, dtype=torch.float64).mul(4).to(dtype)
    x[0, 1, :20] = -INF  # whole shards
    x[0, 2, 20:] = -INF
    x[0, 3] = -INF
    x[1, 0, 5] = math.nan
    x[1, 1, 30] = INF
    x[1, 2] = 1e4 * x[1, 2]
    x[1, 3, [3, 21, 36]] = 50.0  # a tie between shards
    x[2, 0, :3] = -INF
    target = torch.randint(VOCAB, ROWS, generator=generator)
    target[1, 3] = 21
    target[2, 1] = -100
    mask = torch.ones(ROWS)
    mask[2, 2] = 0
    return x, target, mask


def finite_rows(dtype):
    x, target, mask = rows_of(dtype)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).mul(3).to(dtype), target, mask


def ids_of(target, K=5):
    generator = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:K] for _ in range(target.numel())])
    log_probs = torch.randn(*ROWS, K, generator=generator).log_softmax(-1) - 0.1
    return ids.view(*ROWS, K).to(target.device), log_probs.to(target.device)


def weights(x=None):
    """Of classes, on the device of x."""
    out = torch.rand(VOCAB, generator=torch.Generator().manual_seed(3))
    return out if x is None else out.to(x.device)


def of_statistics(fields):
    return [f for f in vars(fields).values() if f is not None]


TRANSFORMS = [dict(), dict(temperature=0.7, softcap=30.0, logit_scale=0.5)]
CASES = {}
for n, of in enumerate(TRANSFORMS):
    CASES |= {
        f"log_probs {n}": lambda x, t, m, of=of: onepass.selective_log_softmax(x, t.clamp(min=0), row_mask=m, **of),
        f"log_probs of K {n}": lambda x, t, m, of=of: onepass.selective_log_softmax(x, ids_of(t)[0], **of),
        f"entropy {n}": lambda x, t, m, of=of: onepass.entropy_from_logits(x, row_mask=m, **of),
        f"both {n}": lambda x, t, m, of=of: onepass.selective_log_softmax_and_entropy(x, t.clamp(min=0), **of),
        f"statistics {n}": lambda x, t, m, of=of: of_statistics(
            onepass.softmax_statistics(
                x,
                t.clamp(min=0),
                class_weights=weights(x),
                metrics=["is_top1", "log_sum_sq_probs", "mean_logit"],
                **of,
            )
        ),
        f"statistics of K {n}": lambda x, t, m, of=of: of_statistics(
            onepass.softmax_statistics(x, ids_of(t)[0], class_weights=0.5, row_mask=m, metrics=["is_top1"], **of)
        ),
        f"cross_entropy none {n}": lambda x, t, m, of=of: onepass.cross_entropy(
            x,
            t,
            row_mask=m,
            reduction="none",
            label_smoothing=0.1,
            z_loss_weight=1e-3,
            class_weights=weights(x),
            **of,
        ),
        f"cross_entropy {n}": lambda x, t, m, of=of: onepass.cross_entropy(x, t, row_mask=m, **of),
        f"topk_kl_div {n}": lambda x, t, m, of=of: onepass.topk_kl_div(x, *ids_of(t), row_mask=m, **of),
        f"distillation_loss {n}": lambda x, t, m, of=of: onepass.distillation_loss(x, t, *ids_of(t), row_mask=m, **of),
    }
CASES |= {
    "cross_entropy smoothed": lambda x, t, m: onepass.cross_entropy(x, t, row_mask=m, label_smoothing=0.2),
    "cross_entropy of items": lambda x, t, m: onepass.cross_entropy(x, t, num_items=torch.tensor(17)),
    "cross_entropy weighted": lambda x, t, m: onepass.cross_entropy(x, t, class_weights=weights(x), reduction="sum"),
    "topk reverse": lambda x, t, m: onepass.topk_kl_div(x, *ids_of(t), direction="reverse", reduction="none"),
    "topk renormalized": lambda x, t, m: onepass.topk_kl_div(x, *ids_of(t), direction="jsd", renormalize=True),
}


def temperatures(x):
    """Of the rows: powers of 2, which round nothing in hard rows. That of a masked one may be anything."""
    return torch.randint(-1, 3, ROWS, generator=torch.Generator().manual_seed(6)).exp2().to(x.device)


CASES |= {
    "log_probs, own temperatures": lambda x, t, m: onepass.selective_log_softmax(
        x, t.clamp(min=0), row_mask=m, temperature=temperatures(x).masked_fill(m == 0, -1.0)
    ),
    "both, own temperatures": lambda x, t, m: onepass.selective_log_softmax_and_entropy(
        x, t.clamp(min=0), temperature=temperatures(x), softcap=30.0
    ),
    "topk renormalized, own temperatures": lambda x, t, m: onepass.topk_kl_div(
        x, *ids_of(t), renormalize=True, temperature=temperatures(x)
    ),
    "distillation_loss, own temperatures": lambda x, t, m: onepass.distillation_loss(
        x, t, *ids_of(t), row_mask=m, temperature=temperatures(x)
    ),
}


def support_of(x):
    """Ids in every shard and in one alone, none, and all."""
    generator = torch.Generator().manual_seed(9)
    ids = torch.stack([torch.randperm(VOCAB, generator=generator)[:8] for _ in range(math.prod(ROWS))]).view(*ROWS, 8)
    ids[0, 0, :4], ids[0, 0, 4:] = torch.arange(4), -1
    ids[2, 1] = -1
    full = torch.zeros(ROWS, dtype=torch.bool)
    full[1, 1] = full[2, 3] = True
    return ids.to(x.device), full.to(x.device)


CASES |= {
    "log_probs of a support": lambda x, t, m: onepass.selective_log_softmax(
        x, support_of(x)[0][..., :2].clamp(min=0), row_mask=m, support=support_of(x)
    ).clamp(min=-1e9),
    "statistics of a support": lambda x, t, m: of_statistics(
        onepass.softmax_statistics(
            x, support_of(x)[0][..., 0].clamp(min=0), class_weights=weights(x), support=support_of(x),
            metrics=["is_top1", "log_sum_sq_probs"], temperature=temperatures(x),
        )
    ),
}  # fmt: skip


def teacher_like(x, kind):
    """Logits of a teacher: all of them, those of this process, or a head that is sharded like that of the student."""
    logits = finite_rows(torch.float64)[0].flip(0).to(x.device, x.dtype)
    if kind == "whole" or not getattr(x, "shard", NOT_SHARDED).sizes:
        return logits
    ranks, first = x.shard.ranks, x.shard.first
    mine = logits[..., first : first + SPLITS[ranks][x.shard.rank]]
    if kind == "sharded":  # without padding, which the student may have
        return VocabParallelLogits(mine.contiguous(), dist.group.WORLD)
    # logits = I @ logits: the weight's rows are columns of the logits
    states = torch.eye(math.prod(ROWS), dtype=x.dtype, device=x.device).view(*ROWS, -1)
    weight = mine.flatten(0, 1).T.contiguous()
    return onepass.LinearLogits(states, weight, vocab_group=dist.group.WORLD)


def kl_div_case(kind, options):
    own = options.pop("own_temperatures", False)

    def loss(x, t, m):
        own_ones = dict(temperature=temperatures(x), teacher_temperature=temperatures(x).flip(0)) if own else {}
        return onepass.kl_div(x, teacher_like(x, kind), row_mask=m, **options, **own_ones)

    return loss


KL = [
    ("whole", {}), ("whole", dict(direction="jsd", beta=0.3, reduction="none")),
    ("sharded", dict(vocab_size=30)), ("sharded", dict(direction="reverse", **TRANSFORMS[1])),
    ("sharded", dict(direction="jsd", beta=0.7, vocab_size=11, teacher_temperature=2.0, reduction="sum")),
    ("head", dict(temperature=2.0, teacher_logit_scale=0.5)), ("head", dict(direction="jsd", reduction="none")),
    ("head", dict(direction="reverse", num_items=5)),
    ("sharded", dict(own_temperatures=True)), ("head", dict(own_temperatures=True, direction="jsd")),
]  # fmt: skip
CASES |= {f"kl_div {kind} {n}": kl_div_case(kind, options) for n, (kind, options) in enumerate(KL)}


def close(found, expected, tolerance, what):
    found = found.cpu()
    assert found.dtype == expected.dtype and found.shape == expected.shape, what
    if found.dtype == torch.bool:
        assert torch.equal(found, expected), what
        return
    assert torch.equal(found.isnan(), expected.isnan()), f"{what}: NaN {found} {expected}"
    bound = tolerance * max(1.0, expected.nan_to_num(0, 0, 0).abs().max().item() if expected.numel() else 0)
    difference = (found.double() - expected.double()).nan_to_num(0, 0, 0).abs()
    infinite = found.isinf() | expected.isinf()
    assert torch.equal(found[infinite], expected[infinite]), f"{what}: infinite"
    assert not difference.numel() or difference.max() <= bound, f"{what}: {difference.max()} > {bound}"


WIDTH = 6


def head_of(dtype):
    generator = torch.Generator().manual_seed(5)
    shapes = (*ROWS, WIDTH), (VOCAB, WIDTH), (VOCAB,)
    parts = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    return parts, *rows_of(dtype)[1:]
