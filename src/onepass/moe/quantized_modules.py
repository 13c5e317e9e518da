"""Experts of models: to quantize their weights in place and the inverse, how much is decoded at a time, and a list."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onepass.backend import KERNELS, name_of_backend
from onepass.core.checks import check_integer, described
from onepass.core.quantized import FORMATS, Encoded, WeightFormat, WeightParts
from onepass.moe.quantize import quantize
from onepass.moe.quantized import QuantizedWeight

WEIGHTS = "gate_up_proj", "down_proj"
LIMIT = "_onepass_max_memory"  # the attribute of experts that `set_decoding_memory` sets
# By the name of an experts_implementation: raises NotImplementedError for experts that it does not run.
CHECKS: dict[str, Callable[[nn.Module], object]] = {}


class Stored(nn.Module):
    """The parametrization of a weight that `quantize_experts` has replaced by its codes: gives the whole weight.

    The other tensors are buffers of bytes, which ``model.to(dtype)`` leaves alone. So is the description ``layout``,
    which is a part of the state, since codes of another format may have as many bytes.
    """

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        self.format, self.dtype = weight.format, weight.dtype
        self.dtypes = {n: t.dtype for n, t in weight.parts._asdict().items() if t is not None}
        for name in self.dtypes:
            self.register_buffer(name, getattr(weight.parts, name).reshape(-1).view(torch.uint8))
        transposed = " transposed" if weight.format.flipped else ""
        self.layout = f"{_format(weight.format, weight.parts)} {tuple(weight.shape)}{transposed}"
        text = torch.tensor(list(self.layout.encode()), dtype=torch.uint8, device=weight.device)
        self.register_buffer("layout_text", text)
        self.register_load_state_dict_pre_hook(check_layout)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype  # a cast of the model
        return super()._apply(fn, recurse)

    def quantized_weight(self, data: Tensor, name: str) -> QuantizedWeight:
        parts = WeightParts(**{n: getattr(self, n).view(dtype) for n, dtype in self.dtypes.items()})
        found: QuantizedWeight = object.__new__(QuantizedWeight)
        found.name, found.sources = name, (data,)
        Encoded.__init__(found, data.detach(), parts, self.format, self.dtype)
        return found

    @torch.no_grad()
    def forward(self, data: Tensor) -> Tensor:
        return self.quantized_weight(data, "weight").dequantize()


def modules_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model by name. Raises a TypeError if it is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {described(model)}")
    return model.named_modules()


def experts_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of a model that have weights of experts, by name. Raises a TypeError if there is none."""
    found = [(name, module) for name, module in modules_of(model) if names_of(module)]
    if not found:
        raise TypeError(f"model: expected one with experts, got {type(model).__name__}, which has none")
    return found


def quantize_experts(
    model: nn.Module, format: str, *, block_size: int | tuple[int, int] | None = None, nested: bool = False
) -> int:
    """Quantize the weights of all experts of a model in place, and return their number.

    Experts are modules with parameters ``gate_up_proj`` and ``down_proj`` of three dimensions, as in transformers. A
    weight is replaced by its codes, with a parametrization of torch: reading the attribute decodes the whole weight,
    which ``experts_implementation="onepass"`` avoids. Weights that are already quantized are not changed.

    Args:
        model: a model on any device.
        format, block_size, nested: as in `quantize`. Blocks are along the inputs, also for transposed weights.

    Raises:
        TypeError, ValueError: as `quantize`, where the error names the weight; or the model has no experts.
    """
    count = 0
    for prefix, experts in experts_of(model):
        for name in names_of(experts):
            weight = experts._parameters.get(name)
            if weight is None or not weight.is_floating_point() or weight.element_size() == 1:
                continue
            flipped = bool(getattr(experts, "is_transposed", False))
            of_inputs = weight.detach().mT if flipped else weight.detach()
            found = quantize(
                of_inputs, format, block_size=block_size, nested=nested, name=f"{prefix}.{name}".lstrip(".")
            )
            hold(experts, name, found.mT if flipped else found)
            count += 1
    return count


def dequantize_experts(model: nn.Module) -> int:
    """Replace the quantized weights of all experts of a model by their values in place, and return their number.

    This is the inverse of `quantize_experts`, also for the other kinds that `QuantizedWeight.from_transformers`
    supports. Use it before adapters are merged into the weights, which PEFT cannot do with codes.

    Raises:
        TypeError, ValueError: a weight is quantized in another way, which the message names.
    """
    count = 0
    for _, experts in list(modules_of(model)):
        for name in names_of(experts):
            weight = QuantizedWeight.from_transformers(experts, name)
            if weight is not None:
                if name in getattr(experts, "parametrizations", {}):
                    # A copy of the module has the same class, from which torch removes the parametrized attribute.
                    kind = type(experts)
                    own = {n: v for n, v in vars(kind).items() if n not in ("__dict__", "__weakref__")}
                    experts.__class__ = type(kind.__name__, kind.__bases__, own)
                    parametrize.remove_parametrizations(experts, name, leave_parametrized=False)
                values = nn.Parameter(weight.dequantize().contiguous(), requires_grad=False)
                experts.register_parameter(name, values)
                count += 1
    return count


