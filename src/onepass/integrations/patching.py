"""Names of other libraries, replaced by ours wherever they are held, and put back."""

import ast
import inspect
import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, TracebackType
from typing import Any, NamedTuple

LIBRARIES = ("transformers", "trl")


class Target(NamedTuple):
    """A name of a library, and what stands in for it.

    Attributes:
        module, name: where it is defined; the name of a method is ``Class.method``.
        replacement: called in the same way.
        signatures: the parameters that it is known with, as in ``"logits, index"``.
        since, until: the first version that has it in this form, and the first that has it no more. Others keep theirs.
        method: whose signature it is, of a class that is replaced as a whole.
        returns: how the source of what it returns begins, where the signature does not tell versions apart.
        registered: whether ``name`` is a registry of the library, to which the integration's ``register`` adds the
            replacement under a name of its own. It stays there, and nothing is replaced.
    """

    module: str
    name: str
    replacement: Any
    signatures: Sequence[str]
    since: str
    until: str | None = None
    method: str | None = None
    returns: str = ""
    registered: bool = False


class Replaced(NamedTuple):
    """One place that held the original: an attribute of a module or class, or an entry of a dict in a module."""

    module: str
    name: str
    original: Any
    replacement: Any

    def __str__(self) -> str:
        return f"{self.module}.{self.name} -> {_path(self.replacement)}"


class Kept(NamedTuple):
    """What stays as it is, and why."""

    module: str
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name} kept: {self.reason}"


class Plan(NamedTuple):
    """What `patch` would replace and would keep in the libraries that are installed."""

    replaced: list[Replaced]
    kept: list[Kept]


class _Place(NamedTuple):
    holder: Any  # a module, a class, or a dict
    key: Any
    replaced: Replaced

    def write(self, value: Any) -> None:
        if type(self.holder) is dict:
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


class _Active:
    """A replacement that is in place, for as many patches as asked for it."""

    def __init__(self, original: Any, replacement: Any) -> None:
        self.original, self.replacement, self.patches = original, replacement, 0
        self.places: list[Replaced] = []


_lock = threading.RLock()
_active: dict[tuple[str, str], _Active] = {}


class Patch:
    """Libraries that use onepass, until `restore` or the end of the ``with`` block. Made by `patch`.

    Attributes:
        replaced: ``(module, name, original, replacement)`` of every place that was changed.
        kept: ``(module, name, reason)`` of what this version of a library has in another form, or not at all.
    """

    def __init__(self, targets: Sequence[Target]) -> None:
        with _lock:
            found, self.kept = _resolved(targets)
            self._keys = list(found)
            _activate(found)
            self.replaced = [place for key in self._keys for place in _active[key].places]

    def restore(self) -> None:
        """Put every original back, unless another patch still asks for its replacement. A second call does nothing."""
        with _lock:
            keys, self._keys = self._keys, []
            _release(keys)

    def __enter__(self) -> "Patch":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()

    def __str__(self) -> str:
        return "\n".join(map(str, [*self.replaced, *self.kept])) or "nothing to replace"

    def __repr__(self) -> str:
        return f"<Patch: {len(self.replaced)} names replaced, {len(self.kept)} kept>"


def patch(*libraries: str) -> Patch:
    """Make trainers and models use onepass, without a change to the code that uses them.

    A name is replaced in its own module and wherever else it was imported to; modules that are imported later get ours
    from there. What holds it otherwise (a closure, a default argument) keeps the original. A patch of what is replaced
    already changes nothing more, and the originals come back with the last `Patch.restore`. All or nothing: what is
    refused has changed nothing.

    Args:
        libraries: ``"transformers"``, ``"trl"``; none for all that are installed.

    Raises:
        ValueError: another name.
        ModuleNotFoundError: a library that was named is not installed.
        RuntimeError: a function of the library is not one that this version of onepass knows.

    Example::

        with onepass.patch("trl") as patched:
            print(patched)
            GRPOTrainer(...).train()
    """
    modules = _integrations(libraries)
    patched = Patch(_targets(modules))
    for module in modules:
        if hasattr(module, "register"):
            module.register()
    return patched


def original(module: str, name: str) -> Any:
    """What stood where a replacement is in place now, for one that hands over to it."""
    return _active[module, name].original


def plan(*libraries: str) -> Plan:
    """What `patch` would do; takes and raises the same. It imports the libraries and changes nothing."""
    with _lock:
        found, kept = _resolved(_targets(_integrations(libraries)))
        _find_places({key: a for key, a in found.items() if key not in _active})
        return Plan([place for a in found.values() for place in a.places], kept)


def _integrations(libraries: Sequence[str]) -> list[ModuleType]:
    for name in libraries:
        if name not in LIBRARIES:
            raise ValueError(f"libraries: expected any of {', '.join(map(repr, LIBRARIES))}, got {name!r}")
        if find_spec(name) is None:
            raise ModuleNotFoundError(f"libraries: {name} is not installed; pip install 'onepass[{name}]'", name=name)
    chosen = libraries or [name for name in LIBRARIES if find_spec(name) is not None]
    return [import_module(f"onepass.integrations.{name}") for name in chosen]


