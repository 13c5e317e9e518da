"""Bad arguments: one error that names the argument, what came and what was expected."""

import pytest
import torch

import onepass

X = torch.randn(3, 10)
I = torch.tensor([1, 2, 3])  # noqa: E741
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
        TypeError,
        "temperature: expected a number",
    ),
    "softcap": (lambda: onepass.softmax_statistics(X, softcap=-1.0), ValueError, "softcap: .*above 0, got -1.0"),
    "logit_scale": (
        lambda: onepass.softmax_statistics(X, logit_scale=float("inf")),
        ValueError,
        "logit_scale: .*got inf",
    ),
    "row_mask dtype": (
        lambda: onepass.entropy_from_logits(X, row_mask=torch.ones(3)),
        TypeError,
        r"row_mask: expected a bool \(or 0/1 integer\) tensor, got torch.float32",
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
    "weight shape": (lambda: onepass.cross_entropy(X, I, torch.ones(9)), ValueError, r"weight: expected shape \(10,\)"),
    "weight dtype": (lambda: onepass.cross_entropy(X, I, I), TypeError, "weight: expected a floating-point tensor"),
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
