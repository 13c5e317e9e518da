"""A quicker search for references to what `onepass.patch` replaces, of which tests make hundreds."""

import sys
from types import ModuleType

import pytest

# Most modules are theirs, and none of these packages imports a library that is patched. Of torch a part is patched.
UNSEARCHED = {
    "_pytest", "datasets", "huggingface_hub", "hypothesis", "mpmath", "networkx", "numpy", "pandas", "pyarrow", "rich",
    "scipy", "sympy", "torch", "triton",
}  # fmt: skip
OF_TORCH = "torch.nn.", "torch.distributed."


class Searched:
    """In place of `sys`: a part of its modules."""

    @property
    def modules(self) -> dict[str, ModuleType]:
        every = list(sys.modules.items())
        return {n: m for n, m in every if n.partition(".")[0] not in UNSEARCHED or n.startswith(OF_TORCH)}


def search_fewer_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onepass.integrations.references.sys", Searched())
