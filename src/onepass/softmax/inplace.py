"""Logits that were overwritten with their gradient. `statistics` marks them, and later uses raise an error."""

from typing import Any

import torch

# Functions that are still allowed: those of the gradient (a leaf's `.grad` is the overwritten memory) and metadata.
_PROPERTIES = ("grad", "shape", "dtype", "device", "layout", "ndim", "is_leaf", "requires_grad", "grad_fn", "is_cuda")
ALLOWED = {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES}
ALLOWED |= {getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "__hash__")}
ALLOWED |= {vars(torch._C.TensorBase)["grad"].__set__}  # the zero_grad() of an optimizer


class OverwrittenLogits(torch.Tensor):
    """The class of a tensor that ``inplace_backward=True`` has overwritten with its own gradient."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in ALLOWED:
            raise RuntimeError(
                "logits: used after their gradient was written over them; pass inplace_backward=False to keep them"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def mark_overwritten(logits: torch.Tensor) -> None:
    """Make a later use of ``logits``, or of the tensor they are a view of, an error.

    Autograd detects it by the version counter (a second backward, a backward of another function that saved the
    logits), Python by the class. Another view that was taken before shares the counter but not the class.
    """
    torch.autograd.graph.increment_version(logits)
    for tensor in (logits, logits._base):
        if type(tensor) in (torch.Tensor, torch.nn.Parameter):
            tensor.__class__ = OverwrittenLogits
