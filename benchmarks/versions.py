"""Two versions of onepass side by side on one GPU: whether any operation is slower than it was.

    python benchmarks/versions.py --baseline CHECKOUT --out FOLDER [--op NAME ...] [--rounds 7]

Two processes, one a version, prepare an operation on the same inputs, measure it in turns, in an order that is swapped
from round to round, and free it. Only one of them measures at a time. The ratio of both times is taken in each round;
its median over the rounds must be within a bound. A time of many rows is that of the device: between events, the cache
cold and the host ahead. One of few rows is what a user waits: from the call until the device is idle. Writes
FOLDER/versions.json and prints a table. The exit status is 1 if a bound is broken or an operation fails in this
version; one that fails in the baseline alone is told. ``--tiny`` runs small shapes, on a CPU too; its times say
nothing, so that its exit status is that of failures alone.
"""

import argparse
import datetime
import gc
import json
import math
import os
import select
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

import onepass  # in a worker the version that it measures, of which only what both versions have may be used

HERE = Path(__file__).resolve().parents[1]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORWARD, BOTH, WALL = "forward", "forward + backward", "forward + backward, wall"
BOUNDS = {FORWARD: 1.01, BOTH: 1.01, WALL: 1.03}
TOP_K, CHOICES, RANK = 64, 8, 16
SECONDS_TO_ANSWER = 300
Tensors = tuple[Tensor, ...]

# Inputs, of the sizes of a shape. Whatever has a gradient requires it.


def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(std=std)


def integers(end: int, *shape: int) -> Tensor:
    return torch.randint(end, shape, device=DEVICE)


def labelled(rows: int, vocab: int) -> Tensors:
    return normal(rows, vocab, std=3.0).requires_grad_(), integers(vocab, rows)


def masked(rows: int, vocab: int) -> Tensors:
    (logits, target), mask = labelled(rows, vocab), integers(2, rows).bool()
    return logits, target.where(mask, -100), mask


def teacher(rows: int, vocab: int) -> Tensors:
    return labelled(rows, vocab)[0], normal(rows, vocab, std=3.0)


def top_k(rows: int, vocab: int) -> Tensors:
    """Logits and labels; ids, of which no two of a row are equal, and log-probs that leave some probability out."""
    step = vocab // TOP_K
    ids = torch.arange(TOP_K, device=DEVICE) * step + integers(step, rows, TOP_K)
    return *labelled(rows, vocab), ids, normal(rows, TOP_K, dtype=torch.float32).log_softmax(-1) - 0.1


def router(tokens: int, experts: int) -> Tensors:
    return normal(tokens, experts, std=3.0).requires_grad_(), torch.linspace(-0.1, 0.1, experts, device=DEVICE)


def head(rows: int, width: int, vocab: int, trained: bool = True) -> Tensors:
    weight = normal(vocab, width, std=3.0 / math.sqrt(width)).requires_grad_(trained)
    return normal(rows, width).requires_grad_(), weight, integers(vocab, rows)


def policy(rows: int, width: int, vocab: int) -> Tensors:
    """Advantages, and log-probs of a policy that is a little older: the ratio is about 1."""
    parts = head(rows, width, vocab)
    with torch.no_grad():
        log_probs, _ = onepass.linear_selective_log_softmax_and_entropy(*parts)
    return *parts, torch.randn_like(log_probs), log_probs + 0.1 * torch.randn_like(log_probs)


def experts(T: int, H: int, width: int, E: int, lora: bool = False) -> Tensors:
    """Hidden states, both weights, what `onepass.moe.Routing` holds and, with ``lora``, A and B of both weights."""
    weights, chosen = normal(T, E, dtype=torch.float32).softmax(-1).topk(CHOICES)
    counts = torch.bincount(chosen.flatten(), minlength=E).int()
    frozen = [normal(E, 2 * width, H, std=H**-0.5), normal(E, H, width, std=width**-0.5)]
    shapes = ((E, RANK, H), (E, 2 * width, RANK), (E, RANK, width), (E, H, RANK)) if lora else ()
    adapters = [normal(*shape, std=shape[-1] ** -0.5).requires_grad_() for shape in shapes]
    both = [weight.requires_grad_(not lora) for weight in frozen]
    return normal(T, H).requires_grad_(), *both, weights.requires_grad_(), chosen, counts, *adapters


