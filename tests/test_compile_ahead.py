"""Every kernel, compiled for every target ahead of time: it takes no GPU to see that none spills a register.

The launchers themselves run, on tensors without memory, so what is compiled is what they would launch. That happens
in a process of its own (this file is also its script), because the other tests may have switched Triton to its
interpreter. For each target it forks another, since launchers remember what they know of the device.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from functools import partial
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
import torch

import onepass
from compile_ahead_cases import CASES, LARGEST, SELECTIONS, WHOLE, kernels, launch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}
KERNELS = sorted(
    {
        name
        for module in iter_modules(kernels.__path__, "onepass.kernels.")
        for name in vars(import_module(module.name))
        if name.endswith("_kernel")
    }
)
DTYPES = ("bfloat16", "float32")  # float16 takes the registers of bfloat16


def is_compiled(target: str, dtype: str, case: str) -> bool:
    if dtype == "bfloat16":
        return target == WHOLE or case == LARGEST
    return target == WHOLE and case == LARGEST


def is_brief(dtype: str, case: str) -> bool:
    """Of these, tests that are not exhaustive compile the first launch of each kernel that `has_turn`."""
    return dtype == "bfloat16" and case == LARGEST


IN_TURNS = "sm_80", "sm_100"  # tests that are not exhaustive compile a kernel for one of these


def has_turn(target: str, kernel: str) -> bool:
    return target not in IN_TURNS or KERNELS.index(kernel) % len(IN_TURNS) == IN_TURNS.index(target)


pytestmark = pytest.mark.xdist_group("compile_ahead")  # one worker compiles, once
OF_HALF = "topk_routing_kernel", "biased_routing_kernel"  # the second is launched for other dtypes too
MODULES = (
    "token_sort", "decode", "grouped_gemm", "grouped_gemm_hopper", "grouped_weight_gradient",
    "grouped_weight_gradient_hopper", "expert_rows",
)  # fmt: skip
OF_EXPERTS = [import_module(f"onepass.kernels.{name}") for name in MODULES]
SUPPORTED = import_module("onepass.kernels.grouped_gemm_hopper").SUPPORTED
EXPERTS = {name for name in KERNELS if any(name in vars(module) for module in OF_EXPERTS)}
IN_GLUON = {
    "grouped_gemm_hopper_kernel",
    "grouped_weight_gradient_hopper_kernel",
    "linear_exponentials_kernel",
    "few_rows_mm_kernel",
}
OF_EXPONENTIALS = {"linear_exponentials_kernel", "merge_exponentials_kernel", "reference_kernel", "factors_kernel"}
OF_HOPPER = {*IN_GLUON, *OF_EXPONENTIALS, "linear_statistics_kernel", "merge_tiles_kernel"}
# Constants that a launcher passes but does not choose by its arguments.
FIXED = {"TILES", "BLOCK", "ROWS", "PART", "TILE_ROWS", "WIDTH", "MERGED", "GROUP", "NESTED", "maxnreg"}
SPILLS = 3  # instructions of a kernel with a limit of registers, or of an earlier Triton
EARLIER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
MAY_SPILL = {  # docs/versions.md
    "grouped_gemm_hopper_kernel": 71 if EARLIER else 72,
    "grouped_gemm_kernel": SPILLS if EARLIER else 1,
    "linear_exponentials_kernel": 143 if EARLIER else 82,
}
OF_ONE_WIDTH = {
    "scale_kernel",
    "row_weight_kernel",
    "row_average_kernel",
    "selected_logits_kernel",
    "support_gradient_kernel",
    "support_statistics_kernel",
    "teacher_tokens_kernel",
    "merge_divergences_kernel",
    "merge_shards_kernel",
}
# Fields of the constants that a kernel does not read. They must not vary, or it would be compiled several times.
NOT_COMPUTED = {
    "decode_kernel": {"CODE.FLIPPED"},
    "linear_statistics_kernel": {"WANTED.ENTROPY", "WANTED.LOG_PROBS", "WANTED.WEIGHTED"},
    "merge_shards_kernel": {"WANTED.ENTROPY", "WANTED.SOFTCAP", "WANTED.TOP1"},
    "merge_tiles_kernel": {"WANTED.ENTROPY", "WANTED.SOFTCAP", "WANTED.WEIGHTED"},
    "softmax_gradient_kernel": {"WANTED.MEAN", "WANTED.TOP1"},
    "softmax_loss_kernel": {"WANTED.ENTROPY"}
    | {f"{name}.{field}" for name in ("WANTED", "GRADIENT") for field in ("MEAN", "TEMPERED")},
    "softmax_statistics_kernel": {"WANTED.ENTROPY"},
    "support_gradient_kernel": {"WANTED.MEAN", "WANTED.TOP1"},
    "support_statistics_kernel": {"WANTED.ENTROPY", "WANTED.MEAN"},
}
TUNED = {"STAGES", "num_warps", "BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK_R", "BLOCK_T"}  # of experts


@triton.jit
def spilling_kernel(x, N: tl.constexpr):
    """Holds ``N`` numbers in registers until their sum is known."""
    values = tl.load(x + tl.arange(0, N))
    tl.store(x + tl.arange(0, N), values / tl.sum(values))


def dumped(option: str, path: str) -> str:
    command = [triton.knobs.nvidia.cuobjdump.path, option, path]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def resources(kernel: Any) -> dict[str, Any]:
    """What the binary says of itself: its registers, and what it keeps in memory for want of more."""
    if "cubin" in kernel.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            spills = {"LDL": 0, "STL": 0}
            text = dumped("-res-usage", file.name)
            # LLVM may reserve a byte of stack that nothing uses. Disassembly takes long, and tells.
            if re.search(r"\bSTACK:(\d+)", text)[1] != "0":
                sass = dumped("-sass", file.name)
                spills = {name: len(re.findall(rf"\b{name}\b", sass)) for name in spills}
        registers = re.findall(r"\bREG:(\d+)", text)
    else:
        text = kernel.asm["amdgcn"]
        # Scalar registers are spilled to vector registers, and from there to the private segment, which is memory.
        names = ".vgpr_spill_count", ".private_segment_fixed_size"
        spills = {name: int(re.search(rf"{re.escape(name)}:\s*(\d+)", text)[1]) for name in names}
        registers = re.findall(r"(?<![\w.])\.vgpr_count:\s*(\d+)", text)
    assert len(registers) == 1, f"expected the registers once in:\n{text}"
    # Minima and maxima of floats that ignore a NaN. The interpreter calls those of numpy, which do not ignore it.
    ignored = len(
        re.findall(
            r"arith\.(?:min|max)numf|tt\.clampf .*propagateNan = none", kernel.asm.get("ttir", kernel.asm["ttgir"])
        )
    )
    found = {"registers": int(registers[0]), "spills": spills, "ignoring_nan": ignored}
    return found | {"unfenced": unfenced(kernel.asm.get("ptx", ""))}


def unfenced(ptx: str) -> int:
    """How many numbers that a product of Hopper's tensor cores adds to are written after the fence before it."""
    count = 0
    for between, result in re.findall(r"wgmma\.fence\S*;(.*?)wgmma\.mma_async\S*\s+\{(.*?)\}", ptx, re.S):
        written = re.findall(r"^\s*(?:@%p\d+\s+)?[a-z]\S*\s+(%\w+),", between, re.M)
        count += len({*written} & {*re.findall(r"%\w+", result)})
    return count


