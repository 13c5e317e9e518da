"""`onepass doctor`: show versions, backends and patches, and check every operation against its definition."""

import os
from collections.abc import Callable
from itertools import product
from typing import Annotated, get_args

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import onepass
from onepass.backend import KERNELS, name_of_backend
from onepass.cli.environment import environment, package_version
from onepass.cli.tables import table_of
from onepass.core.checks import FLOATS
from onepass.core.options import Metric
from onepass.integrations.patching import LIBRARIES, plan

PEERS = ("transformers", "trl", "liger-kernel", "quack-kernels", "axolotl", "tokenizers", "typer", "rich", "matplotlib")
SWITCHES = (
    "ONEPASS_AUTOTUNE_STORE", "ONEPASS_BATCH_INVARIANT", "ONEPASS_DEBUG", "ONEPASS_PATCH", "TRITON_INTERPRET",
)  # fmt: skip
SHAPE = (3, 5, 1003)  # a vocabulary that no vector width divides
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = 1e-5  # of float32 arithmetic
SMOOTHING, Z_WEIGHT, CAP, TEMPERATURE = 0.1, 1e-3, 5.0, 0.7
EXPERTS, K = 60, 4
IGNORED = 0  # a class, so that one index serves every operation

Operation = Callable[[Tensor, Tensor, Tensor], tuple[Tensor | None, ...]]  # (logits, index, class weights) -> results

# The definitions: plain torch on float64 logits, independent of onepass.


def log_probs(x: Tensor, index: Tensor) -> Tensor:
    return x.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def entropy(x: Tensor) -> Tensor:
    return -(x.softmax(-1) * x.log_softmax(-1)).sum(-1)


