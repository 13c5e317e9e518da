"""What `make kernel` writes is loaded by Hugging Face's library `kernels`, and computes what onepass does."""

import importlib
import json
import os

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import forks
import onepass
from hub.build import BACKENDS, VERSION, build, renamed, sources

kernels = pytest.importorskip("kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernel")
    build(path)
    return path


@pytest.fixture(scope="module")
def kernel(folder):
    return kernels.get_local_kernel(folder, backend="cpu")


def results(library, device):
    """Losses of logits, of a head and of a router with its experts, and all gradients."""
    torch.manual_seed(0)
    shapes = (6, 33), (6, 8), (33, 8), (4, 8, 8), (4, 8, 4)
    inputs = [torch.randn(*shape, device=device, requires_grad=True) for shape in shapes]
    x, hidden, weight, w13, w2 = inputs
    target = torch.tensor([1, 2, -100, 4, 32, 0], device=device)
    losses = (
        library.cross_entropy(x, target, z_loss_weight=1e-3),
        library.kl_div(x, x.detach().flip(0)),
        library.linear_cross_entropy(hidden, weight, target),
        library.moe.expert_mlp(hidden, library.moe.route(hidden @ weight[:4].T, 2), w13, w2).square().mean(),
    )
    sum(losses).backward()
    return [*losses, *(t.grad for t in inputs)]


def test_both_in_one_process(kernel, device):
    assert kernel.__name__ != "onepass" and kernel.core.version.__version__ == VERSION
    got, expected = results(kernel, device), results(onepass, device)
    assert len(got) == 9 and all(map(torch.equal, got, expected))


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.namespaces = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.namespaces.add(function.namespace)
        return function(*args, **(kwargs or {}))


def test_each_has_operations_of_its_own(kernel):
    for library in (kernel, onepass):
        with Operations() as seen:
            library.cross_entropy(torch.randn(2, 5, requires_grad=True), torch.tensor([1, 2])).backward()
        assert seen.namespaces - {"aten"} == {library.__name__}


def test_no_module_of_one_imports_the_other(kernel, folder):
    for path in (folder / "build" / "torch-cpu").rglob("*.py"):
        assert "from onepass" not in path.read_text() and "import onepass" not in path.read_text()
    # Including those that are imported on first use.
    names = [name.removesuffix(".py").replace("/", ".") for name in sources() if name.endswith(".py")]
    for name in names:
        module = importlib.import_module(f"{kernel.__name__}.{name}".removesuffix(".__init__"))
        for value in vars(module).values():
            assert not (getattr(value, "__module__", None) or "").startswith("onepass"), (name, value)


def test_it_has_the_numbers_that_were_tuned(kernel):
    own = importlib.import_module(f"{kernel.__name__}.autotune.own")
    gemm = importlib.import_module(f"{kernel.__name__}.kernels.grouped_gemm")
    assert sorted(p.name for p in own.SHIPPED.iterdir()) == ["h100.json", "h200.json"]
    known = json.loads((own.SHIPPED / "h100.json").read_text())["records"]
    assert own.identity_of(gemm.grouped_gemm_kernel) in {r["source_hash"] for r in known}


def test_names(kernel):
    assert set(onepass.__all__) - set(kernel.__all__) == {"Attached", "Patch", "attach", "patch"}
    assert set(kernel.__all__) - set(onepass.__all__) == {"layers"}
    assert kernel.moe.__all__ == onepass.moe.__all__


def test_deprecated_names_point_at_the_caller(kernel):
    with pytest.warns(DeprecationWarning, match="pass class_weights") as warned:
        kernel.cross_entropy(torch.randn(2, 5), torch.tensor([1, 2]), weight=torch.ones(5))
    assert warned[0].filename == __file__


@forks.GROUP
def test_where_onepass_is_not_installed(folder, tmp_path):
    """In a process in which nothing of it can be imported."""
    code = f"""
import sys
from pathlib import Path
sys.modules["onepass"] = None  # an import of it fails
import torch
from kernels import get_local_kernel
kernel = get_local_kernel(Path({str(folder)!r}))
x = torch.randn(4, 7, requires_grad=True)
target = torch.tensor([1, 2, 3, -100])
loss = kernel.cross_entropy(x, target)
(gradient,) = torch.autograd.grad(loss, x)
expected = torch.nn.functional.cross_entropy(x, target)
assert torch.allclose(loss, expected) and torch.allclose(gradient, torch.autograd.grad(expected, x)[0], atol=1e-7)
assert sys.modules["onepass"] is None
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = forks.run(code, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr


def test_a_layer_is_found_by_its_name(folder):
    @kernels.use_kernel_forward_from_hub("ForCausalLMLoss")
    class Loss(torch.nn.Module):  # with the parameters of transformers' function
        def forward(
            self, logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs
        ):
            raise AssertionError("this one is replaced")

    layer = kernels.LocalLayerRepository(repo_path=folder, layer_name="ForCausalLMLoss")
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping({"ForCausalLMLoss": {"cpu": {mode: layer}}}, inherit_mapping=False):
        model = kernels.kernelize(torch.nn.Sequential(Loss()), mode=mode, device="cpu", use_fallback=False)
    logits, labels = torch.randn(2, 5, 11), torch.randint(11, (2, 5))
    labels[0, 2] = -100
    got = model[0](logits, labels, 11), model[0](logits, labels, 11, num_items_in_batch=torch.tensor(3))
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    assert torch.allclose(got[0], expected / 7) and torch.allclose(got[1], expected / 3)


@pytest.mark.exhaustive
def test_it_is_the_same_every_time(folder, tmp_path):
    build(tmp_path)
    files = [{p.relative_to(f): p.read_bytes() for p in f.rglob("*") if p.suffix in (".py", ".json", ".md")}
             for f in (folder, tmp_path)]  # fmt: skip
    assert files[0] == files[1]
    about = [json.loads((tmp_path / "build" / f"torch-{b}" / "metadata.json").read_text()) for b in BACKENDS]
    assert len({a["id"] for a in about}) == len(BACKENDS)
    assert {a["version"] for a in about} == {1}


@pytest.mark.parametrize(
    "line, expected",
    [
        ("from onepass.core.checks import short", "from ..core.checks import short"),
        ("é = 1; from onepass import (\n    reference,\n)", "é = 1; from .. import (\n    reference,\n)"),
        ("x = 'onepass: no name of a module'", None),
        ('operation("onepass::route")', 'operation("X::route")'),
        ('name in ("onepass", "torch")', 'name in ("X", "torch")'),
        ("torch.ops.onepass", "torch.ops.X"),
        ('"""onepass.cross_entropy of a docstring."""', None),
        ("onepasses = 'onepasses'", None),
    ],
)
def test_what_is_renamed(line, expected):
    assert renamed(f"{line}\n", "moe/router.py", "X") == f"{expected or line}\n"


@pytest.mark.parametrize("line", ["import onepass.core", "x = 'onepass.core'", 'x = f"onepass.{1}"'])
def test_what_is_not_understood_is_an_error(line):
    with pytest.raises(ValueError, match=r"moe/router.py:1: "):
        renamed(f"{line}\n", "moe/router.py", "X")