def _targets(integrations: Sequence[ModuleType]) -> list[Target]:
    return [target for module in integrations for target in module.TARGETS]


def _resolved(targets: Sequence[Target]) -> tuple[dict[tuple[str, str], _Active], list[Kept]]:
    """The originals, of a form that is known, and what is kept."""
    found: dict[tuple[str, str], _Active] = {}
    kept = []
    for t in targets:
        key = t.module, t.name
        if key in _active:
            found[key] = _active[key]
            continue
        try:
            reason = unsupported(t.module, t.since, t.until)
            original: Any = None if reason else import_module(t.module)
        except (ImportError, RuntimeError) as error:  # of something that its module needs: nobody can use it
            reason = f"cannot be imported: {error}".partition("\n")[0]
        if reason:
            kept.append(Kept(*key, reason))
            continue
        for part in t.name.split("."):
            original = getattr(original, "__dict__", {}).get(part)
        _check(t, original)
        if not t.registered:
            found[key] = _Active(original, t.replacement)
    return found, kept


def unsupported(module: str, since: str, until: str | None = None) -> str:
    """Why the version of the library that is installed is not supported; empty where it is."""
    # A dependency of every library here but not of onepass, so it is imported only once there is one of them.
    from packaging.version import Version

    library = module.partition(".")[0]
    has = import_module(library).__version__
    if Version(since) <= Version(has) and (until is None or Version(has) < Version(until)):
        return ""
    versions = f"from {since}" + (f" to before {until}" if until else "")
    return f"supported {versions}; {library} {has} has it not, or in another form"


def _check(t: Target, original: Any) -> None:
    function: Any = getattr(original, t.method, None) if t.method else original
    got = parameters(function) if callable(function) else None
    name = f"{t.name}.{t.method}" if t.method else t.name
    if got is not None and got in t.signatures and _returned(function, t.returns):
        return
    library = t.module.partition(".")[0]
    known = " or ".join(f"({s})" for s in t.signatures) + (f" that returns {t.returns}..." if t.returns else "")
    found = "no such name" if got is None else f"({got})" + (", which returns something else" if t.returns else "")
    raise RuntimeError(
        f"{t.module}.{name}: onepass {_own_version()} knows it as {known}, but "
        f"{library} {import_module(library).__version__} has {found}; nothing was patched"
    )


def parameters(function: Callable[..., Any]) -> str:
    """Their names, as `Target.signatures` has them."""
    return ", ".join(inspect.signature(function).parameters)


def _returned(function: Callable[..., Any], begin: str) -> bool:
    if not begin:
        return True
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except OSError:  # no source to look at
        return False
    returns = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]
    return bool(returns) and all(ast.unparse(value).startswith(begin) for value in returns)


def _own_version() -> str:
    from onepass import __version__

    return __version__


def _activate(found: dict[tuple[str, str], _Active]) -> None:
    new = {key: a for key, a in found.items() if key not in _active}
    places = _find_places(new)
    for done, place in enumerate(places):
        try:
            place.write(place.replaced.replacement)
        except BaseException:
            for earlier in places[:done]:
                earlier.write(earlier.replaced.original)
            raise
    _active.update(new)
    for active in found.values():
        active.patches += 1


def _find_places(new: dict[tuple[str, str], _Active]) -> list[_Place]:
    """Where their originals are; each is told its own."""
    places = _places({id(a.original): a.replacement for a in new.values()})
    for active in new.values():
        active.places = [p.replaced for p in places if p.replaced.original is active.original]
    return places


def _release(keys: Sequence[tuple[str, str]]) -> None:
    ended = []
    for key in keys:
        _active[key].patches -= 1
        if not _active[key].patches:
            ended.append(_active.pop(key))
    # Looked for again: modules may have come since. What somebody else wrote over ours is left alone.
    for place in _places({id(a.replacement): a.original for a in ended}):
        place.write(place.replaced.replacement)


def _places(to: dict[int, Any]) -> list[_Place]:
    """Wherever an object whose ``id`` is in ``to`` is held by a module or a class, or by a dict of the libraries."""
    found: dict[tuple[int, Any], _Place] = {}  # a dict may have several names
    for module_name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        package = module_name.partition(".")[0]
        if not isinstance(names, dict) or package == "onepass":
            continue
        holders: list[tuple[Any, dict[Any, Any], str]] = [(module, names, "{}")]
        for name, value in list(names.items()):
            if type(value) is dict and package in LIBRARIES and not name.startswith("__"):
                holders.append((value, value, f"{name}[{{!r}}]"))
            elif issubclass(type(value), type) and value.__module__ == module_name:
                holders.append((value, dict(vars(value)), f"{name}.{{}}"))
        for holder, held, form in holders:
            for key, value in list(held.items()):
                if id(value) in to:
                    replaced = Replaced(module_name, form.format(key), value, to[id(value)])
                    found.setdefault((id(holder), key), _Place(holder, key, replaced))
    return list(found.values())


def _path(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
