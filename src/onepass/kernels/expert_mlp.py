"""`moe.expert_mlp` on a GPU: the grouped GEMMs and the kernels between them, forward and backward."""

from torch import Tensor

from onepass.core.moe_options import EXPERT_TENSORS, ExpertGradients, ExpertOptions, ExpertTensors, Groups
from onepass.kernels.decoded_experts import DecodedExperts, keep_for, kept_for, release
from onepass.kernels.expert_rows import bias_gradient, clear_dropped, glu_gradient, sum_rows
from onepass.kernels.grouped_gemm import grouped_gemm
from onepass.kernels.grouped_weight_gradient import weight_gradient


def expert_mlp(
    tensors: ExpertTensors, experts: Tensor, groups: Groups, save_h: bool, options: ExpertOptions
) -> tuple[Tensor, Tensor | None]:
    """The output ``(T, H)`` and, if ``save_h``, the rows before the activation, which `expert_mlp_gradient` needs.

    These rows are ``(T·K, 2 I)``, sorted by expert. With one expert a token, as rows have that other processes sent,
    nothing is summed: the second GEMM writes the output.
    """
    t, o, K = tensors, options, experts.shape[1]
    release(t.hidden)
    decoded = DecodedExperts(t.gate_up, t.down)
    w1, w2 = (w.mT if o.transposed else w for w in (t.gate_up, t.down))
    h = t.hidden.new_empty((experts.numel(), w1.shape[1])) if save_h else None
    adapter1 = adapter2 = None  # the rows (T·K, R) between A and B of a LoRA adapter, and B
    if t.gate_up_lora_a is not None and t.gate_up_lora_b is not None:
        low1 = grouped_gemm(t.hidden, t.gate_up_lora_a, groups, share=K, scale=o.gate_up_scaling)
        adapter1 = low1, t.gate_up_lora_b
    activated = grouped_gemm(t.hidden, w1, groups, o, share=K, glu=True, adapter=adapter1, bias=t.gate_up_bias, h=h)
    if t.down_lora_a is not None and t.down_lora_b is not None:
        adapter2 = grouped_gemm(activated, t.down_lora_a, groups, scale=o.down_scaling), t.down_lora_b
    weights = t.weights if K == 1 else None
    y = grouped_gemm(activated, w2, groups, scatter=K == 1, adapter=adapter2, bias=t.down_bias, weights=weights)
    if h is not None:
        keep_for(h, decoded)
    return clear_dropped(y, groups) if K == 1 else sum_rows(y, groups.places.view(experts.shape), t.weights), h


def expert_mlp_gradient(
    grad: Tensor, h: Tensor | None, tensors: ExpertTensors, experts: Tensor, groups: Groups, needed: list[bool],
    options: ExpertOptions,
) -> ExpertGradients:  # fmt: skip
    """The gradients of the tensors, None where not needed.

    ``grad`` is the upstream gradient ``(T, H)``, and ``h`` the second result of `expert_mlp`.
    """
    t, o, K = tensors, options, experts.shape[1]
    kept_for(h, DecodedExperts(t.gate_up, t.down))  # type: ignore[arg-type]
    w1, w2 = (w.mT if o.transposed else w for w in (t.gate_up, t.down))
    need = dict(zip(EXPERT_TENSORS, needed))
    found: dict[str, Tensor | None] = dict.fromkeys(EXPERT_TENSORS)

    adapter1 = adapter2 = up1 = up2 = None
    if t.down_lora_a is not None and t.down_lora_b is not None:
        up2 = grouped_gemm(grad, t.down_lora_b.mT, groups, share=K, scale=o.down_scaling)
        adapter2 = up2, t.down_lora_a.mT
    of_activated = grouped_gemm(grad, w2.mT, groups, share=K, adapter=adapter2)
    activated = need["down"] or need["down_lora_a"] or need["down_lora_b"]
    dh, of_weights = glu_gradient(of_activated, h, t.weights, groups, o, activated)  # type: ignore[arg-type]
    if need["weights"]:
        if t.down_bias is not None:
            of_bias = of_weights.new_zeros((t.weights.numel(), 1))
            grouped_gemm(grad, t.down_bias.unsqueeze(1), groups, share=K, scatter=True, out=of_bias)
            of_weights += of_bias.view_as(t.weights)
        found["weights"] = of_weights
    weighted = of_activated  # `glu_gradient` has overwritten it with the activated rows times their routing weights
    if need["down"]:
        found["down"] = weight_gradient(grad, weighted, t.down, groups, share_a=K, transposed=o.transposed)
    if need["down_lora_a"]:
        found["down_lora_a"] = weight_gradient(up2, weighted, t.down_lora_a, groups)  # type: ignore[arg-type]
    if need["down_lora_b"]:
        low2 = grouped_gemm(weighted, t.down_lora_a, groups, scale=o.down_scaling)  # type: ignore[arg-type]
        found["down_lora_b"] = weight_gradient(grad, low2, t.down_lora_b, groups, share_a=K)  # type: ignore[arg-type]
    del of_activated, weighted  # before more memory is allocated
    if t.gate_up_lora_a is not None and t.gate_up_lora_b is not None:
        up1 = grouped_gemm(dh, t.gate_up_lora_b.mT, groups, scale=o.gate_up_scaling)
        adapter1 = up1, t.gate_up_lora_a.mT
    if need["hidden"]:
        of_rows = grouped_gemm(dh, w1.mT, groups, scatter=K == 1, adapter=adapter1)
        found["hidden"] = (
            clear_dropped(of_rows, groups) if K == 1 else sum_rows(of_rows, groups.places.view(experts.shape))
        )
        del of_rows
    if need["gate_up"]:
        found["gate_up"] = weight_gradient(dh, t.hidden, t.gate_up, groups, share_b=K, transposed=o.transposed)
    if need["gate_up_lora_a"]:
        found["gate_up_lora_a"] = weight_gradient(up1, t.hidden, t.gate_up_lora_a, groups, share_b=K)  # type: ignore[arg-type]
    if need["gate_up_lora_b"]:
        low1 = grouped_gemm(t.hidden, t.gate_up_lora_a, groups, share=K, scale=o.gate_up_scaling)  # type: ignore[arg-type]
        found["gate_up_lora_b"] = weight_gradient(dh, low1, t.gate_up_lora_b, groups)  # type: ignore[arg-type]
    if need["gate_up_bias"]:
        found["gate_up_bias"] = bias_gradient(dh, None, t.gate_up_bias, groups, 0)  # type: ignore[arg-type]
    if need["down_bias"]:
        found["down_bias"] = bias_gradient(grad, t.weights, t.down_bias, groups, K)  # type: ignore[arg-type]
    return tuple(found.values())  # type: ignore[return-value]
