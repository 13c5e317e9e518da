"""Launches of every kernel on tensors without memory, in the cases that test_compile_ahead.py compiles."""

from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import pytest
import torch

from onepass.core.moe_options import EXPERT_TENSORS, ExpertOptions, ExpertTensors, RouterOptions, RoutingGradients
from onepass.core.options import (
    Average,
    FieldGradients,
    Inputs,
    Options,
    PairOptions,
    PairRows,
    Transform,
    empty_results,
)
from onepass.core.quantized import FORMATS, Encoded, WeightFormat, WeightParts
from onepass.core.shard import Shard

pytest.importorskip("triton")
kernels = import_module("onepass.kernels")
layout = import_module("onepass.kernels.layout")
grouped_gemm = import_module("onepass.kernels.grouped_gemm").grouped_gemm
expert_rows = import_module("onepass.kernels.expert_rows")
weight_gradient = import_module("onepass.kernels.grouped_weight_gradient").weight_gradient
# One target is compiled for whole; the others with what needs the most registers.
WHOLE, LARGEST = "sm_90", "everything"


class Case(NamedTuple):
    rows: int
    vocab: int
    options: Options
    padding: int = 0  # elements between rows
    row_mask: bool = False
    K: int = 1
    pair: PairOptions = PairOptions("forward", 0.5)
    tokens: int = 65536
    experts: int = 256
    router: RouterOptions = RouterOptions(8)
    mlp: ExpertOptions | None = None
    trained: tuple[str, ...] = EXPERT_TENSORS  # those of the experts' tensors that there are and that are trained


PLAIN = Options("log_probs", masked=-100)
EVERYTHING = "selected log_normalizer expected_logit weighted_logit is_top1 tempered_log_normalizer mean_logit"
CASES = {
    # Over 2 GB, which AMD's buffer instructions do not reach.
    "log_probs_and_entropy": Case(
        16384,
        128256,
        Options("log_probs entropy"),
        mlp=ExpertOptions(gate_up_scaling=2.0, down_scaling=2.0),
    ),
    # Cross-entropy with label smoothing; one warp; rows that are not aligned.
    "short_rows": Case(
        4096,
        257,
        Options("log_probs log_normalizer weighted_logit", class_weight=0.1),
        row_mask=True,
        pair=PairOptions("reverse", 0.5, Transform(softcap=30.0)),
        experts=11,
        router=RouterOptions(4, "softmax", renormalize=False, score_after_topk=True),
    ),
    # Too few rows for the card, so that they are split; the gradient's rows lie otherwise than the logits'.
    "few_rows": Case(
        1,
        128256,
        Options("log_probs entropy"),
        pair=PairOptions("forward", 0.5, teacher=Transform(softcap=30.0)),
        tokens=64,
        router=RouterOptions(8, "sqrtsoftplus", 7, 3, "max", eps=0.0),
        experts=63,
    ),
    "everything": Case(
        1,
        128256,
        Options(EVERYTHING, Transform(softcap=30.0)),
        padding=1,
        row_mask=True,
        K=64,
        pair=PairOptions("jsd", 0.5, Transform(softcap=30.0), Transform(softcap=30.0)),
        experts=1024,
        router=RouterOptions(32, "sigmoid", 16, 4, softcap=30.0, sums=True),
        mlp=ExpertOptions("swiglu_clamped", True, True),
        trained=("hidden", "weights", "gate_up", "gate_up_bias", "down_bias"),
    ),
}
# Of routers: tokens, experts, whether there is a selection bias, and options.
SELECTIONS = {
    CASES["log_probs_and_entropy"]: (
        (16384, 512, False, RouterOptions(10, counts=False)),
        (8192, 510, False, RouterOptions(8, "sigmoid")),  # all logits are keys
        (8192, 255, False, RouterOptions(8)),  # an odd number: by the general kernel
        (4096, 128, False, RouterOptions(1, "sigmoid")),
        (64, 32, False, RouterOptions(2, count_changed=True)),
        (64, 128, True, RouterOptions(2, "sqrtsoftplus", eps=0.0, count_changed=True)),
        (65536, 256, True, RouterOptions(8, "sigmoid", 8, 4, scale=2.5)),
    ),
    CASES[LARGEST]: (
        # Few experts: passes of Triton take many seconds for the kernels of more.
        (65536, 64, False, RouterOptions(4, "sqrtsoftplus", eps=0.0)),
        (65536, 256, False, RouterOptions(8, eps=1e-6, softcap=30.0)),
        (8192, 128, True, RouterOptions(4, "sigmoid", 8, 4)),  # each lane has whole groups
        (8192, 32, True, RouterOptions(5, "sigmoid", 2, 1, "max", False, score_after_topk=True, softcap=30.0)),
        (8192, 160, True, RouterOptions(10, "sigmoid", 4, 2, score_after_topk=True)),  # by the general kernel
    ),
}


