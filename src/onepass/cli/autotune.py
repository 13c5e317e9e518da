"""`onepass autotune`: look into stores of what Triton's autotuner chose, and put them together."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from onepass.autotune import AutotuneRecord, ConfigStore

app = typer.Typer(no_args_is_help=True, help=__doc__)
Store = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A file that a session wrote.")]


@app.command()
def show(
    stores: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Files that sessions wrote.")],
    kernel: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
) -> None:
    """What was chosen for every key, and by how much it was ahead of the runner-up."""
    console = Console(width=None if Console().is_terminal else 200)
    store = merged(stores)
    table = Table("kernel", "key", "chosen", "ms", "runner-up", "tried", "GPU", "Triton")
    for r in chosen(store, kernel):
        time = "" if r.milliseconds is None else f"{r.milliseconds:.4f}"
        margin = "" if r.margin is None else f"+{r.margin:.1%}"
        key = ", ".join([*pairs(r.key), *r.dtypes])
        tried = str(len(r.candidates) or "")
        table.add_row(f"{r.module}.{r.kernel}", key, ", ".join(pairs(r.config)), time, margin, tried, r.gpu, r.triton)
    console.print(table)
    console.print(f"{table.row_count} of {len(store)} records")


@app.command()
def merge(
    stores: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Files that sessions wrote.")],
    out: Annotated[Path, typer.Option(help="The store to write; one that is there takes part.")],
) -> None:
    """Put stores together; of two records for one question the better-timed is kept."""
    store = ConfigStore(out)
    for path in stores:
        store.merge(ConfigStore(path))
    store.save()
    Console().print(f"{len(store)} records in {out}")


@app.command()
def export(
    store: Store,
    out: Annotated[Path, typer.Option(help="The file to write.")],
    kernel: Annotated[str, typer.Option(help="Only kernels whose name contains this.")] = "",
    gpu: Annotated[str, typer.Option(help="Only GPUs whose name contains this.")] = "",
    candidates: Annotated[bool, typer.Option(help="With the timings of what was not chosen.")] = True,
) -> None:
    """Write some records to a store of their own, to share or to ship; a name that ends in .jsonl: a line each."""
    if out.exists():
        raise typer.BadParameter(f"{out} is there already; `merge` adds to a store", param_hint="--out")
    found = [r for r in chosen(ConfigStore(store), kernel) if gpu.lower() in r.gpu.lower()]
    if not candidates:
        found = [AutotuneRecord(**(r.to_json() | {"candidates": []})) for r in found]
    if out.suffix == ".jsonl":
        out.write_text("".join(json.dumps(r.to_json()) + "\n" for r in found))
    else:
        exported = ConfigStore(out)
        exported.add(found)
        exported.save()
    Console().print(f"{len(found)} records in {out}")


def merged(paths: list[Path]) -> ConfigStore:
    store = ConfigStore()
    for path in paths:
        store.merge(ConfigStore(path))
    return store


def chosen(store: ConfigStore, kernel: str) -> list[AutotuneRecord]:
    return [r for r in store.records if kernel.lower() in r.kernel.lower()]


def pairs(of: dict[str, object]) -> list[str]:
    return [f"{name} {value}" for name, value in of.items()]
