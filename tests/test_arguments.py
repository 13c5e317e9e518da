"""Bad arguments: one error that names the argument, what came and what was expected."""

import pytest
import torch

import onepass

X = torch.randn(3, 10)
I = torch.tensor([1, 2, 3])  # noqa: E741
IDS, LOG_T = torch.tensor([[1, 2]] * 3), torch.full((3, 2), -1.0)


def topk(ids=IDS, log_t=LOG_T, **options):
    return onepass.topk_kl_div(X, ids, log_t, **options)


def experts(**options):
    routing = onepass.moe.Routing(torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.long), None)
    return onepass.moe.expert_mlp(X, routing, torch.ones(2, 8, 10), torch.ones(2, 10, 4), **options)


CASES = {
    "logits not a tensor": (
        lambda: onepass.entropy_from_logits([1.0]),
        TypeError,
        r"logits: expected a float16.*got \[1.0\]",
    ),
    "logits of integers": (
        lambda: onepass.entropy_from_logits(I),
        TypeError,
        r"logits: .*got torch.int64 of shape \(3,\)",
    ),
    "scalar logits": (lambda: onepass.entropy_from_logits(torch.tensor(1.0)), ValueError, r"logits: .*got \(\)"),
    "no classes": (lambda: onepass.entropy_from_logits(X[:, :0]), ValueError, r"logits: .*got \(3, 0\)"),
    "index dtype": (
        lambda: onepass.selective_log_softmax(X, I.float()),
        TypeError,
        "index: expected an int32 or int64",
    ),
    "index shape": (
        lambda: onepass.selective_log_softmax(X, I[:2]),
        ValueError,
        r"index: expected shape \(3,\) or \(3, 'K'\) for logits of shape \(3, 10\), got \(2,\)",
    ),
    "index with too many dimensions": (
        lambda: onepass.selective_log_softmax(X, I.view(3, 1, 1)),
        ValueError,
        r"index: .*got \(3, 1, 1\)",
    ),
    "index device": (
        lambda: onepass.selective_log_softmax(X, I.to("meta")),
        ValueError,
        "index: expected device cpu.*meta",
    ),
    "target shape": (
        lambda: onepass.cross_entropy(X, I.view(3, 1)),
        ValueError,
        r"target: expected shape \(3,\).*\(3, 1\)",
    ),
    "target of probabilities": (lambda: onepass.cross_entropy(X, X), TypeError, "target: expected an int32 or int64"),
    "temperature 0": (
        lambda: onepass.entropy_from_logits(X, temperature=0.0),
        ValueError,
        "temperature: .*above 0, got 0.0",
    ),
    "temperature NaN": (
        lambda: onepass.entropy_from_logits(X, temperature=float("nan")),
        ValueError,
        "temperature: .*nan",
    ),
    "temperature a tensor": (
        lambda: onepass.entropy_from_logits(X, temperature=X),
        ValueError,
        "temperature: expected a number, or a tensor of shape",
    ),
    "temperatures that are integers": (
        lambda: onepass.entropy_from_logits(X, temperature=torch.ones(X.shape[:-1], dtype=torch.int64)),
        TypeError,
        "temperature: expected a number or a floating-point tensor",
    ),
    "temperatures with a gradient": (
        lambda: onepass.entropy_from_logits(X, temperature=torch.ones(X.shape[:-1], requires_grad=True)),
        ValueError,
        "temperature: expected a constant",
    ),
    "a temperature of 0": (
        lambda: onepass.entropy_from_logits(X, temperature=torch.zeros(X.shape[:-1])),
        ValueError,
        "temperature: expected finite numbers above 0, got 0",
    ),
    "a teacher's temperature of NaN": (
        lambda: onepass.kl_div(X, X, teacher_temperature=torch.full(X.shape[:-1], float("nan"))),
        ValueError,
        "teacher_temperature: expected finite numbers above 0, got nan",
    ),
    "softcap": (lambda: onepass.softmax_statistics(X, softcap=-1.0), ValueError, "softcap: .*above 0, got -1.0"),
    "logit_scale": (
        lambda: onepass.softmax_statistics(X, logit_scale=float("inf")),
        ValueError,
        "logit_scale: .*got inf",
    ),
    "row_mask dtype": (
        lambda: onepass.entropy_from_logits(X, row_mask=torch.ones(3, dtype=torch.complex64)),
        TypeError,
        r"row_mask: expected a bool \(or 0/1\) tensor, got torch.complex64",
    ),
    "row_mask shape": (
        lambda: onepass.entropy_from_logits(X, row_mask=torch.ones(3, 1, dtype=torch.bool)),
        ValueError,
        r"row_mask: expected shape \(3,\), got \(3, 1\)",
    ),
    "class_weights shape": (
        lambda: onepass.softmax_statistics(X, class_weights=torch.ones(9)),
        ValueError,
        r"class_weights: expected shape \(10,\), got \(9,\)",
    ),
    "weight shape": (
        lambda: onepass.cross_entropy(X, I, class_weights=torch.ones(9)),
        ValueError,
        r"class_weights: expected shape \(10,\)",
    ),
    "weight dtype": (
        lambda: onepass.cross_entropy(X, I, class_weights=I),
        TypeError,
        "class_weights: expected a floating-point tensor",
    ),
    "metric": (
        lambda: onepass.softmax_statistics(X, metrics=["top5"]),
        ValueError,
        "metrics: expected one of 'is_top1', 'log_sum_sq_probs', 'mean_logit', got 'top5'",
    ),
    "metric without index": (
        lambda: onepass.softmax_statistics(X, metrics=["is_top1"]),
        ValueError,
        "metrics: .*index=None",
    ),
    "reduction": (
        lambda: onepass.cross_entropy(X, I, reduction="avg"),
        ValueError,
        "reduction: expected one of .*got 'avg'",
    ),
    "label_smoothing": (
        lambda: onepass.cross_entropy(X, I, label_smoothing=1.5),
        ValueError,
        r"label_smoothing: .*\[0, 1\]",
    ),
    "z_loss_weight": (lambda: onepass.cross_entropy(X, I, z_loss_weight=-1.0), ValueError, "z_loss_weight: .*got -1.0"),
    "expanded in place": (
        lambda: onepass.cross_entropy(X[:1].expand(3, 10).requires_grad_(), I, inplace_backward=True),
        ValueError,
        "inplace_backward: .*expanded",
    ),
    "teacher ids dtype": (lambda: topk(ids=X[:, :2]), TypeError, "teacher_ids: expected an int32 or int64"),
    "a shorter teacher": (
        lambda: onepass.topk_kl_div(torch.randn(2, 9, 10), IDS.new_zeros(2, 7, 2), torch.zeros(2, 7, 2)),
        ValueError,
        r"teacher_ids: expected shape \(2, 9, 'K'\), got \(2, 7, 2\): the teacher has 7 positions, the student 9",
    ),
    "one id a row": (lambda: topk(ids=I), ValueError, r"teacher_ids: expected shape \(3, 'K'\), got \(3,\)"),
    "teacher log-probs dtype": (lambda: topk(log_t=IDS), TypeError, "teacher_log_probs: expected a floating-point"),
    "teacher log-probs shape": (
        lambda: topk(log_t=LOG_T[:, :1]),
        ValueError,
        r"teacher_log_probs: expected \(3, 2\), the shape of teacher_ids, got \(3, 1\)",
    ),
    "teacher log-probs with a gradient": (
        lambda: topk(log_t=LOG_T.clone().requires_grad_()),
        ValueError,
        "teacher_log_probs: expected a constant, got a tensor that requires a gradient; detach it",
    ),
    "mask shape": (
        lambda: topk(row_mask=torch.ones(2)),
        ValueError,
        r"row_mask: expected shape \(3,\), got \(2,\)",
    ),
    "mask device": (lambda: topk(row_mask=I.to("meta")), ValueError, "row_mask: expected device cpu"),
    "mask of tokens": (
        lambda: topk(teacher_mask=torch.ones(3)),
        ValueError,
        r"teacher_mask: expected shape \(3, 2\), that of teacher_ids, got \(3,\)",
    ),
    "device of the mask of tokens": (
        lambda: topk(teacher_mask=IDS.to("meta")),
        ValueError,
        "teacher_mask: expected device cpu",
    ),
    "direction": (
        lambda: topk(direction="backward"),
        ValueError,
        "direction: expected one of 'forward', 'reverse', 'jsd', got 'backward'",
    ),
    "items that require a gradient": (
        lambda: onepass.cross_entropy(X, I, num_items=torch.ones(1, requires_grad=True)),
        ValueError,
        "num_items: expected a constant, got a tensor that requires a gradient; detach it",
    ),
    "items that are complex": (
        lambda: onepass.cross_entropy(X, I, num_items=torch.tensor(2 + 0j)),
        TypeError,
        "num_items: expected a real number of one element, got torch.complex64",
    ),
    "loss_fn": (
        lambda: onepass.linear_loss(X, X, I % 3, None),
        TypeError,
        "loss_fn: expected a function of the statistics and the row_inputs, got None",
    ),
    "alpha of silu": (lambda: experts(alpha=1.5), ValueError, "alpha: expected activation='swiglu_clamped' with it"),
    "limit of gelu": (
        lambda: experts(activation="gelu", limit=2.0),
        ValueError,
        "limit: expected activation='swiglu_clamped' with it",
    ),
    "beta": (lambda: topk(direction="jsd", beta=2), ValueError, r"beta: expected a number in \[0, 1\], got 2"),
    "num_items without a sum": (
        lambda: topk(reduction="none", num_items=3),
        ValueError,
        "num_items: expected None with reduction='none', got 3",
    ),
    "mean_group": (
        lambda: topk(mean_group="data"),
        TypeError,
        r"mean_group: expected a ProcessGroup or a DeviceMesh, got 'data' \(str\)",
    ),
    "alpha": (
        lambda: onepass.distillation_loss(X, I, IDS, LOG_T, alpha=-0.1),
        ValueError,
        r"alpha: .*\[0, 1\], got -0.1",
    ),
    "target": (lambda: onepass.distillation_loss(X, IDS, IDS, LOG_T), ValueError, r"target: expected shape \(3,\)"),
    "rows of the teacher": (
        lambda: onepass.kl_div(X, X[:2]),
        ValueError,
        r"teacher_logits: expected the rows of the student, \(3,\), got \(2,\)",
    ),
    "teacher logits": (lambda: onepass.kl_div(X, IDS), TypeError, "teacher_logits: expected a float16"),
    "columns of the teacher": (
        lambda: onepass.kl_div(X, X[:, :8]),
        ValueError,
        "teacher_logits: expected 10 columns, those of the student, got 8; vocab_size says",
    ),
    "lora": (
        lambda: onepass.LinearLogits(X, X, lora=X),
        TypeError,
        r"lora: expected \(A, B, scaling\), two tensors and a number, got torch.float32 of shape \(3, 10\)",
    ),
    "lora of another width": (
        lambda: onepass.LinearLogits(X, X, lora=(X[:2, :9], X[:, :2], 1.0)),
        ValueError,
        r"lora\[0\]: expected shape \('R', 10\) for a weight of shape \(3, 10\), got \(2, 9\)",
    ),
    "lora of two ranks": (
        lambda: onepass.LinearLogits(X, X, lora=(X[:2], X[:, :1], 1.0)),
        ValueError,
        r"lora\[1\]: expected shape \(3, 2\) for a weight of shape \(3, 10\), got \(3, 1\)",
    ),
    "lora of rank 0": (
        lambda: onepass.LinearLogits(X, X, lora=(X[:0], X[:, :0], 1.0)),
        ValueError,
        r"lora\[0\]: expected shape \(0, 10\)",
    ),
    "lora of integers": (
        lambda: onepass.LinearLogits(X, X, lora=(X[:2].long(), X[:, :2], 1.0)),
        TypeError,
        r"lora\[0\]: expected a floating-point tensor, got torch.int64",
    ),
    "lora without a scaling": (
        lambda: onepass.LinearLogits(X, X, lora=(X[:2], X[:, :2], None)),
        TypeError,
        r"lora\[2\]: expected a number, got None",
    ),
    "groups": (
        lambda: onepass.linear_loss(X, X, I % 3, len, groups=3),
        TypeError,
        r"groups: expected the lengths of groups, int32 or int64 \(G,\) or ints, got 3 \(int\)",
    ),
    "groups of other rows": (
        lambda: onepass.linear_loss(X, X, I % 3, len, groups=torch.tensor([1, 3])),
        ValueError,
        "groups: expected lengths that add up to 3, the number of rows, got 4",
    ),
    "groups of negative length": (
        lambda: onepass.linear_loss(X, X, I % 3, len, groups=[4, -1]),
        ValueError,
        "groups: expected 0 or more, got -1",
    ),
    "groups of floats": (
        lambda: onepass.linear_loss(X, X, I % 3, len, groups=torch.tensor([1.0, 2.0])),
        TypeError,
        "groups: expected the lengths of groups.*got torch.float32",
    ),
    "vocab_size": (lambda: onepass.kl_div(X, X, vocab_size=11), ValueError, "vocab_size: expected 1 to 10, got 11"),
    "vocab_size a float": (lambda: onepass.kl_div(X, X, vocab_size=5.0), TypeError, "vocab_size: expected an int"),
    "teacher temperature": (
        lambda: onepass.kl_div(X, X, teacher_temperature=-1.0),
        ValueError,
        "teacher_temperature: .*above 0, got -1.0",
    ),
    "mask of kl_div": (
        lambda: onepass.kl_div(X, X, row_mask=I[:2]),
        ValueError,
        r"row_mask: expected shape \(3,\), got \(2,\)",
    ),
    "strided in place": (
        lambda: onepass.cross_entropy(torch.randn(10, 3).T.requires_grad_(), I, inplace_backward=True),
        ValueError,
        "inplace_backward: expected a contiguous last dimension",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_error_names_the_argument(case):
    call, error, message = CASES[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", ["target", "teacher_ids"])
def test_the_error_names_the_argument_that_has_a_bad_class(eager, name):
    given = {"target": I, "teacher_ids": IDS}
    given[name] = given[name] + 8  # 9 is the last class
    with pytest.raises(IndexError, match=rf"^{name}: expected values in \[0, 10\), got 10 in row "):
        onepass.distillation_loss(X, teacher_log_probs=LOG_T, **given)
