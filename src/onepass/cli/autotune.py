"""`onepass autotune`: tune the kernels of onepass on this GPU, and show, merge and export stored selections."""

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from onepass.autotune import AutotuneRecord, ConfigStore, own
from onepass.autotune.store import LEFT_OUT
from onepass.autotune.tuners import record_from
from onepass.cli.outputs import check_writable
from onepass.cli.tables import table_of
from onepass.cli.timing import SMALL, kernel_us, median_ms
from onepass.cli.workloads import (
    EXPERT_FORM,
    GPT_OSS,
    LOSS_FORM,
    LOSS_SHAPES,
    MIXTRAL,
    OLMOE,
    OPERATIONS,
    QWEN3_30B,
    QWEN3_NEXT,
    WIDE,
    Workload,
    parse_shape,
    random_logits,
)
from onepass.kernels import sort_by_expert
from onepass.kernels.grouped_gemm import grouped_gemm
from onepass.kernels.grouped_weight_gradient import weight_gradient
from onepass.kernels.launch import forget

EXPERTS, EXPERT_SHAPES = "experts", (QWEN3_30B, MIXTRAL, GPT_OSS, QWEN3_NEXT, OLMOE, WIDE)
OPS = [*OPERATIONS, EXPERTS]
DTYPES = "bfloat16", "float16", "float32"
ROUNDS = 2  # over all candidates: between the first and the last a GPU's clock changes by more than they differ
AHEAD = 0.99  # of the rule's time: less is noise
app = typer.Typer(
    no_args_is_help=True, help="Tune the kernels of onepass on this GPU, and show, merge and export stored selections."
)
Stores = Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Files that sessions wrote.")]


@app.command()
def show(
    stores: Stores,
    kernel: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
) -> None:
    """Show the selected configuration of every key, and its margin over the second best."""
    console = Console(width=None if Console().is_terminal else 200, markup=False)  # names may have brackets
    store = merged(stores)
    table = table_of("kernel", "key", "chosen", "ms", "runner-up", "tried", "GPU", "Triton")
    for r in chosen(store, kernel):
        time = "" if r.milliseconds is None else f"{r.milliseconds:.4f}"
        margin = "" if r.margin is None else f"{r.margin:+.1%}"
        key = ", ".join([*pairs(r.key), *r.dtypes])
        tried = str(len(r.candidates) or "")
        table.add_row(f"{r.module}.{r.kernel}", key, ", ".join(pairs(r.config)), time, margin, tried, r.gpu, r.triton)
    console.print(table)
    console.print(f"{table.row_count} of {len(store)} records")


@app.command()
def merge(
    stores: Stores,
    out: Annotated[Path, typer.Option(dir_okay=False, help="The store to write; one that is there takes part.")],
) -> None:
    """Merge stores; of two records with the same key, the faster one is kept."""
    given = merged(stores)
    store = opened(out)
    store.merge(given)
    store.save()
    Console().print(f"{len(store)} records in {out}")


@app.command()
def export(
    stores: Stores,
    out: Annotated[Path, typer.Option(help="The file to write.")],
    kernel: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
    gpu: Annotated[str, typer.Option(help="Only GPUs whose name contains this.")] = "",
    candidates: Annotated[bool, typer.Option(help="Include the timings of all candidates.")] = True,
) -> None:
    """Write selected records to a new store, or one line of JSON per record if the name ends in .jsonl."""
    if out.exists():
        raise typer.BadParameter(f"{out} is there already; `merge` adds to a store", param_hint="--out")
    check_writable(out)
    store = merged(stores)
    for name, part in dict(kernel=kernel, gpu=gpu).items():
        known = sorted({getattr(r, name) for r in store.records})
        if part and not any(part.lower() in k.lower() for k in known):
            text = f"expected a part of {', '.join(known) or 'a name, of which there is none'}, got {part!r}"
            raise typer.BadParameter(text, param_hint=f"--{name}")
    found = [r for r in chosen(store, kernel) if gpu.lower() in r.gpu.lower()]
    if not candidates:
        found = [AutotuneRecord(**(r.to_json() | {"candidates": []})) for r in found]
    if out.suffix == ".jsonl":
        out.write_text("".join(json.dumps(r.to_json()) + "\n" for r in found))
    else:
        exported = ConfigStore(out)
        exported.add(found)
        exported.save()
    Console().print(f"{len(found)} records in {out}")