def cross_entropy(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    valid = target != IGNORED
    z, target = CAP * (x[valid] / CAP).tanh(), target[valid]
    hard, smooth = -weight[target] * log_probs(z, target), -(weight * z.log_softmax(-1)).mean(-1)
    mean = ((1 - SMOOTHING) * hard + SMOOTHING * smooth).sum() / weight[target].sum()
    return mean + Z_WEIGHT * z.logsumexp(-1).square().mean()


def statistics(x: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    shift = x.detach().amax(-1)  # treated as a constant in the derivatives below
    z = x - shift.unsqueeze(-1)
    expected, selected = (z.softmax(-1) * z).sum(-1), z.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    log_sum_sq_probs = (2 * x.detach().log_softmax(-1)).logsumexp(-1)
    return shift, z.logsumexp(-1), expected, selected, selected.detach() == 0, log_sum_sq_probs, x.detach().mean(-1)


def onepass_statistics(x: Tensor, index: Tensor) -> tuple[Tensor | None, ...]:
    s = onepass.softmax_statistics(x, index, metrics=get_args(Metric))
    return s.shift, s.log_normalizer, s.expected_logit, s.selected, s.is_top1, s.log_sum_sq_probs, s.mean_logit


def onepass_cross_entropy(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return onepass.cross_entropy(
        x,
        target,
        class_weights=weight,
        ignore_index=IGNORED,
        label_smoothing=SMOOTHING,
        z_loss_weight=Z_WEIGHT,
        softcap=CAP,
    )


def kl_div(x: Tensor, y: Tensor) -> Tensor:
    log_s, log_t = x.log_softmax(-1), y.log_softmax(-1)
    return (log_t.exp() * (log_t - log_s)).sum(-1)


def top3(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and log-probs of a teacher."""
    ids = (index.unsqueeze(-1) + torch.arange(3, device=x.device)) % x.shape[-1]
    return ids, torch.tensor([0.5, 0.3, 0.1], dtype=x.dtype, device=x.device).log().expand_as(ids)


def topk_kl_div(x: Tensor, index: Tensor) -> Tensor:
    ids, log_t = top3(x, index)
    return (log_t.exp() * (log_t - x.log_softmax(-1).gather(-1, ids))).sum(-1)


OPERATIONS: dict[str, tuple[Operation, Operation]] = {
    "selective_log_softmax": (
        lambda x, i, c: (onepass.selective_log_softmax(x, i, temperature=TEMPERATURE),),
        lambda x, i, c: (log_probs(x / TEMPERATURE, i),),
    ),
    "entropy_from_logits": (
        lambda x, i, c: (onepass.entropy_from_logits(x, temperature=TEMPERATURE),),
        lambda x, i, c: (entropy(x / TEMPERATURE),),
    ),
    "selective_log_softmax_and_entropy": (
        lambda x, i, c: onepass.selective_log_softmax_and_entropy(x, i),
        lambda x, i, c: (log_probs(x, i), entropy(x)),
    ),
    "cross_entropy": (
        lambda x, i, c: (onepass_cross_entropy(x, i, c),),
        lambda x, i, c: (cross_entropy(x, i, c),),
    ),
    "topk_kl_div": (
        lambda x, i, c: (onepass.topk_kl_div(x, *top3(x.detach().float(), i), reduction="none"),),
        lambda x, i, c: (topk_kl_div(x, i),),
    ),
    "kl_div": (
        lambda x, i, c: (onepass.kl_div(x, x.detach().flip(-1), reduction="none"),),
        lambda x, i, c: (kl_div(x, x.detach().flip(-1)),),
    ),
    "softmax_statistics": (
        lambda x, i, c: onepass_statistics(x, i),
        lambda x, i, c: statistics(x, i),
    ),
    "linear_cross_entropy": (  # the weight is the identity matrix, so the logits are x
        lambda x, i, c: (onepass.linear_cross_entropy(x, torch.eye(SHAPE[-1], dtype=x.dtype, device=x.device), i),),
        lambda x, i, c: (-log_probs(x, i).mean(),),
    ),
    "moe.softmax_topk": (
        lambda x, i, c: (onepass.moe.softmax_topk(x[..., :EXPERTS], K).weights,),
        # Of equal logits, the first ones.
        lambda x, i, c: (x[..., :EXPERTS].sort(dim=-1, descending=True, stable=True)[0][..., :K].softmax(-1),),
    ),
}


def evaluate(operation: Operation, x: Tensor, index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """All results in one vector, and the gradient under upstream gradients of both signs; float64."""
    x = x.detach().requires_grad_()
    results = [r for r in operation(x, index, weight.to(x.dtype)) if r is not None]
    outputs = [r for r in results if r.requires_grad]
    upstream = [torch.linspace(-1, 1, r.numel(), dtype=r.dtype, device=r.device).view(r.shape) for r in outputs]
    (gradient,) = torch.autograd.grad(outputs, x, upstream)
    return torch.cat([r.detach().double().flatten() for r in results]), gradient.double()


def compare(value: Tensor, expected: Tensor, bound: Tensor) -> tuple[str, bool]:
    error = (value - expected).abs()
    share = (error / bound).max().item()
    return f"{error.max().item():.1e} ({share:.1g})", share <= 1  # False for NaN


def path(device: str, dtype: torch.dtype) -> str:
    try:
        return name_of_backend(torch.empty(1, dtype=dtype, device=device))
    except ImportError as error:  # of Triton
        return f"none ({error})"


def check(name: str, device: str, dtype: torch.dtype) -> tuple[str, str, bool]:
    """The largest errors of results and gradient, also as fractions of their bounds, and whether these hold."""
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(SHAPE, generator=generator)).to(device, dtype)
    index = torch.randint(1, SHAPE[-1], SHAPE[:-1], generator=generator).to(device)
    index[0, 0], index[-1, -1] = x[0, 0].argmax(), IGNORED
    weight = torch.rand(SHAPE[-1], generator=generator).to(device, dtype)
    ours, definition = OPERATIONS[name]
    results, gradient = evaluate(ours, x, index, weight)
    expected, exact = evaluate(definition, x.double(), index, weight)
    # A gradient is computed in float32 and rounded once to the dtype of the logits; Triton's interpreter cuts it off.
    interpreted = device == "cpu" and path(device, dtype) == KERNELS
    rounding = torch.finfo(dtype).eps * (1 if interpreted else 0.5) + TOLERANCE
    result_error, first = compare(results, expected, TOLERANCE * expected.abs().clamp(min=1))
    # It is a difference of numbers up to the upstream gradient, which is at most 1, times a probability.
    gradient_error, second = compare(gradient, exact, rounding * exact.abs() + 0.1 * TOLERANCE)
    return result_error, gradient_error, first and second


def patches(library: str) -> list[str]:
    """What `onepass.patch` would replace in a library, or why it would not."""
    try:
        replaced, kept = plan(library)
    except (RuntimeError, ModuleNotFoundError) as error:
        return [str(error)]
    return [str(line) for line in (*replaced, *kept)]


def experts_of(name: str) -> list[str]:
    """What `moe.describe` says of a model of transformers, which is built from its configuration, without memory.

    Raises:
        ImportError, OSError, ValueError: transformers is missing, or does not know the model.
    """
    import transformers
    from transformers.quantizers import AutoHfQuantizer

    from onepass.integrations.transformers_experts import NAME, register

    register()
    config = transformers.AutoConfig.from_pretrained(name)
    quantized = getattr(config, "quantization_config", None)
    is_causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING  # not so if it also reads images
    kind = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModel
    with torch.device("meta"):
        model = kind.from_config(config, experts_implementation=NAME)
        if quantized is not None and quantized.get("quant_method") in ("fp8", "mxfp4"):  # others leave experts alone
            AutoHfQuantizer.from_config(quantized, pre_quantized=True).preprocess_model(model)
    return [str(line) for line in onepass.moe.describe(model)] or ["no experts of three dimensions"]


def doctor(
    model: Annotated[
        str | None,
        typer.Option(help="A model of transformers, of which only the experts are described: a name or a folder."),
    ] = None,
) -> None:
    """Show versions, paths and what a patch would replace; check every operation against its definition."""
    console = Console()
    if model is not None:
        try:
            lines = experts_of(model)
        except Exception as error:  # of transformers or the network
            print(f"{model} cannot be read: {type(error).__name__}: {str(error).partition(chr(10))[0]}")
            raise typer.Exit(1) from None
        print(*lines, sep="\n")
        return
    facts = Table.grid(padding=(0, 2))
    found = environment() | {name: package_version(name) for name in PEERS}
    found |= {name: os.environ[name] for name in SWITCHES if name in os.environ}
    for key, value in found.items():
        facts.add_row(key, "-" if value is None else str(value))
    console.print(facts)

    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    table = table_of("device", *(str(dtype).removeprefix("torch.") for dtype in FLOATS), title="paths")
    for device in devices:
        table.add_row(device, *(path(device, dtype) for dtype in FLOATS))
    console.print(table)
    if len(devices) == 1:
        console.print("no GPU that torch can use; on one, Triton kernels compute all but float64")

    for library in LIBRARIES:
        console.print(f"\nonepass.patch({library!r}):", *patches(library), sep="\n  ", markup=False, soft_wrap=True)

    checks = failures = 0
    for device, dtype in product(devices, DTYPES):
        title = f"{device}, {dtype}: {path(device, dtype)}; largest error (as a share of its bound)"
        table = table_of("operation", "results", "gradient", "", title=title)
        for name in OPERATIONS:
            try:
                *errors, passed = check(name, device, dtype)
            except Exception as error:  # whatever it is, the other checks go on
                errors, passed = [type(error).__name__, str(error).partition("\n")[0]], False
            table.add_row(name, *errors, "PASS" if passed else "FAIL")
            checks, failures = checks + 1, failures + (not passed)
        console.print(table)
    console.print(f"{checks - failures} of {checks} checks passed")
    console.print(f"\n{verdict(failures, devices)}", markup=False, highlight=False, soft_wrap=True)
    if failures:
        raise typer.Exit(1)


def verdict(failures: int, devices: list[str]) -> str:
    """Whether onepass works on this machine, and what to do."""
    has_gpu = "cuda" in devices
    if has_gpu and path("cuda", torch.bfloat16) != KERNELS:
        return "Failed: this GPU has no kernels, since Triton cannot be imported. Run: pip install triton"
    if failures:
        return (
            f"Failed: {failures} checks, which should not fail on any machine. Do not train with onepass here, and "
            "please report the whole output of this command."
        )
    if not has_gpu:
        return (
            "OK, without a GPU: results are right, and onepass saves memory, but time only with many rows. If this "
            "machine has a GPU, install a build of torch that can use it."
        )
    return "OK: the kernels run on this GPU. Call onepass.patch() before the trainer is made."
