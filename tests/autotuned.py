"""Autotuned kernels of "another library", with a benchmarker that counts. Tests load this file again and again."""

import torch
import triton
import triton.language as tl

benchmarks = []  # what was timed


def benchmark(call, quantiles):
    call()
    benchmarks.append(call)
    time = 3.0 - (len(benchmarks) - 1) % 3  # in milliseconds: the third of three is the fastest
    return [time, time, time]


CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((8, 1), (16, 2), (32, 4))]
IN_TWO_HALVES = {"HALF": lambda args: args["n"] // 2}


@triton.autotune(CONFIGS, key=["n", "activation"], do_bench=benchmark)
@triton.jit
def plain_kernel(x, y, n, activation: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


@triton.heuristics(IN_TWO_HALVES)
@triton.autotune(CONFIGS, key=["n"], do_bench=benchmark)
@triton.jit
def heuristics_outside_kernel(x, y, n, HALF: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


@triton.autotune(CONFIGS, key=["n"], do_bench=benchmark)
@triton.heuristics(IN_TWO_HALVES)
@triton.jit
def heuristics_inside_kernel(x, y, n, HALF: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


def made_by_a_function():
    @triton.autotune(CONFIGS, key=["n"], do_bench=benchmark)
    @triton.jit
    def held_by_a_closure_kernel(x, y, n, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

    return lambda *args: held_by_a_closure_kernel[grid](*args)


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


an_alias = plain_kernel
closure = made_by_a_function()


class Held:
    kernel = heuristics_inside_kernel


def run(name="plain_kernel", n=40, dtype=torch.float32, activation="silu"):
    """Launch one kernel; whether its result is right."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, y = torch.arange(n, dtype=dtype, device=device), torch.empty(n, dtype=dtype, device=device)
    if name == "closure":
        closure(x, y, n)
    else:
        globals()[name][grid](x, y, n, *[activation] * (name == "plain_kernel"))
    return torch.equal(y, 2 * x)
