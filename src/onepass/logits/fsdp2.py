"""The state of the units of FSDP2 (`fully_shard`): what they store about the parameters that they shard."""

import sys
import weakref
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary


def sharded_parameter(module: nn.Module, name: str) -> Any:
    """A parameter of a module, as FSDP2 keeps it for the optimizer if it shards it.

    With an integer ``reshard_after_forward``, the attribute is another one from the forward to the backward: temporary,
    padded, and sharded over fewer processes.
    """
    parameter = getattr(module, name)
    if hasattr(parameter, "device_mesh"):
        for state in states_of(module):
            for known in parameters_of(state):
                info = known._module_info
                if (info.module is module and info.param_name == name) or any(
                    m is module and n == name for m, n in zip(info.shared_modules, info.shared_param_names)
                ):
                    return known.sharded_param
    return parameter


def divide_factor(parameter: Tensor, processes: int) -> float:
    """What FSDP2 divides sums of gradients by: the ``processes``, or what `set_gradient_divide_factor` was given."""
    if known_group(parameter) is None:
        for state in [m._get_fsdp_state() for m in list(all_states()) if hasattr(m, "unshard")]:
            for group in groups_of(state):
                _groups.update((p.sharded_param, weakref.ref(group)) for p in group.fsdp_params)
    factor = getattr(known_group(parameter), "gradient_divide_factor", None)
    return processes if factor is None else factor


def known_group(parameter: Tensor) -> Any:
    """The group of a parameter; None if it is not known, or no longer exists."""
    group = _groups.get(parameter)
    return None if group is None else group()


def states_of(module: nn.Module) -> list[Any]:
    """The states of the units that a module belongs to, the outermost first."""
    states = all_states()
    if not states:
        return []
    known = _units.get(module)
    if known is None or known[0] != len(states):
        units = [m for m in list(states) if hasattr(m, "unshard") and any(part is module for part in m.modules())]
        units.sort(key=lambda m: -sum(1 for _ in m.modules()))
        known = _units[module] = len(states), [weakref.ref(m) for m in units]
    return [unit._get_fsdp_state() for unit in (r() for r in known[1]) if unit is not None]


def all_states() -> Any:
    """The states of all units by their modules; empty where nothing is sharded."""
    return getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})


def groups_of(state: Any) -> list[Any]:
    """The groups of parameters of a unit; before torch 2.13 it has one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def parameters_of(state: Any) -> Iterator[Any]:
    """The parameters that a unit shards."""
    for group in groups_of(state):
        yield from group.fsdp_params


_units: "WeakKeyDictionary[nn.Module, tuple[int, list[Any]]]" = WeakKeyDictionary()
_groups = WeakTensorKeyDictionary()  # of parameters, the group of their unit