def launch(case: Case, dtype: torch.dtype) -> None:
    """Both passes of a case, of the statistics and of the divergence."""
    options = case.options
    empty = partial(torch.empty, device="meta")
    logits = empty(case.rows, case.vocab + case.padding, dtype=dtype)[:, : case.vocab]
    index = empty((case.rows, case.K) if case.K > 1 else case.rows, dtype=torch.int64)
    row_mask = empty(case.rows, dtype=torch.bool) if case.row_mask else None
    weighted = options.wants("weighted_logit")
    class_weights = empty(case.vocab) if weighted and not options.class_weight else None
    out = empty(case.rows, case.vocab, dtype=dtype)
    temperature = None if row_mask is None else empty(case.rows)
    read = PairRows(row_mask, temperature, temperature)
    numbers = kernels.divergence(logits, out, read, case.pair)
    kernels.divergence_gradient(logits, out, read, numbers, empty(case.rows), case.padding > 0, case.pair, out)
    inputs = Inputs(index, row_mask, class_weights, temperature)
    packed, selected, _ = kernels.softmax_statistics(logits, inputs, options)
    if case.padding:
        kernels.softmax_statistics(logits, inputs, options._replace(invariant=True))
        kernels.divergence(out, logits, read, case.pair._replace(invariant=True))
    states = kernels.shard_statistics(logits, inputs, options)
    row = empty(case.rows, dtype=torch.int64)
    of_support = inputs._replace(support=empty(case.rows * 64, dtype=torch.int64), starts=row, lengths=row)
    restricted = options._replace(fields=" ".join(n for n in options.names() if n != "mean_logit"))
    kernels.softmax_statistics(logits, of_support, restricted)
    kernels.shard_statistics(logits, of_support, restricted)
    shard = Shard(0, (case.vocab, case.vocab) if case.K > 1 else (case.vocab,) * 3)
    kernels.merge_shards(torch.empty_like(states).expand(shard.ranks, *states.shape), logits, inputs, shard, options)
    of_shards = case.pair._replace(direction="reverse" if case.pair.direction == "reverse" else "forward")
    pairs = kernels.divergence_states(logits, out, read, of_shards)
    kernels.merge_divergences(pairs.expand(shard.ranks, *pairs.shape), logits, out, read, of_shards)
    grad = empty(case.rows)
    upstream = FieldGradients(
        grad,
        grad if (options.wants("expected_logit") or options.wants("entropy")) else None,
        grad if weighted else None,
        grad if options.wants("tempered_log_normalizer") else None,
        selected,
    )
    kernels.softmax_gradient(logits, inputs, packed, upstream, options, out)
    kernels.softmax_gradient(logits, of_support, packed, upstream, restricted, out)
    padded = inputs._replace(support=empty(case.rows, 64, dtype=torch.int64))
    kernels.softmax_statistics(logits, padded, restricted)
    kernels.softmax_gradient(logits, padded, packed, upstream, restricted, out)
    # With Triton 3.7, two instructions of the variant with everything spill on sm_80 (docs/versions.md).
    others = ("is_top1",) if weighted and layout.compute_capability() == 80 else ()
    others += "log_sum_sq_probs", "tempered_log_normalizer", "mean_logit"
    fields = [n for n in options.names() if n not in others]
    of_loss = options._replace(fields=" ".join(fields))
    whole_vectors, one = (
        empty(case.rows, -(-case.vocab // 8) * 8, dtype=dtype)[:, : case.vocab],
        index.view(-1)[: case.rows],
    )
    assert kernels.supports_fused_loss(whole_vectors, one, of_loss)
    upstream = FieldGradients(grad, upstream.expected_logit, upstream.weighted_logit, None, grad)
    for written in (whole_vectors, out.to(torch.bfloat16)) if dtype == torch.float32 else (whole_vectors,):
        kernels.softmax_loss(whole_vectors, inputs._replace(index=one), upstream, of_loss, written)
    kernels.scale(out, empty((), dtype=torch.float32), out)
    kernels.scale(empty(case.vocab), empty((), dtype=torch.float32), empty(case.vocab, dtype=dtype))
    of_rows = empty(case.rows)
    for other in (None, of_rows):
        kernels.scale(empty(case.rows, 512), of_rows, empty(case.rows, 512, dtype=dtype), other)
    states = empty(case.rows, 512, dtype=dtype)
    kernels.scale(states, empty(case.rows, dtype=torch.bool), states)
    hidden, weight = empty(case.rows, 512, dtype=dtype), empty(case.vocab, 512, dtype=dtype)
    rows = empty(case.rows, -(-case.vocab // 8) * 8, dtype=dtype)[:, : case.vocab]
    kernels.row_gemm(hidden, weight.t(), weight[:, 0], rows)
    kernels.row_gemm(rows, weight, None, hidden)
    for count, columns, width in ((65, 1 << 17, 2048), (129, 151936, 896), (256, 1 << 17, 1024)):
        kernels.few_rows_mm(empty(count, columns, dtype=dtype), empty(count, width, dtype=dtype))
    read_once = inputs._replace(index=one)
    unweighted = options._replace(fields=" ".join(n for n in options.names() if n != "weighted_logit"))
    if kernels.supports_linear_statistics(dtype, weight.t(), read_once, unweighted):
        for rounds, shard in ((True, False), (False, True)):
            found = (torch.empty_like(states), None, None) if shard else empty_results(hidden, one, options)
            bias = weight[:, 0] if shard or case.padding else None
            given = hidden, weight.t(), bias, read_once, unweighted, rounds, rounds and case.padding > 0
            kernels.linear_statistics(*given, found, shard)
        other = weight.t().contiguous()[:256]
        of_rows = read_once._replace(index=None)
        narrow = hidden[:, :256] if case.padding else empty(case.rows, 256, dtype=dtype)
        kernels.linear_statistics(narrow, other, None, of_rows, unweighted, True, False, found)
    fields = [n for n in options.names() if n in ("entropy", "is_top1")]
    of_exponentials = Options(" ".join(["log_probs", *fields]), masked=options.masked)
    exponentials = empty(case.rows, -(-case.vocab // 8) * 8 + case.padding, dtype=dtype)[:, : case.vocab]
    whole, split = (exponentials, None), (exponentials[:, :256], exponentials[:, 256:])
    narrow_heads = [(hidden[:, :256], weight[:, :256], whole), (hidden[:, :128], weight[:, :128].contiguous(), whole)]
    for a, w, parts in ((hidden, weight, split if case.vocab > 256 else whole), *narrow_heads):
        read_once = Inputs(one, row_mask)
        if kernels.supports_linear_exponentials(dtype, 2**30, w.t(), read_once, of_exponentials):
            found = empty_results(exponentials, one, of_exponentials)
            factors = kernels.linear_exponentials(a, w.t(), read_once, of_exponentials, found, *parts)
            kernels.scale_exponentials(factors, grad, *parts)
    number, mean = empty((), dtype=torch.float32), Options("log_probs", options.transform)
    values, of_average, mask = (
        empty((64,), dtype=torch.float32),
        empty((3,), dtype=torch.float32),
        empty((64,), dtype=torch.bool),
    )
    for average in (Average(-1.0, True), Average(1.0, False, number)):
        kernels.row_average(
            values, mask, average, kernels.compute_row_weight(empty((64, 8)), mask, average, of_average)
        )
        few = Inputs(one, one, None, inputs.temperature), average, of_average, mean
        if kernels.supports_fused_loss(whole_vectors, one, mean):
            kernels.softmax_average(whole_vectors, *few, whole_vectors)
        every = empty(1024, 1 << 16, dtype=dtype)  # of many rows
        index_of_every, undivided = empty(1024, dtype=torch.int64), average._replace(divisor=None)
        of_every = every, index_of_every
        kernels.prepare_average(*of_every, undivided, PLAIN, True).average(*of_every, (0, 0), of_average, None)
        kernels.prepare_average(*of_every, undivided, PLAIN, False).average(*of_every, (0, 0))
    of_mean = FieldGradients(selected=number, row_weight=of_average)
    of_rows = Inputs(one, row_mask)
    kernels.softmax_gradient(logits, of_rows, packed, of_mean, mean, out, again=True)
    tokens = index.view(case.rows, -1)
    kernels.selected_logits(logits, tokens, options.transform)
    for columns in (tokens, tokens.new_empty(case.rows, 130)):
        of_columns = torch.empty_like(columns, dtype=torch.float32)
        kernels.selected_logits_gradient(logits, columns, of_columns, options.transform)
    of_teacher = torch.empty_like(tokens, dtype=dtype)
    masks = (row_mask, torch.empty_like(tokens, dtype=torch.bool)) if row_mask is not None else (None, None)
    kernels.teacher_tokens(of_teacher, tokens, *masks, row_mask is None)
    routed = empty(case.tokens, case.experts, dtype=dtype)
    bias, token_mask = (empty(case.experts), empty(case.tokens, dtype=torch.bool)) if case.router.sums else (None, None)
    weights, experts, _, prob_sums, logsumexp, _ = kernels.route(routed, bias, token_mask, None, case.router)
    grads = RoutingGradients(weights, prob_sums, logsumexp)
    kernels.route_gradient(routed, experts, token_mask, None, grads, case.router)
    selections = SELECTIONS.get(case, ()) if dtype == torch.bfloat16 else ()
    if layout.compute_capability() != 90:  # the targets that are not compiled for whole: one of each kernel
        selections = selections[::2]
    for tokens, count, biased, router in selections:
        given = torch.empty((tokens, router.k), dtype=torch.int16, device="meta") if router.count_changed else None
        padding = 4 if router.count_changed else 0
        rows = empty(tokens, count + padding, dtype=dtype)[:, :count]
        kernels.route(rows, empty(count) if biased else None, None, given, router)
    if dtype == torch.bfloat16:  # a replayed choice
        kernels.route(routed, bias, token_mask, experts.short(), case.router._replace(count_changed=True))
        kernels.route_gradient(routed, experts, token_mask, experts.short(), grads, case.router)
    if case.mlp is not None and dtype == torch.bfloat16:
        launch_experts(case.mlp, case.trained, partial(empty, dtype=dtype))


def launch_experts(options: ExpertOptions, trained: tuple[str, ...], empty: Any) -> None:
    """At the sizes of Qwen3-30B-A3B, and at odd ones."""
    tokens, H, width, E, K = (64, 200, 72, 7, 3) if options.transposed else (8192, 2048, 768, 128, 8)
    weights, ids = empty(tokens, K, dtype=torch.float32), empty(tokens, K, dtype=torch.int64)
    gate_up, down = empty(E, 2 * width, H), empty(E, H, width)
    if options.transposed:
        gate_up, down = empty(E, H, 2 * width), empty(E, width, H)
    biases = empty(E, 2 * width), empty(E, H)
    loras = empty(E, 16, H), empty(E, 2 * width, 16), empty(E, 16, width), empty(E, H, 16)
    every = ExpertTensors(empty(tokens, H), weights, gate_up, down, *biases, *loras)
    absent = [name for name in EXPERT_TENSORS[4:] if name not in trained]
    tensors = every._replace(**dict.fromkeys(absent))
    arguments = tensors, ids, kernels.sort_by_expert(ids, E)
    few = ids[:48]  # sorted in one launch; and rows that are sorted already
    kernels.sort_by_expert(few, E)
    kernels.sort_by_expert(few, E, empty(E, dtype=torch.int64))
    out, h = kernels.expert_mlp(*arguments, True, options)
    needed = [name in trained for name in EXPERT_TENSORS]
    kernels.expert_mlp_gradient(out, h, *arguments, needed, options)
    # The second GEMM with one expert a token, for as many rows as other processes send.
    groups = kernels.sort_by_expert(empty(tokens * K, 1, dtype=torch.int64), E)
    given = dict(
        adapter=(empty(tokens * K, 16), loras[3]), bias=biases[1], weights=empty(tokens * K, dtype=torch.float32)
    )
    down = down.mT if options.transposed else down
    expert_rows.clear_dropped(grouped_gemm(empty(tokens * K, width), down, groups, scatter=True, **given), groups)
    many = kernels.sort_by_expert(empty(4096, 2, dtype=torch.int64), 8)  # rows of an expert, for which tiles are larger
    for rows, columns in ((width, H), (H, width)):
        weight_gradient(empty(8192, rows), empty(8192, columns), empty(8, rows, columns), many)
    kernels.sum_rows(tensors.hidden, ids.int())
    kernels.sum_rows_gradient(tensors.hidden, ids.int(), len(tensors.hidden), weights, tensors.hidden)
    kernels.sum_rows_gradient(tensors.hidden, ids.int(), len(tensors.hidden))
    expert_rows.combine(empty(tokens * K, H), weights, ids, E)
    launch_few_rows(empty, options)
    launch_decode(empty, *(1536, 2048) if options.transposed else (33, 71))
    # Weights that the grouped GEMM decodes, for many rows of an expert and for few, and one that it reads in chunks.
    quantized = (128, "nf4", False), (4, "fp8_block", True), (512, "nf4", False)
    quantized, options = quantized[: 1 if options.transposed else 3], options._replace(transposed=False)
    for rows, name, flipped in quantized:
        tokens = rows * E // K
        groups = kernels.sort_by_expert(empty(tokens, K, dtype=torch.int64), E)
        weight = encoded(empty, name, (E, 2 * width, H))[-1]
        low = empty(tokens * K, 16)
        if flipped:
            given = dict(scatter=True, adapter=(low, empty(E, H, 16)))
            grouped_gemm(empty(tokens * K, 2 * width), weight.mT, groups, options, **given)
        else:
            given = dict(share=K, glu=True, adapter=(low, empty(E, 2 * width, 16)), bias=biases[0])
            grouped_gemm(empty(tokens, H), weight, groups, options, **given)


def launch_few_rows(empty: Any, options: ExpertOptions) -> None:
    """Products with as many rows of an expert as Hopper's kernel takes."""
    E, K, N = (8, 512, 520) if options.transposed else (10, 2048, 384)
    ids = empty(100 * E, 2, dtype=torch.int64)
    groups = kernels.sort_by_expert(ids, E)
    x, rows = empty(100 * E, K), empty(200 * E, N + 8)[:, :N]
    gate_up, down = empty(E, 2 * 264, K), empty(E, K, N)
    low, lora = empty(200 * E, 72), empty(E, 2 * 264, 72)
    h = empty(200 * E, 2 * 264)
    if options.transposed:
        gate_up, lora, down = gate_up.mT.contiguous().mT, lora.mT.contiguous().mT, down.mT.contiguous().mT
    given = dict(share=2, glu=True, adapter=(low, lora), bias=empty(E, 2 * 264))
    grouped_gemm(x, gate_up, groups, options, **given)
    for activation in (options.activation, "gelu"):
        grouped_gemm(x, gate_up, groups, options._replace(activation=activation), share=2, glu=True, h=h)
    weights = empty(200 * E, dtype=torch.float32)
    grouped_gemm(rows, down, groups, scatter=True, weights=weights, adapter=(low[:, :16].contiguous(), empty(E, K, 16)))
    grouped_gemm(h, gate_up.mT, groups, bias=empty(E, K), scale=0.5)
    if not options.transposed:
        grouped_gemm(rows, empty(E, 260, N), groups)  # rows that do not start on 16 bytes, which no descriptor stores
    far = empty(100 * E, 2**22)[:, :K]  # rows whose places take 64 bits
    grouped_gemm(far, gate_up, groups, options, share=2, glu=True, h=h)
    thin = kernels.sort_by_expert(empty(80 * E, 2, dtype=torch.int64), E)  # few rows of an expert, with biases
    grouped_gemm(x[: 80 * E], gate_up, thin, options, share=2, glu=True, bias=empty(E, 2 * 264), h=h[: 160 * E])
    grouped_gemm(rows[: 160 * E], down, thin, scatter=True, weights=weights[: 160 * E])
    grouped_gemm(h[: 160 * E], gate_up.mT, thin, bias=empty(E, K))
    of_process = kernels.sort_by_expert(empty(200 * E, 1, dtype=torch.int64), E)  # rows that other processes have sent
    grouped_gemm(empty(200 * E, K), gate_up, of_process, options, share=1, glu=True, h=h)


def launch_decode(empty: Any, rows: int, columns: int) -> None:
    """Every format of quantized weights."""
    for name in FORMATS:
        for n, weight in enumerate(encoded(empty, name, (2, rows, columns))):
            offsets = empty(3, dtype=torch.int32) if n == 0 else None
            kernels.decode(weight, empty(2, rows, columns), 0, offsets)


def encoded(empty: Any, name: str, shape: tuple[int, int, int]) -> list[Encoded]:
    """Weights in a format, without and with nested scales."""
    format, (E, rows, columns) = FORMATS[name], shape
    height, width = format.block
    bytes_, floats = empty(0, dtype=torch.uint8), empty(0, dtype=torch.float32)
    of = WeightFormat(name, E, rows, columns, height, width or columns, E * rows * columns)  # two chunks
    scales = floats if format.scales == "float" else bytes_
    variants = [WeightParts(scales, floats if format.scales == "e4m3" else None)]
    if format.flat:
        variants.append(WeightParts(bytes_, floats, floats, floats))
    data = bytes_.to(torch.int8) if name == "int8" else bytes_
    return [Encoded(data, parts, of, torch.bfloat16) for parts in variants]
