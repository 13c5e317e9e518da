"""`patch`: replace functions of other libraries by those of onepass wherever they are referenced, and restore them."""

import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, TypeVar

from torch.torch_version import TorchVersion

from onepass.core.caller import stacklevel_outside
from onepass.core.checks import check_bool
from onepass.integrations.references import INHERITED, Place, Replaced, places_of

LOG = logging.getLogger("onepass")
LIBRARIES = ("transformers", "trl")
SHARDED = ("torch", "torchtitan", "megatron", "verl")  # their losses of sharded vocabularies, patched if they are named
NAMES = (*LIBRARIES, *SHARDED)
EXTRAS = (*LIBRARIES, "torchtitan", "megatron", "verl")  # all but torch: extras install them; their dicts are searched
PACKAGES = {"megatron": "megatron.core"}  # where a library keeps its version, if not in its first package


class Target(NamedTuple):
    """A function or class of a library, and its replacement.

    Attributes:
        module, name: where it is defined; the name of a method is ``Class.method``.
        replacement: called in the same way.
        signatures: the names of its parameters in all supported forms, as in ``"logits, index"``.
        since, until: the first version that has it in this form, and the first that no longer does. Other versions are
            not patched.
        method: for a class that is replaced as a whole, the method whose signature is checked.
        registered: whether ``name`` is a registry of the library. The integration's ``register`` adds the replacement
            to it permanently, under a name of its own, and nothing is replaced.
        inherited: whether the class inherits the method. The replacement is then added to the class.
        alone: whether only this name is replaced, and no other reference to the same object.
    """

    module: str
    name: str
    replacement: Any
    signatures: Sequence[str]
    since: str
    until: str | None = None
    method: str | None = None
    registered: bool = False
    inherited: bool = False
    alone: bool = False


class UnknownSignature(RuntimeError):
    """A function of a library has a signature that no replacement is known for."""


class Kept(NamedTuple):
    """A function that is not replaced, and the reason."""

    module: str
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name} kept: {self.reason}"


class PatchPlan(NamedTuple):
    """What `patch` would and would not replace in the installed libraries."""

    replaced: list[Replaced]
    kept: list[Kept]


class _Active:
    """An active replacement, with the number of patches that use it."""

    def __init__(self, original: Any, replacement: Any, holder: Any = None) -> None:
        self.original, self.replacement, self.patches = original, replacement, 0
        self.places: list[Replaced] = []
        self.holder = holder  # of the only place, if other references to the original are kept
        self.later: list[tuple[str, str]] = []  # see `extend`


_lock = threading.RLock()
_active: dict[tuple[str, str], _Active] = {}
_originals: dict[tuple[str, str], Any] = {}  # of all patches there were


R = TypeVar("R", bound="Restorable")


class Restorable:
    """An object whose ``with`` block ends with `restore`."""

    def restore(self) -> None:
        raise NotImplementedError

    def __enter__(self: R) -> R:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


class Patch(Restorable):
    """An active patch, until `restore` or the end of the ``with`` block. Returned by `patch`.

    Attributes:
        libraries: the names of the libraries that were patched, without those that ``strict=False`` has left alone.
        replaced: ``(module, name, original, replacement)`` for every reference that was replaced.
        kept: ``(module, name, reason)`` for every function that was not replaced, because the installed version has it
            in another form or not at all.
    """

    def __init__(self, modules: Sequence[ModuleType]) -> None:
        self.libraries = [module.__name__.rpartition(".")[2] for module in modules]
        with _lock:
            found, self.kept = _resolved(_targets(modules))
            self._keys = list(found)
            _activate(found)
            self.replaced = [place for key in self._keys for place in _active[key].places]

    def restore(self) -> None:
        """Restore every original, unless another patch still uses its replacement. A second call does nothing."""
        with _lock:
            keys, self._keys = self._keys, []
            _release(keys)

    def __str__(self) -> str:
        return "\n".join(map(str, [*self.replaced, *self.kept])) or "nothing to replace"

    def __repr__(self) -> str:
        return f"<Patch: {len(self.replaced)} names replaced, {len(self.kept)} kept>"


