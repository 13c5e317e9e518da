"""What tests of several paths share: which one it is, a quicker interpreter, and the capture of a CUDA graph."""

import inspect
import os
from typing import Any

import torch

# Arithmetic that is NumPy's, with what `binary_op_type_checking_impl` is told of it; and the types for which it is.
ARITHMETIC: dict[str, tuple[Any, ...]] = {
    "__add__": ("add", True, True), "__sub__": ("subtract", True, False), "__mul__": ("multiply",),
    "__truediv__": ("divide", False, False, True, True),
}  # fmt: skip
FLOATS = {"fp32", "fp64"}
INTEGERS = {"int32", "int64"}
NUMBERS = FLOATS | INTEGERS
COMPARISONS = {
    "__lt__": "less", "__le__": "less_equal", "__gt__": "greater", "__ge__": "greater_equal", "__eq__": "equal",
    "__ne__": "not_equal",
}  # fmt: skip


def interpreted(device):
    """Whether kernels run in Triton's interpreter, where every program takes milliseconds."""
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def captured(step: Any) -> tuple[Any, Any]:
    """A CUDA graph of ``step()``, which is called on another stream before, and what it returned."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def quick_interpreter(monkeypatch: Any) -> None:
    """Have Triton's interpreter do twice as much in the same time.

    It patches the language anew for every call of a function within a kernel, where once is enough, checks every sum of
    integers for an overflow, and every value for its size, and builds the same types, shapes and constants again.
    """
    import numpy
    import triton
    from triton.language import core
    from triton.runtime import interpreter

    if triton.__version__.startswith("3.5."):
        # It takes the strides of a descriptor, which are in elements, for bytes.
        monkeypatch.setattr(interpreter.TensorDescHandle, "validate", lambda self: None)
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another version
    original, patched = interpreter._patch_lang, {}
    nothing = interpreter._LangPatchScope()  # to restore

    def patch_once(function: Any) -> Any:
        """And leave it so, since nothing is compiled where kernels are interpreted."""
        module = function.__globals__
        if id(module) not in patched:
            patched[id(module)] = module, original(function)
        return nothing

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

    def handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    members: dict[int, list[tuple[str, Any]]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in members:
            found = [(name, member) for name, member in inspect.getmembers(package) if core.is_builtin(member)]
            members[id(package)] = [(name, with_semantic(member)) for name, member in found]
        for name, member in members[id(package)]:
            if package is core.tensor and name in ARITHMETIC:
                types = FLOATS if name == "__truediv__" else NUMBERS
                member = of_numbers(member, types, *ARITHMETIC[name])
            if package is core.tensor and name in COMPARISONS:
                member = of_comparison(member, COMPARISONS[name])
            scope.set_attr(package, name, member)

    def of_numbers(member: Any, types: set[str], name: str, *flags: bool) -> Any:
        operation, is_sum = getattr(numpy, name), name == "add"

        def call(self: Any, other: Any) -> Any:
            dtype = self.dtype
            if dtype.name in types:
                if type(other) in (int, float) or (type(other) is core.tensor and other.dtype.name in types):
                    self, other = check_once(self, other, *flags)
                    data = operation(self.handle.data, other.handle.data)
                    return core.tensor(interpreter.TensorHandle(data, self.dtype), self.type)
            elif is_sum and type(other) is core.tensor and other.dtype.name in INTEGERS and dtype.is_ptr():
                self, other = check_once(self, other, *flags)
                return core.tensor(builder.create_addptr(self.handle, other.handle), self.type)
            return member(self, other)

        return call

    def of_comparison(member: Any, name: str) -> Any:
        operation = getattr(numpy, name)

        def call(self: Any, other: Any) -> Any:
            of_other = type(other)
            if self.dtype.name in NUMBERS and (
                of_other in (int, float) or (of_other is core.tensor and other.dtype.name in NUMBERS)
            ):
                self, other = check_once(self, semantic.to_tensor(other))
                key = self.type.name
                if key not in of_bools:
                    of_bools[key] = semantic._bool_like(self)
                data = operation(self.handle.data, other.handle.data)
                return core.tensor(interpreter.TensorHandle(data, self.dtype), of_bools[key])
            return member(self, other)

        return call

    def with_semantic(member: Any) -> Any:
        function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    unchanged: set[Any] = set()  # types of two tensors that both are as they must be
    changes: dict[Any, Any] = {}  # types of two tensors, and what each must be; None for one that already is
    of_bools: dict[str, Any] = {}
    constants: dict[Any, Any] = {}

    def remember(key: Any, before: Any, after: Any) -> Any:
        types = [None if a is b else b.type for a, b in zip(before, after, strict=True)]
        if types == [None, None]:
            unchanged.add(key)
        else:
            changes[key] = types
        return after

    def check_once(lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
        """Types decide what becomes of two operands, and of a number beside a tensor only its value."""
        of_lhs, of_rhs = type(lhs), type(rhs)
        if named or (of_lhs is not core.tensor and of_rhs is not core.tensor):
            return check(lhs, rhs, *flags, **named)
        if of_lhs is core.tensor and of_rhs is core.tensor:
            key: Any = lhs.type.name, rhs.type.name, flags
            if key in unchanged:
                return lhs, rhs
            if key in changes:
                left, right = changes[key]
                return lhs if left is None else changed(lhs, left), rhs if right is None else changed(rhs, right)
            return remember(key, (lhs, rhs), check(lhs, rhs, *flags))
        left = of_rhs is core.tensor
        tensor_, number = (rhs, lhs) if left else (lhs, rhs)
        if type(number) not in (int, float):
            return check(lhs, rhs, *flags)
        key = tensor_.type.name, left, type(number), number or str(number), flags  # 0.0 is not -0.0
        if key in constants:
            return (constants[key], rhs) if left else (lhs, constants[key])
        found = check(lhs, rhs, *flags)
        if found[left] is tensor_ and number == number:
            constants[key] = found[not left]
        return found

    def changed(x: Any, type_: Any) -> Any:
        name = type_.scalar.name
        if x.dtype.name != name:
            if x.dtype.name in INTEGERS and name in INTEGERS:
                x = core.tensor(interpreter.TensorHandle(x.handle.data.astype(np_dtype(type_.scalar)), type_.scalar),
                                x.type.with_element_ty(type_.scalar))  # fmt: skip
            else:
                x = semantic.cast(x, type_.scalar)
        data = x.handle.data
        if type_.is_block() and not x.type.is_block():
            data = numpy.full(type_.shape, data, dtype=data.dtype)
        elif x.type.name != type_.name:
            data = numpy.broadcast_to(data, type_.shape)
        else:
            return x
        return core.tensor(interpreter.TensorHandle(data, type_.scalar), type_)

    def broadcast_once(lhs: Any, rhs: Any) -> Any:
        key = lhs.type.name, rhs.type.name
        if key in unchanged:
            return lhs, rhs
        if key in changes:
            left, right = changes[key]
            return lhs if left is None else changed(lhs, left), rhs if right is None else changed(rhs, right)
        return remember(key, (lhs, rhs), broadcast(lhs, rhs))

    monkeypatch.setattr(semantic, "binary_op_type_checking_impl", check_once)
    monkeypatch.setattr(semantic, "broadcast_impl_value", broadcast_once)
    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtin)
    monkeypatch.setattr(interpreter, "_validate_np_data_size", lambda array, dtype: True)
    monkeypatch.setattr(interpreter, "_get_np_dtype", np_dtype)
    monkeypatch.setattr(core.block_type, "__init__", block_type)
    monkeypatch.setattr(core.tensor, "__init__", tensor)
    monkeypatch.setattr(interpreter.TensorHandle, "__init__", handle)