# Operations: functions of these inputs that return one tensor, or a tuple of them, all differentiable.


def log_probs_and_entropy(x: Tensor, t: Tensor, mask: Tensor | None = None) -> Tensors:
    return onepass.selective_log_softmax_and_entropy(x, t, row_mask=mask)


def kl_div(direction: str) -> Callable[..., Tensor]:
    return lambda x, teacher: onepass.kl_div(x, teacher, direction=direction, reduction="mean")


def topk_kl_div(renormalize: bool) -> Callable[..., Tensor]:
    return lambda x, t, ids, p: onepass.topk_kl_div(x, ids, p, renormalize=renormalize, reduction="mean")


def sigmoid_topk(x: Tensor, bias: Tensor) -> Tensor:
    return onepass.moe.sigmoid_topk(x, CHOICES, bias, n_group=8, topk_group=4, scale=2.5).weights


def expert_mlp(x: Tensor, gate_up: Tensor, down: Tensor, w: Tensor, e: Tensor, n: Tensor, *lora: Tensor) -> Tensor:
    adapters = {"lora_gate_up": (*lora[:2], 2.0), "lora_down": (*lora[2:], 2.0)} if lora else {}
    return onepass.moe.expert_mlp(x, onepass.moe.Routing(w, e, n), gate_up, down, **adapters)


def policy_loss(s: Any, advantages: Tensor, old_log_probs: Tensor) -> Tensor:
    ratio = (s.log_probs - old_log_probs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) - 0.01 * s.entropy


class Operation(NamedTuple):
    name: str
    call: Callable[..., Any]
    inputs: Callable[..., Tensors]
    shapes: Sequence[tuple[int, ...]]  # of these the passes are measured, between events
    passes: Sequence[str] = (FORWARD, BOTH)
    few: Sequence[tuple[int, ...]] = ()  # of these the wall time
    tiny: tuple[int, ...] = (256, 256)  # what the sizes are divided by


VOCABS = [(8192, 151936), (8192, 128256), (16384, 32000), (8192, 50257)]
FEW = [(64, 151936), (200, 128256), (512, 151936)]
of_router = partial(Operation, inputs=router, tiny=(1024, 1))
of_experts = partial(Operation, inputs=experts, shapes=[(8192, 2048, 768, 128)], passes=[BOTH], tiny=(128, 32, 32, 8))
of_head = partial(Operation, inputs=head, shapes=[(8192, 4096, 151936)], passes=[BOTH], tiny=(64, 64, 256))
OPERATIONS = [
    Operation("cross_entropy", lambda x, t: onepass.cross_entropy(x, t), labelled, VOCABS, few=FEW),
    Operation("cross_entropy_masked", lambda x, t, m: onepass.cross_entropy(x, t), masked, VOCABS[:1]),
    Operation("cross_entropy_softcap", lambda x, t: onepass.cross_entropy(x, t, softcap=30.0), labelled, VOCABS[1:2]),
    Operation("log_probs_and_entropy", log_probs_and_entropy, labelled, VOCABS, few=FEW),
    Operation("log_probs_and_entropy_masked", log_probs_and_entropy, masked, VOCABS[:1]),
    Operation("entropy", lambda x, t: onepass.entropy_from_logits(x), labelled, VOCABS[:1], [BOTH]),
    Operation("topk_kl_div", topk_kl_div(renormalize=False), top_k, VOCABS[:1]),
    Operation("topk_kl_div_renormalized", topk_kl_div(renormalize=True), top_k, VOCABS[:1]),
    Operation("distillation_loss", lambda *inputs: onepass.distillation_loss(*inputs), top_k, VOCABS[:1], [BOTH]),
    Operation("kl_div", kl_div("forward"), teacher, [(4096, 151936)]),
    Operation("kl_div_reverse", kl_div("reverse"), teacher, [(4096, 151936)]),
    Operation("jsd", kl_div("jsd"), teacher, [(4096, 151936)]),
    of_router("softmax_topk", lambda x, b: onepass.moe.softmax_topk(x, CHOICES).weights,
              shapes=[(65536, 128)], few=[(64, 128)]),
    of_router("sigmoid_topk", sigmoid_topk, shapes=[(65536, 256)], few=[(64, 256)]),
    of_experts("experts_forward", expert_mlp, passes=[FORWARD]),
    of_experts("experts", expert_mlp),
    of_experts("experts_lora", expert_mlp, inputs=partial(experts, lora=True)),
    of_experts("scattered_linear", lambda x, up, down, w, e, n: onepass.moe.scattered_linear(x, up, e, weights=w)),
    of_head("linear_cross_entropy", lambda *parts: onepass.linear_cross_entropy(*parts), few=[(256, 4096, 128256)]),
    of_head("linear_cross_entropy_frozen", lambda *parts: onepass.linear_cross_entropy(*parts),
            inputs=partial(head, trained=False)),
    of_head("linear_log_probs_and_entropy", lambda *parts: onepass.linear_selective_log_softmax_and_entropy(*parts),
            passes=[FORWARD, BOTH]),
    of_head("linear_policy_loss", lambda h, w, t, *rows: onepass.linear_loss(h, w, t, policy_loss, *rows),
            inputs=policy),
]  # fmt: skip

