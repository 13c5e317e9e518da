"""Where a function or class is referenced: in modules, in classes, and in dicts of libraries."""

import sys
from collections.abc import Collection
from typing import Any, NamedTuple

INHERITED = object()  # the original of a method that is added to a class


class Replaced(NamedTuple):
    """One reference to the original: an attribute of a module or class, or an entry of a dict in a module."""

    module: str
    name: str
    original: Any
    replacement: Any

    def __str__(self) -> str:
        return f"{self.module}.{self.name} -> {_path(self.replacement)}"


class Place(NamedTuple):
    """A reference that can be written."""

    holder: Any  # a module, a class, or a dict
    key: Any
    replaced: Replaced

    def write(self, value: Any) -> None:
        if value is INHERITED:
            delattr(self.holder, self.key)
        elif type(self.holder) is dict:
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


def places_of(to: dict[int, Any], libraries: Collection[str]) -> list[Place]:
    """References to objects whose ``id`` is in ``to``: in modules, classes, and dicts of the ``libraries``.

    ``to`` gives the replacement of each.
    """
    found: dict[tuple[int, Any], Place] = {}  # a dict may have several names
    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        package = module_name.partition(".")[0]
        if not isinstance(names, dict) or package == "onepass":
            continue
        holders: list[tuple[Any, dict[Any, Any], str]] = [(module, names, "{}")]
        for name, value in list(names.items()):
            if type(value) is dict and package in libraries and not name.startswith("__"):
                holders.append((value, value, f"{name}[{{!r}}]"))
            elif issubclass(type(value), type) and value.__module__ == module_name:
                holders.append((value, dict(vars(value)), f"{name}.{{}}"))
        for holder, held, form in holders:
            if to.keys().isdisjoint(map(id, list(held.values()))):  # the common case, three times as fast
                continue
            for key, value in list(held.items()):
                if id(value) in to:
                    replaced = Replaced(module_name, form.format(key), value, to[id(value)])
                    found.setdefault((id(holder), key), Place(holder, key, replaced))
    return list(found.values())


def _path(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
