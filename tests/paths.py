"""Which of the paths a test runs on."""

import os
from typing import Any


def interpreted(device):
    """Whether kernels run in Triton's interpreter, where every program takes milliseconds."""
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def quick_interpreter(monkeypatch: Any) -> None:
    """Have Triton's interpreter do twice as much in the same time.

    It patches the language anew for every call of a function within a kernel, where once a launch is enough, and checks
    every sum of integers for an overflow.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another version
    original, patched = interpreter._patch_lang, []

    def patch_once(function: Any) -> Any:
        outermost, module = not patched, id(function.__globals__)
        if module in patched:
            return interpreter._LangPatchScope()
        scope = original(function)
        patched.append(module)
        if outermost:
            restore = scope.restore

            def restore_all() -> None:
                patched.clear()
                restore()

            scope.restore = restore_all
        return scope

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