# A worker: one version, which prepares, measures and frees one operation after the other.


def serve(replies: int) -> None:
    """Answer the requests on stdin, a line of JSON each, on a pipe of its own: libraries may print."""
    runs: dict[str, Callable[[], Any]] = {}
    with os.fdopen(replies, "w") as channel:
        for line in sys.stdin:
            request = json.loads(line)
            answer: dict[str, Any] = {"file": onepass.__file__}
            try:
                match request.pop("do"):
                    case "prepare":
                        runs |= prepare(**request)
                        answer |= {"estimates": {name: estimate(run) for name, run in runs.items()}}
                    case "measure":
                        answer |= {"ms": measure(runs[request.pop("name")], **request)}
                    case "free":
                        runs.clear()
                        gc.collect()
                        torch.cuda.empty_cache()
            except Exception as error:  # the other operations are measured all the same
                traceback.print_exc()
                answer = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
            print(json.dumps(answer), file=channel, flush=True)


def prepare(index: int, shape: list[int], passes: list[str]) -> dict[str, Callable[[], Any]]:
    """The passes of an operation. The gradient of a loss is 1, those of other results are any."""
    torch.manual_seed(0)
    tensors = OPERATIONS[index].inputs(*shape)

    def forward() -> Tensors:
        outputs = OPERATIONS[index].call(*tensors)
        return outputs if isinstance(outputs, tuple) else (outputs,)

    upstream: list[Tensor | None] = []

    def both() -> None:
        for t in tensors:
            t.grad = None
        outputs = forward()
        upstream.extend(torch.randn_like(o) if o.dim() else None for o in outputs[len(upstream) :])  # the first time
        torch.autograd.backward(outputs, upstream)

    return {name: torch.no_grad()(forward) if name == FORWARD else both for name in passes}


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def timed(run: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds until a call returns, and until the device is idle."""
    synchronize()
    start = time.perf_counter()
    run()
    host = time.perf_counter()
    synchronize()
    return (host - start) * 1e3, (time.perf_counter() - start) * 1e3


def estimate(run: Callable[[], Any]) -> tuple[float, float]:
    """As `timed`, after the calls that compile."""
    return [timed(run) for _ in range(4)][-1]


@lru_cache
def cache() -> Tensor:
    """More than any L2, as `triton.testing.do_bench` has it; to write it takes an H100 0.09 ms."""
    return torch.empty(2**28, dtype=torch.uint8, device=DEVICE)


def measure(run: Callable[[], Any], repeats: int, flushes: int) -> float:
    """The median of the milliseconds of a call; half as many calls before are not measured.

    ``flushes``: 0 for the wall time until the device is idle. Else how often the cache is written before each call, so
    that it is cold and the host gets ahead of the device: `triton.testing.do_bench`, which writes it once, times the
    host where that takes longer to launch a call than the device takes to run it.
    """
    for _ in range(repeats // 2):
        run()
    if flushes == 0:
        return statistics.median(timed(run)[1] for _ in range(repeats))
    flushed = cache()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        for _ in range(flushes):
            flushed.zero_()
        start.record()
        run()
        end.record()
    synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


# The parent, which lets the workers take turns.


class Failure(Exception):
    """What went wrong, by version."""


class Version:
    """A worker, and the pipes to it."""

    def __init__(self, role: str, checkout: Path) -> None:
        self.role, self.source = role, checkout.resolve() / "src"
        self.start()

    def start(self) -> None:
        path = os.pathsep.join(filter(None, [str(self.source), os.environ.get("PYTHONPATH")]))
        read, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, "--worker", str(write)], text=True, pass_fds=[write],
            stdin=subprocess.PIPE, stdout=2, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        os.close(write)
        self.replies = os.fdopen(read)

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.replies.close()

    def send(self, **request: Any) -> None:
        with suppress(BrokenPipeError):  # `receive` tells
            print(json.dumps(request), file=self.process.stdin, flush=True)

    def receive(self) -> dict[str, Any]:
        if not select.select([self.replies], [], [], SECONDS_TO_ANSWER)[0]:
            return {"error": f"no answer in {SECONDS_TO_ANSWER} s"}
        line = self.replies.readline()
        return json.loads(line) if line else {"error": f"the process ended: {self.process.wait()}"}


def ask(versions: Sequence[Version], do: str, **request: Any) -> list[dict[str, Any]]:
    for version in versions:
        version.send(do=do, **request)
    answers = [version.receive() for version in versions]
    if errors := {v.role: a["error"] for v, a in zip(versions, answers) if "error" in a}:
        raise Failure(errors)
    for version, answer in zip(versions, answers):
        if version.source not in Path(answer["file"]).resolve().parents:
            sys.exit(f"{answer['file']} was imported, not the onepass of {version.source}")
    return answers


def compare(versions: Sequence[Version], case: dict[str, Any], rounds: int, ms: float) -> list[dict[str, Any]]:
    """The times of the passes of an operation by round; ``ms`` is what one measurement is to take."""
    estimates = [answer["estimates"] for answer in ask(versions, "prepare", **case)]
    records = []
    for name in case["passes"]:
        host, wall = (min(e[name][i] for e in estimates) for i in range(2))
        flushes = 0 if name == WALL or DEVICE.type == "cpu" else min(16, 1 + int(host / 0.08))
        repeats = 50 if name == WALL else min(200, max(6, int(ms / (wall + 0.1 * flushes))))
        times: list[list[float]] = [[], []]
        for turn in range(rounds):
            for who in (0, 1) if turn % 2 == 0 else (1, 0):
                [answer] = ask([versions[who]], "measure", name=name, repeats=repeats, flushes=flushes)
                times[who].append(answer["ms"])
        ratios = [new / old for new, old in zip(*times)]
        ratio = statistics.median(ratios)
        records.append({
            "operation": OPERATIONS[case["index"]].name, "shape": case["shape"], "pass": name,
            "new_ms": times[0], "old_ms": times[1], "ratio": ratio, "least": min(ratios), "most": max(ratios),
            "bound": BOUNDS[name], "above": ratio > BOUNDS[name],
        })  # fmt: skip
    ask(versions, "free")
    return records


def name_of(checkout: Path) -> str:
    """The commit of a checkout, with a ``+`` if it was changed; of a folder that is none its name."""
    from onepass.cli.environment import _output  # in the parent alone: the baseline's may be another

    command = ["git", "-C", str(checkout), "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"]
    return ((checkout / ".git").exists() and _output(*command)) or checkout.resolve().name


def table(results: list[dict[str, Any]], new: str, old: str) -> Table:
    """The records, the largest ratio last."""
    columns = ["operation", "shape", "pass", f"{old}, ms", f"{new}, ms", "ratio", "least", "most", "bound", ""]
    found = Table(*columns, title=f"{new} against {old}", title_justify="left")
    for column in found.columns[3:-1]:
        column.justify = "right"
    for r in sorted(results, key=lambda r: r["ratio"]):
        times = (f"{statistics.median(r[key]):.4f}" for key in ("old_ms", "new_ms"))
        ratios = (f"{r[key]:.4f}" for key in ("ratio", "least", "most"))
        head = r["operation"], "x".join(map(str, r["shape"])), r["pass"]
        found.add_row(*head, *times, *ratios, f"{r['bound']:.2f}", "above" if r["above"] else "")
    return found


def main() -> None:
    names = [operation.name for operation in OPERATIONS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", type=Path, help="a checkout of the other version")
    parser.add_argument("--out", type=Path, default=Path(".bench"))
    parser.add_argument("--op", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--rounds", type=int, help="how often each version has its turn: 7, with --tiny 2")
    parser.add_argument("--names", nargs=2, metavar=("NEW", "OLD"), help="of both versions, instead of their commits")
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)  # where a process that this one starts answers
    given = parser.parse_args()
    if given.worker is not None:
        return serve(given.worker)
    if given.baseline is None or not (given.baseline / "src" / "onepass").is_dir():
        parser.error("--baseline: expected a checkout of another version")
    if DEVICE.type == "cpu" and not given.tiny:
        parser.error("there is no GPU: only --tiny runs on a CPU")
    from onepass.cli.environment import environment

    new, old = given.names or (os.environ.get("ONEPASS_COMMIT") or name_of(HERE), name_of(given.baseline))
    rounds, ms = given.rounds or (2 if given.tiny else 7), 5 if given.tiny else 60
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    report: dict[str, Any] = {"date": date, "environment": environment(), "new": new, "old": old, "rounds": rounds}
    report |= {"tiny": given.tiny, "results": (results := []), "failed": (failed := [])}
    cases = []
    for index, operation in enumerate(OPERATIONS):
        for passes, shapes in ((operation.passes, operation.shapes), ([WALL], operation.few)):
            for shape in shapes if operation.name in given.op else ():
                small = [max(1, n // by) for n, by in zip(shape, operation.tiny)]
                cases.append({"index": index, "shape": small if given.tiny else list(shape), "passes": passes})
    given.out.mkdir(parents=True, exist_ok=True)
    versions = [Version("new", HERE), Version("old", given.baseline)]
    console = Console(width=None if sys.stdout.isatty() else 160)
    try:
        for case in track(cases, "operations", console=console, transient=True):
            try:
                results += compare(versions, case, rounds, ms)
            except Failure as failure:
                what = {"operation": OPERATIONS[case["index"]].name, "shape": case["shape"]}
                failed.append(what | {"errors": failure.args[0]})
                for version in versions:  # a CUDA error stays in its process
                    version.stop()
                    version.start()
            (given.out / "versions.json").write_text(json.dumps(report, indent=1) + "\n")  # whatever comes after
    finally:
        for version in versions:
            version.stop()
    console.print(table(results, new, old))
    for f in failed:
        console.print(f"failed: {f['operation']} {'x'.join(map(str, f['shape']))}: {f['errors']}", highlight=False)
    above = sum(r["above"] for r in results)
    console.print(f"{above} of {len(results)} above their bound, {len(failed)} operations failed", highlight=False)
    sys.exit(bool((above and not given.tiny) or any("new" in f["errors"] for f in failed)))


if __name__ == "__main__":
    main()