@app.command()
def run(
    out: Annotated[Path, typer.Option(dir_okay=False, help="The store to write; one that is there takes part.")],
    op: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(OPS)}.", show_default="all")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{LOSS_FORM}; of experts {EXPERT_FORM}.", show_default=", ".join([*LOSS_SHAPES, *EXPERT_SHAPES])
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"Of the logits, of the experts: {', '.join(DTYPES)}.")] = "bfloat16",
    milliseconds: Annotated[int, typer.Option(help="Measured of each candidate.")] = 30,
) -> None:
    """Time the kernels of onepass with launch parameters around the defaults, and store the fastest."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("expected a CUDA or ROCm GPU, got none")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"expected one of {', '.join(DTYPES)}, got {dtype}", param_hint="--dtype")
    for name in op or ():
        if name not in OPS:
            raise typer.BadParameter(f"expected one of {', '.join(OPS)}, got {name}", param_hint="--op")
    given = sizes_of(shape or [], op or OPS)
    device, console, store = torch.device("cuda"), Console(), opened(out)
    done: set[str] = set()
    for name in op or OPS:
        if shape and not given[name == EXPERTS]:
            continue
        for step, small in steps(name, given[name == EXPERTS], getattr(torch, dtype), device):

            def time(call: Callable[[], object], small: bool = small) -> float:
                return (kernel_us(call, device) or 0) / 1e3 if small else median_ms(call, device, milliseconds)

            for record in measure(step, time, console, done):
                store.add([record])
                store.save()
    show([out])


def sizes_of(shapes: Sequence[str], ops: Sequence[str]) -> tuple[list[str], list[str]]:
    """The shapes of losses, and those of experts.

    Raises:
        typer.BadParameter: a shape has neither form, or that of no operation that is measured.
    """
    of_losses = [s for s in shapes if len(s.split("x")) == len(LOSS_FORM.split("x"))]
    of_experts = [s for s in shapes if s not in of_losses]
    for some, form, example, asked in (
        (of_losses, LOSS_FORM, LOSS_SHAPES[0], any(op != EXPERTS for op in ops)),
        (of_experts, EXPERT_FORM, MIXTRAL, EXPERTS in ops),
    ):
        for shape in some:
            parse_shape(shape, form, example)
            if not asked:
                raise typer.BadParameter(f"{shape}: expected shapes of {', '.join(ops)}", param_hint="--shape")
    return of_losses, of_experts


def steps(
    op: str, shapes: list[str], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[Callable[[], object], bool]]:
    """What is measured of an operation, and whether that is so small that only the kernels' own time says something."""
    if op == EXPERTS:
        for shape in shapes or EXPERT_SHAPES:
            sizes = parse_shape(shape, EXPERT_FORM, MIXTRAL)
            yield from ((step, False) for step in grouped_products(sizes, dtype, device))
    else:
        for shape in shapes or LOSS_SHAPES:
            rows, vocab = parse_shape(shape, LOSS_FORM, LOSS_SHAPES[0])
            yield step_of(OPERATIONS[op], rows, vocab, dtype, device), rows * vocab <= SMALL


def grouped_products(
    sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> list[Callable[[], torch.Tensor]]:
    """The grouped GEMMs of `onepass.moe.expert_mlp`, forward and backward."""
    T, H, width, E, K = sizes
    normal = partial(torch.randn, dtype=dtype, device=device)
    hidden, gate_up, down = normal(T, H), normal(E, 2 * width, H), normal(E, H, width)
    rows, both = normal(T * K, width), normal(T * K, 2 * width)
    groups = sort_by_expert(torch.rand(T, E, device=device).topk(K).indices, E)
    return [
        lambda: grouped_gemm(hidden, gate_up, groups, share=K, glu=True, h=both),
        lambda: grouped_gemm(rows, down, groups, scatter=True),
        lambda: grouped_gemm(hidden, down.mT, groups, share=K),
        lambda: grouped_gemm(both, gate_up.mT, groups, scatter=True),
        lambda: weight_gradient(hidden, rows, down, groups, share_a=K),
        lambda: weight_gradient(both, hidden, gate_up, groups, share_b=K),
    ]


def step_of(
    operation: Workload, rows: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Forward and backward on random logits."""
    generator = torch.Generator(device).manual_seed(0)
    logits = random_logits((rows, vocab), dtype, generator).requires_grad_()
    others = operation.inputs(logits.detach(), None, generator)

    def step() -> tuple[torch.Tensor, ...]:
        results = operation.ours(logits, *others, None)
        return *results, *torch.autograd.grad(results, logits, [torch.ones_like(r) for r in results])

    return step


def measure(
    call: Callable[[], object], time: Callable[[Callable[[], object]], float], console: Console, done: set[str]
) -> Iterator[AutotuneRecord]:
    """Time ``call`` with every candidate of every kernel of ours that it launches, one kernel after the other.

    What is ``done`` is not asked again: other operations launch the same kernels for the same numbers.
    """
    forget()
    with own.record_questions() as asked:
        call()
    for name, question in asked.items():
        if name in done:
            continue
        done.add(name)
        text = f"{question.kernel.fn.__name__} {question.key}"
        candidates = own.candidates(question.rule)
        times = [float("inf")] * len(candidates)
        turns = list(enumerate(candidates)) * ROUNDS
        for n, candidate in track(turns, description=text, console=console, transient=True):
            forget()
            with own.override_answer(name, candidate), suppress(OutOfResources, CompilationError):
                call()
                times[n] = min(times[n], time(call))
        forget()
        fastest = times.index(min(times))
        best = fastest if times[fastest] < times[0] * AHEAD else 0  # the rule's
        yield record_from(question.kernel, question.key, [], candidates[best], list(zip(candidates, times)))


def merged(paths: list[Path]) -> ConfigStore:
    store = ConfigStore()
    for path in paths:
        store.merge(read(path, "STORES"))
    return store


def opened(out: Path) -> ConfigStore:
    """The store that a command will write, with what is in it."""
    check_writable(out)
    return read(out, "--out")


def read(path: Path, hint: str) -> ConfigStore:
    """The store in a file. A warning that it is left out is an error here, since it is what the user asked for."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            return ConfigStore(path)
    except RuntimeWarning as problem:
        # Without the end of the text, by which a program goes on without the store, and the code of the warning.
        text = str(problem).partition(f"; {LEFT_OUT}")[0].partition(" [OP")[0]
        raise typer.BadParameter(text, param_hint=hint) from None


def chosen(store: ConfigStore, kernel: str) -> list[AutotuneRecord]:
    return [r for r in store.records if kernel.lower() in r.kernel.lower()]


def pairs(of: dict[str, object]) -> list[str]:
    return [f"{name} {value}" for name, value in of.items()]