def patch(*libraries: str, strict: bool = True) -> Patch:
    """Make the trainers and models of other libraries use onepass, without a change to user code.

    A function is replaced in its own module and in all modules that import it, also those that are imported later.
    Other references (a closure, a default argument) keep the original. Patches may be nested: the last `Patch.restore`
    restores the originals. If an error is raised, nothing has been replaced. One line is logged at level INFO of the
    logger ``onepass``.

    Args:
        libraries: names of libraries. By default, transformers and TRL, if they are installed.

            - ``"transformers"``: heads, losses, routers and PEFT's adapters of heads and experts. In training with
              labels, ``outputs.logits`` is `LinearLogits`. The experts' implementation ``"onepass"`` stays registered
              after `Patch.restore`.
            - ``"trl"``: the log-probs, entropies, divergences and fused heads of the trainers.
            - ``"torch"``: the cross-entropy of a DTensor.
            - ``"torchtitan"`` and ``"megatron"``: losses, also of a sharded vocabulary, routers and experts.
            - ``"verl"``: log-probs, entropies and linear heads, also of a sharded vocabulary.
            If nothing of a library that is named can be replaced, there is a RuntimeWarning.
        strict: whether it is an error if a function has a signature that this version of onepass does not support, for
            example in a newer version of the library. With False, nothing is replaced in this library, a RuntimeWarning
            is issued, and `Patch.kept` lists its functions.

    Raises:
        ValueError: there is no library of this name in the list above.
        ModuleNotFoundError: a named library is not installed.
        RuntimeError: with ``strict``, a function has a signature that is not supported.

    Example::

        with onepass.patch("trl") as patched:
            print(patched)
            GRPOTrainer(...).train()
    """
    modules = _integrations(libraries)
    kept: list[Kept] = []
    if not check_bool(strict, "strict"):
        modules, kept = _supported(modules)
    patched = Patch(modules)
    patched.kept += kept
    try:
        for module in modules:
            if hasattr(module, "register"):
                module.register()
    except BaseException:
        patched.restore()
        raise
    for module in modules if libraries else ():
        warn_if_kept(module, patched)
    names = ", ".join(patched.libraries) or "no library"
    LOG.info("onepass: patched %s: %d names replaced, %d kept", names, len(patched.replaced), len(patched.kept))
    return patched


def warn_if_kept(module: ModuleType, patched: Patch) -> None:
    """Warn if nothing is replaced in a library that the user has named, with the first reason."""
    keys = [(t.module, t.name) for t in _targets([module])]
    if keys and not any(key in _active for key in keys):
        library = module.__name__.rpartition(".")[2]
        first = next(k for k in patched.kept if (k.module, k.name) in keys)
        text = f"libraries: nothing of {library!r} is replaced; {first} [OP005]"
        warnings.warn(text, RuntimeWarning, stacklevel=stacklevel_outside("onepass.", "importlib."))


def is_replaced(module: str, name: str) -> bool:
    """Whether a patch of this function is in effect."""
    return (module, name) in _active


def original(module: str, name: str) -> Any:
    """The original of a replacement that falls back to it, also if the replacement is called after the patch."""
    return _originals[module, name]


def extend(key: tuple[str, str], targets: Sequence[Target]) -> None:
    """Replace more functions, whose modules were imported after the patch, until that of ``key`` is restored."""
    with _lock:
        new = [t for t in targets if (t.module, t.name) not in _active]
        if new and key in _active:
            found, _ = _resolved(new)
            _activate(found)
            _active[key].later += found


def plan(*libraries: str) -> PatchPlan:
    """What `patch` would do, with the same arguments and errors. It imports the libraries and changes nothing."""
    with _lock:
        found, kept = _resolved(_targets(_integrations(libraries)))
        _find_places({key: a for key, a in found.items() if key not in _active})
        return PatchPlan([place for a in found.values() for place in a.places], kept)


def check_libraries(libraries: Sequence[str]) -> None:
    """Raise unless all of them can be patched and are installed."""
    for name in libraries:
        if name not in NAMES:
            raise ValueError(f"libraries: expected any of {', '.join(map(repr, NAMES))}, got {name!r}")
        check_installed(name, "libraries")


def _integrations(libraries: Sequence[str]) -> list[ModuleType]:
    check_libraries(libraries)
    chosen = libraries or [name for name in LIBRARIES if is_installed(name)]
    return [import_module(f"onepass.integrations.{name}") for name in chosen]


def _supported(integrations: Sequence[ModuleType]) -> tuple[list[ModuleType], list[Kept]]:
    """The integrations all of whose signatures are known, and the functions of the others. It warns of each of these.

    A library is replaced as a whole, since one replacement may rely on another.
    """
    found, kept = [], []
    for module in integrations:
        targets = _targets([module])
        try:
            with _lock:
                _resolved(targets)
            found.append(module)
        except UnknownSignature as error:
            reason = str(error).partition(": ")[2]
            kept += [Kept(t.module, t.name, reason) for t in targets]
            warnings.warn(f"{error} [OP004]", RuntimeWarning, stacklevel=stacklevel_outside("onepass.", "importlib."))
    return found, kept