class Driver:
    """As much of a Triton driver as it takes to compile."""

    def __init__(self, target: Any) -> None:
        self.get_current_target = lambda: target
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


def named(constants: dict[str, Any]) -> dict[str, Any]:
    """Constants for a JSON, which knows no named tuples."""
    return {name: c._asdict() if hasattr(c, "_asdict") else c for name, c in constants.items()}


def compile_all(target: str, brief: bool) -> dict[str, list[dict[str, Any]]]:
    """`resources` (or the error) and launch constants of every kernel in every variant, for one target.

    If ``brief``, most variants have no `resources`, since they are not compiled.
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    reports: dict[str, list[dict[str, Any]]] = {}
    launch_or_warm_up = JITFunction.run

    def warm_up(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        # Triton's own: specialises and compiles for the active driver's target as a launch does, and stops there.
        # Nothing is returned, so that nothing is kept to be launched.
        kernel, report = self.fn.__name__, {}
        found = reports.setdefault("-".join((kernel, *variant)), [])
        if not brief or not variant or (not found and is_brief(*variant) and has_turn(target, kernel)):
            try:
                report = resources(launch_or_warm_up(self, *args, grid=grid, warmup=True, **constants))
            except Exception as error:  # is this variant's; the others are still worth knowing
                report = {"error": f"{type(error).__name__}: {error}"}
        found.append(report | {"constants": named(constants)})

    JITFunction.run = warm_up
    triton.runtime.driver.set_active(Driver(GPUTarget(*TARGETS[target])))
    variant = ()
    # The most threads a program may have, so that each gets few registers.
    spilling_kernel[(1,)](torch.empty(1, device="meta"), N=1 << 17, num_warps=1024 // TARGETS[target][2])
    for variant in product(DTYPES, CASES):
        dtype, case = variant
        if not is_compiled(target, dtype, case):
            continue
        launch(CASES[case], getattr(torch, dtype))
    return reports


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`compile_all` of every target, which is brief unless an exhaustive test is to run."""
    items = [item for item in request.session.items if item.path == request.path]
    brief = not any(item.get_closest_marker("exhaustive") for item in items)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    paths = os.environ.get("PYTHONPATH"), str(Path(onepass.__file__).parents[1])  # the first has another Triton, if any
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, __file__, *["brief"] * brief]
    script = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert script.returncode == 0, script.stderr
    return json.loads(script.stdout)