def set_decoding_memory(model: nn.Module, max_memory: int | None) -> int:
    """Set ``max_memory`` of `expert_mlp` for all experts of a model, and return the number of their modules.

    It limits the memory of decoded weights where ``experts_implementation="onepass"`` runs quantized experts. It is one
    buffer on each device, not one for each layer. It is an attribute of the modules, which their state does not have:
    call this again after loading a model.

    Args:
        model: a model with experts as in `quantize_experts`, quantized or not yet.
        max_memory: bytes, at least 1; None for the default of `expert_mlp`.

    Raises:
        TypeError, ValueError: ``max_memory`` is not such a number, or the model has no experts.
    """
    limit = None if max_memory is None else check_integer(max_memory, "max_memory", 1)
    found = experts_of(model)
    for _, experts in found:
        setattr(experts, LIMIT, limit)
    return len(found)


def hold(experts: nn.Module, name: str, weight: QuantizedWeight) -> None:
    """Replace a parameter of experts by a quantized weight."""
    experts.register_parameter(name, nn.Parameter(weight.data, requires_grad=False))
    parametrize.register_parametrization(experts, name, Stored(weight), unsafe=True)


def check_layout(stored: Any, state: dict[str, Tensor], prefix: str, *rest: Any) -> None:
    """A hook of `load_state_dict`, which reports codes of another format, block size or shape."""
    text = state.get(f"{prefix}layout_text")
    if text is None or text.is_meta:
        return  # `load_state_dict` reports what is missing
    given = bytes(text.tolist()).decode(errors="replace")
    if given != stored.layout:
        rest[-1].append(f"{prefix.removesuffix('.')}: expected codes of {stored.layout}, got {given}")


def names_of(module: nn.Module) -> list[str]:
    """The weights of experts that a module has."""
    # What the module itself has: a compiled one also gives the attributes of the module that it wraps.
    parametrizations: Any = module._modules.get("parametrizations") or {}
    own: dict[str, Any] = {**module._parameters, **dict.fromkeys(parametrizations, 0)}
    if vars(module).get("gate_up_proj_precision_config") is not None:
        own |= dict.fromkeys(WEIGHTS, 0)  # gpt-oss in the layout of a card, which is no parameter
    wide = [n for n in WEIGHTS if n in own and (own[n] is None or not isinstance(own[n], Tensor) or own[n].dim() > 2)]
    return wide if len(wide) == len(WEIGHTS) else []


class ExpertWeight(NamedTuple):
    """A weight of experts in a model, as `describe` returns it.

    Attributes:
        name: of the parameter in the model.
        format: ``"nf4"`` and the like with its blocks, or a dtype.
        shape: ``(E, outputs, inputs)``, or as the model has it.
        bytes: of codes and scales, or of the tensor.
        path: how it is multiplied.
    """

    name: str
    format: str
    shape: tuple[int, ...]
    bytes: int
    path: str

    def __str__(self) -> str:
        return f"{self.name}: {self.format} {self.shape}, {self.bytes / 2**20:.1f} MiB; {self.path}"


def describe(model: nn.Module) -> list[ExpertWeight]:
    """List the weights of experts in a model, with their formats, their bytes and how they are multiplied.

    Nothing is decoded. ``str`` of an element is a readable line.
    """
    return [found for prefix, experts in modules_of(model) for found in _weights(prefix, experts)]


def _weights(prefix: str, experts: nn.Module) -> Iterator[ExpertWeight]:
    implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
    names, obstacle = names_of(experts), None
    if names and implementation in CHECKS:
        try:
            CHECKS[implementation](experts)
        except NotImplementedError as error:
            obstacle = f"not supported: {error}"
    for name in names:
        full = f"{prefix}.{name}" if prefix else name
        try:
            weight: Any = QuantizedWeight.from_transformers(experts, name)
        except (TypeError, ValueError) as error:
            yield ExpertWeight(full, "unknown", (), 0, f"not supported: {error}")
            continue
        tensor = weight if weight is not None else getattr(experts, name)
        kind = tensor.dtype if tensor.device.type != "meta" else torch.float64  # a model without memory: no kernels
        where = name_of_backend(torch.empty(0, dtype=kind, device=tensor.device))
        if obstacle:
            path = obstacle
        elif implementation != "onepass":
            path = f"not onepass: experts_implementation={implementation!r}"
            path += "" if weight is None else ", which decodes the whole weight"
        elif weight is None:
            path = f"onepass: grouped GEMM in {where}"
        else:
            ways = "by the grouped GEMM, or in chunks for many tokens," if where == KERNELS else "in chunks,"
            path = f"onepass: experts that have tokens are decoded {ways} in {where}"
        text = str(tensor.dtype).removeprefix("torch.") if weight is None else _format(weight.format, weight.parts)
        yield ExpertWeight(full, text, tuple(tensor.shape), tensor.nbytes, path)


def _format(format: WeightFormat, parts: WeightParts) -> str:
    size = f"{format.block_columns}" if FORMATS[format.name].flat else f"{format.block_rows} x {format.block_columns}"
    return f"{format.name} (blocks of {size}{', nested scales' if parts.table is not None else ''})"