def is_installed(library: str) -> bool:
    """Whether a library of `NAMES` can be imported."""
    try:
        return find_spec(PACKAGES.get(library, library)) is not None
    except ModuleNotFoundError:  # of its first package
        return False


def check_installed(library: str, argument: str) -> None:
    """Raise, naming the argument that requires it, unless the library can be imported."""
    if not is_installed(library):
        how = f"; pip install 'onepass[{library}]'" if library in EXTRAS else ""
        raise ModuleNotFoundError(f"{argument}: {library} is not installed{how}", name=library)


def version_of(library: str) -> str:
    """The version of an installed library."""
    package = import_module(PACKAGES.get(library, library))
    return getattr(package, "__version__", None) or metadata.version(library)


def _targets(integrations: Sequence[ModuleType]) -> list[Target]:
    return [t for module in integrations for t in (module.targets() if hasattr(module, "targets") else module.TARGETS)]


def _resolved(targets: Sequence[Target]) -> tuple[dict[tuple[str, str], _Active], list[Kept]]:
    """The originals to replace, whose signatures are checked, and the functions that are kept."""
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
        except (ImportError, RuntimeError) as error:  # a dependency of its module is missing
            reason = f"cannot be imported: {error}".partition("\n")[0]
        if reason:
            kept.append(Kept(*key, reason))
            continue
        holder = None
        for part in t.name.split("."):
            holder, original = original, getattr(original, "__dict__", {}).get(part)
        if t.inherited and original is None and holder is not None:
            original = getattr(holder, t.name.rpartition(".")[2])
            _check(t, original)
            found[key] = _Active(INHERITED, t.replacement, holder)
            continue
        if t.alone and original is None:
            kept.append(Kept(*key, "it is not imported there"))
            continue
        _check(t, original)
        if not t.registered:
            found[key] = _Active(original, t.replacement, holder if t.alone else None)
    return found, kept


def unsupported(module: str, since: str, until: str | None = None) -> str:
    """Why the installed version of the library is not supported; empty if it is."""
    library = module.partition(".")[0]
    has = TorchVersion(version_of(library))
    if has >= since and (until is None or has < until):
        return ""
    versions = f"from {since}" + (f" to before {until}" if until else "")
    return f"supported {versions}; {library} {has} has no such name, or another form of it"


def _check(t: Target, original: Any) -> None:
    function: Any = getattr(original, t.method, None) if t.method else original
    got = parameters(function) if callable(function) else None
    name = f"{t.name}.{t.method}" if t.method else t.name
    if got is not None and got in t.signatures:
        return
    library = t.module.partition(".")[0]
    known = " or ".join(f"({s})" for s in t.signatures)
    found = "no such name" if got is None else f"({got})"
    raise UnknownSignature(
        f"{t.module}.{name}: onepass {_own_version()} knows it as {known}, but "
        f"{library} {version_of(library)} has {found}; nothing of it was patched"
    )


def parameters(function: Callable[..., Any]) -> str:
    """The names of the parameters, in the form of `Target.signatures`."""
    return ", ".join(inspect.signature(function).parameters)


def _own_version() -> str:
    from onepass.core.version import __version__

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
    _originals.update({key: a.original for key, a in new.items()})
    for active in found.values():
        active.patches += 1


def _find_places(new: dict[tuple[str, str], _Active]) -> list[Place]:
    """All references to the originals; also stored in each `_Active`."""
    places = places_of({id(a.original): a.replacement for a in new.values() if a.holder is None}, EXTRAS)
    for (module, name), active in new.items():
        active.places = [p.replaced for p in places if p.replaced.original is active.original]
        if active.holder is not None:
            active.places = [Replaced(module, name, active.original, active.replacement)]
            places.append(Place(active.holder, name.rpartition(".")[2], active.places[0]))
    return places


def _release(keys: Sequence[tuple[str, str]]) -> None:
    ended, keys = [], list(keys)
    while keys:
        active = _active[key := keys.pop(0)]
        active.patches -= 1
        if not active.patches:
            ended.append(_active.pop(key))
            keys += active.later
    # Searched again, for modules imported since. A replacement that other code has overwritten is left as it is.
    for place in places_of({id(a.replacement): a.original for a in ended}, EXTRAS):
        place.write(place.replaced.replacement)
