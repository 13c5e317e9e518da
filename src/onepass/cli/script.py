"""Run a script or a module as Python itself does, after `onepass.patch`. Needs no extra."""

import builtins
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import Any, NoReturn

import onepass
from onepass.integrations.patching import LIBRARIES, is_installed, version_of
from onepass.integrations.switch import VARIABLE, libraries_asked_for

# What Python itself calls for -m and for folders. The public functions restore __main__ and sys.argv when they return.
RUN_AS_MAIN = runpy._run_module_as_main  # type: ignore[attr-defined]
# Without it, Python has put a folder for onepass in front of sys.path, which is replaced by that of the script.
SAFE_PATH = getattr(sys.flags, "safe_path", bool(sys.flags.isolated))
USAGE = "expected a script with its arguments, or -m and a module with its arguments"


def is_script(arguments: Sequence[str]) -> bool:
    """Whether arguments of ``onepass run`` begin with a script or with ``-m`` and a module."""
    if arguments[:1] == ["-m"]:
        return len(arguments) > 1
    return bool(arguments) and not arguments[0].startswith("-")


def patch_and_run(arguments: Sequence[str]) -> None:
    """Patch the installed libraries (or those that ``ONEPASS_PATCH`` names), and run a script or module.

    Args:
        arguments: the path of a script, or ``-m`` and the name of a module; then the arguments of either.
    """
    path, *rest = arguments
    if path != "-m" and not os.path.exists(path):
        refuse(path, "no such file or directory")
    print(f"onepass: {patch_libraries()}", file=sys.stderr, flush=True)
    try:
        if path == "-m":
            run_module(*rest)
        elif get_importer(path) is None:
            run_file(path, rest)
        else:
            run_container(path, rest)
    except Exception as error:
        traceback = from_script(error.__traceback__)
        sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        sys.exit(1)


def refuse(path: str, why: str | None) -> NoReturn:
    """End as Python does for a script that it cannot read."""
    print(f"onepass: can't open file {path!r}: {why}", file=sys.stderr)
    sys.exit(2)


def patch_libraries() -> str:
    """Patch, and say what was patched in one line."""
    names = libraries_asked_for()
    if names is None:
        names = [name for name in LIBRARIES if is_installed(name)]
        if not names:
            return f"nothing patched, because none of {', '.join(LIBRARIES)} is installed"
    elif not names:
        return f"nothing patched ({VARIABLE}={os.environ[VARIABLE]})"
    patched = onepass.patch(*names, strict=False)  # what is not supported is left alone with a warning
    versions = ", ".join(f"{name} {version_of(name)}" for name in patched.libraries) or "nothing"
    kept = f", {len(patched.kept)} kept" if patched.kept else ""
    return f"patched {versions} ({len(patched.replaced)} names replaced{kept})"


def run_file(path: str, arguments: Sequence[str]) -> None:
    """A file of source code, or a compiled one."""
    whole = os.path.join(os.getcwd(), path)  # not normalized: "link/.." is the folder above the one it links to
    compiled = path.endswith(".pyc")
    loader: Any = (SourcelessFileLoader if compiled else SourceFileLoader)("__main__", whole)
    try:
        code = loader.get_code("__main__") if compiled else loader.get_data(whole)
    except OSError as error:
        refuse(path, error.strerror)
    main = new_main(__file__=whole, __cached__=None, __loader__=loader)
    sys.argv = [path, *arguments]
    if not SAFE_PATH:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    exec(code if compiled else compile(code, whole, "exec", dont_inherit=True), main.__dict__)


def run_container(path: str, arguments: Sequence[str]) -> None:
    """A folder or an archive with a ``__main__.py``."""
    sys.argv = [path, *arguments]
    sys.path[: 0 if SAFE_PATH else 1] = [os.path.abspath(path)]
    new_main()
    RUN_AS_MAIN("__main__", alter_argv=False)


def run_module(name: str, *arguments: str) -> None:
    """A module, or the ``__main__`` of a package, found from the current folder on."""
    sys.argv = ["-m", *arguments]  # until the module is found
    if not SAFE_PATH:
        sys.path[0] = os.getcwd()
    new_main()
    RUN_AS_MAIN(name)


def new_main(**attributes: Any) -> ModuleType:
    """An empty module ``__main__``, which stays until the process ends."""
    main = ModuleType("__main__")
    if sys.version_info < (3, 14):  # from then on, a module has it if it annotates something
        attributes["__annotations__"] = {}
    main.__dict__.update(attributes, __builtins__=builtins)
    sys.modules["__main__"] = main
    return main


def from_script(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of onepass and `runpy` that lead to the script."""
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") in (__name__, "runpy"):
        traceback = traceback.tb_next
    return traceback
