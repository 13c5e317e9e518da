"""The installed peers that compute experts whose weights are in bitsandbytes' NF4, called as their users' models call
them.

A function takes an `ExpertsBatch` with weights in NF4 and adapters, and returns the result.
"""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.operations_experts import SCALING, ExpertsBatch
from onepass import moe
from onepass.core.quantized import FORMATS

Function = Callable[[ExpertsBatch], Tensor]
AXOLOTL = "axolotl.integrations.kernels.libs.scattermoe_lora"


def nf4(batch: ExpertsBatch) -> list[moe.QuantizedWeight]:
    if not batch.quantized or batch.quantized[0].format.name != "nf4":
        raise NotImplementedError("decodes bitsandbytes' NF4 only")
    return batch.quantized


def state_of(weight: moe.QuantizedWeight) -> Any:
    """What bitsandbytes keeps beside the codes of a weight."""
    f, functional = weight.format, importlib.import_module("bitsandbytes.functional")
    return functional.QuantState(
        weight.parts.scales, torch.Size((f.experts, f.rows, f.columns)),
        torch.tensor(FORMATS["nf4"].codes, device=weight.device), f.block_columns, "nf4", weight.dtype,
    )  # fmt: skip


class Parametrized(list[Any]):
    """A parameter as axolotl quantizes it: its codes, and the state in its parametrization."""

    def __init__(self, weight: moe.QuantizedWeight) -> None:
        super().__init__([SimpleNamespace(quant_state=state_of(weight))])
        self.original = weight.data


def axolotl(fast: bool) -> Function:
    """axolotl's experts: the active ones decoded at once, and again in the backward, if ``fast``; or by chunks."""
    forward = importlib.import_module(f"{AXOLOTL}.experts").scattermoe_experts_forward
    runtime = importlib.import_module(f"{AXOLOTL}.runtime").RUNTIME
    importlib.import_module("bitsandbytes")

    def call(batch: ExpertsBatch) -> Tensor:
        names = "gate_up_proj", "down_proj"
        adapters = zip(names, (batch.lora[:2], batch.lora[2:]))
        module = SimpleNamespace(
            num_experts=len(batch.down), act_fn=F.silu, is_transposed=False, is_concatenated=True, has_gate=True,
            has_bias=False, parametrizations={n: Parametrized(w) for n, w in zip(names, nf4(batch))},
            _scattermoe_lora={n: (a.flatten(0, 1), b.transpose(0, 1).flatten(1), SCALING) for n, (a, b) in adapters},
        )  # fmt: skip
        runtime.bnb_fast = fast
        out: Tensor = forward(module, batch.hidden, batch.routing.experts, batch.routing.weights)
        return out

    return call


def module_of_unsloth() -> ModuleType:
    """The file of unsloth's grouped GEMM alone: importing the package replaces functions of transformers."""
    package = importlib.util.find_spec("unsloth_zoo")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'unsloth_zoo'")
    path = Path(package.submodule_search_locations[0], "temporary_patches", "moe_nf4_grouped.py")
    spec = importlib.util.spec_from_file_location("unsloth_nf4_grouped", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def unsloth() -> Function:
    """unsloth's grouped GEMM, which decodes in its loop, and torch's for the adapters, as in unsloth's experts."""
    kernels = module_of_unsloth()
    parameter = importlib.import_module("bitsandbytes.nn").Params4bit

    def product(x: Tensor, weight: moe.QuantizedWeight, lora: list[Tensor], ends: Tensor) -> Tensor:
        data = torch.Tensor._make_subclass(parameter, weight.data)
        data.quant_state = state_of(weight)
        spec = kernels.nf4_grouped_spec(data, lambda w: w.transpose(1, 2), x.dtype, "1")
        a, b = lora
        low = torch._grouped_mm(x, a.mT, offs=ends)
        out: Tensor = kernels.nf4_grouped_mm(x, ends, spec) + torch._grouped_mm(low, b.mT, offs=ends) * SCALING
        return out

    def call(batch: ExpertsBatch) -> Tensor:
        first, second = nf4(batch)
        weights, experts, counts = batch.routing[:3]
        assert counts is not None
        order = experts.flatten().argsort()
        tokens, ends = order // experts.shape[1], counts.cumsum(0, dtype=torch.int32)
        gate, up = product(batch.hidden[tokens], first, batch.lora[:2], ends).chunk(2, -1)
        rows = product(F.silu(gate) * up, second, batch.lora[2:], ends) * weights.flatten()[order, None]
        return torch.zeros_like(batch.hidden).index_add(0, tokens, rows.to(batch.hidden.dtype))

    return call


QUANTIZED_PEERS: dict[str, tuple[str, Callable[[], Function]]] = {
    "axolotl, active experts": ("axolotl", lambda: axolotl(True)),
    "axolotl, chunks of experts": ("axolotl", lambda: axolotl(False)),
    "unsloth's grouped GEMM": ("unsloth_zoo", unsloth),
}