VARIANTS = [
    pytest.param(*v, marks=() if is_brief(*v[1:]) else pytest.mark.exhaustive)
    for v in product(TARGETS, DTYPES, CASES)
    if is_compiled(*v)
]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("target, dtype, case", VARIANTS)
def test_compiles_without_spills(reports: dict[str, Any], target: str, kernel: str, dtype: str, case: str) -> None:
    if kernel in IN_GLUON | OF_EXPONENTIALS and not SUPPORTED:
        pytest.skip("takes Triton 3.6 or later")
    if kernel in OF_HOPPER and (target, dtype) != ("sm_90", "bfloat16"):
        pytest.skip("is launched on Hopper, for half precision")
    if kernel in EXPERTS and (CASES[case].mlp is None or dtype != "bfloat16"):
        pytest.skip("has no experts")
    if kernel in ("topk_routing_kernel", "biased_routing_kernel") and (
        CASES[case] not in SELECTIONS or dtype != "bfloat16"
    ):
        pytest.skip("has no router that it takes")
    compiled = [r for r in reports[target][f"{kernel}-{dtype}-{case}"] if r.keys() != {"constants"}]
    assert compiled or not (is_brief(dtype, case) and has_turn(target, kernel))
    if not compiled:
        pytest.skip("is compiled if the exhaustive tests run too")
    for report in compiled:
        assert "error" not in report, report["error"]
        few = MAY_SPILL.get(kernel, SPILLS if EARLIER or report["constants"].get("maxnreg") else 0)
        assert max(report["spills"].values()) <= few, report
        assert not report["unfenced"], "what a product adds to is written after its fence: see `row_gemm.separate`"
        if kernel in EXPERTS:
            assert not report["ignoring_nan"], "a NaN in a row would become a number"


def test_unfenced_numbers_are_seen() -> None:
    """Those written before the fence, and others, are not counted."""
    product = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%r1,%r2,%r3,%r4}, %rd1, %rd2, 1, 1, 1, 0, 0;\n"
    fence, others = "\twgmma.fence.sync.aligned;\n", "\tmov.b32 \t%r5, %r1;\n\tadd.s64 \t%rd1, %rd2, 2;\n"
    moves = "\tmov.b32 \t%r3, %r1;\n\t@%p1 mov.f32 %r4, %r2;\n"
    assert unfenced(moves + fence + others + product) == 0
    assert unfenced(fence + others + moves + product + moves + fence + product) == 2


@pytest.mark.parametrize("target", TARGETS)
def test_spills_are_seen(reports: dict[str, Any], target: str) -> None:
    (report,) = reports[target]["spilling_kernel"]
    assert any(report["spills"].values())


def flat(constants: dict[str, Any]) -> dict[str, Any]:
    """The constants of a launch, where those of an object have their own names."""
    fields = {f"{name}.{n}": v for name, c in constants.items() if isinstance(c, dict) for n, v in c.items()}
    return {name: "given" if isinstance(c, dict) else c for name, c in constants.items()} | fields


@pytest.mark.parametrize("kernel", KERNELS)
def test_cases_cover_the_launcher(reports: dict[str, Any], kernel: str) -> None:
    if kernel in IN_GLUON | OF_EXPONENTIALS and not SUPPORTED:
        pytest.skip("takes Triton 3.6 or later")
    variants = [
        flat(report["constants"])
        for target in TARGETS
        for name, found in reports[target].items()
        for report in found
        if name.startswith(kernel)
    ]
    never_varied = {name for name in variants[0] if len({constants.get(name) for constants in variants}) == 1}
    fixed = FIXED | {"num_warps"} if kernel in OF_ONE_WIDTH else FIXED
    fixed = fixed | {"PRECISION", "PACKED"} if kernel in OF_HOPPER else fixed
    fixed = fixed | TUNED if kernel in EXPERTS | OF_HOPPER else fixed
    fixed = fixed | {"A_ROW"} if kernel in OF_EXPONENTIALS else fixed
    never_varied = {re.sub(r"^(GEMM|WORK)\.", "", name) for name in never_varied if variants[0][name] != "given"}
    unread = NOT_COMPUTED.get(kernel, set())
    assert unread <= never_varied <= fixed | unread  # else one kernel is compiled as several


if __name__ == "__main__":
    import_module("torch._dynamo")  # as operations on tensors without memory do
    with get_context("fork").Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        found = pool.map(partial(compile_all, brief="brief" in sys.argv[1:]), TARGETS, chunksize=1)
        print(json.dumps(dict(zip(TARGETS, found))))
