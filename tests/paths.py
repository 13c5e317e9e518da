"""Which of the paths a test runs on."""

import inspect
import os
from typing import Any


def interpreted(device):
    """Whether kernels run in Triton's interpreter, where every program takes milliseconds."""
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def quick_interpreter(monkeypatch: Any) -> None:
    """Have Triton's interpreter do twice as much in the same time.

    It patches the language anew for every call of a function within a kernel, where once a launch is enough, checks
    every sum of integers for an overflow, and every value for its size, and builds the same types and shapes again.
    """
    import triton
    from triton.language import core
    from triton.runtime import interpreter

    if triton.__version__.startswith("3.5."):
        # It takes the strides of a descriptor, which are in elements, for bytes.
        monkeypatch.setattr(interpreter.TensorDescHandle, "validate", lambda self: None)
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
    of_dtype, of_block, of_tensor = interpreter._get_np_dtype, core.block_type.__init__, core.tensor.__init__
    dtypes: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[str, dict[str, Any]] = {}

    def np_dtype(dtype: Any) -> Any:
        if dtype.name not in dtypes:
            dtypes[dtype.name] = of_dtype(dtype)
        return dtypes[dtype.name]

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[s if type(s) is int else s.value for s in shape]
        if key not in blocks:
            of_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key], element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in shapes:
            of_tensor(self, handle, type)
            shapes[type.name] = {"shape": self.shape, "numel": self.numel}
        self.__dict__.update(shapes[type.name], handle=handle, type=type, dtype=type.scalar)

    members: dict[int, list[tuple[str, Any]]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in members:
            found = [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]
            members[id(package)] = [(name, with_semantic(member)) for name, member in found]
        for name, member in members[id(package)]:
            scope.set_attr(package, name, member)

    def with_semantic(member: Any) -> Any:
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtin)
    monkeypatch.setattr(interpreter, "_validate_np_data_size", lambda array, dtype: True)
    monkeypatch.setattr(interpreter, "_get_np_dtype", np_dtype)
    monkeypatch.setattr(core.block_type, "__init__", block_type)
    monkeypatch.setattr(core.tensor, "__init__", tensor)
