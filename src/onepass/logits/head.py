"""A linear head whose logits are computed in tiles: its tensors, its settings, and its GEMMs.

All GEMMs have one dtype, that of autocast or of the inputs. If no gradient follows and the device has a kernel for it,
a GEMM computes the statistics of its own result without writing any logits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from onepass.backend import backend_of
from onepass.core.options import Inputs, Options, Results, empty_results
from onepass.core.shard import NOT_SHARDED, Shard

ON_CPU = 1 << 25  # bytes of a copy or of a tile on a CPU, which has no use for larger ones
ROWS_AT_ONCE = 4096  # of a weight whose remainder is computed
ALIGNED = 16  # bytes to which rows are padded: GEMMs are slow if an odd vocabulary leaves rows unaligned
ALL = slice(None)


class Settings(NamedTuple):
    """How logits are computed."""

    dtype: torch.dtype  # of the GEMMs
    logits_dtype: torch.dtype  # that, or float32: the result of the GEMM is then not rounded
    max_memory: int | None = None  # bytes of workspace; None for `default_memory`
    round_before_bias: bool = False  # whether the bias is added to the rounded product, which rounds twice
    exact_weight: bool = False  # whether one more GEMM multiplies what is lost when a float32 weight is rounded
    shard: Shard = NOT_SHARDED  # the columns that this process holds, if the vocabulary is sharded
    sums_hidden: bool = False  # whether the gradient of the hidden states is summed over the processes
    invariant_gemms: bool = False  # whether rows do not depend on what rows are with them; see `batch_invariant`


class HeadTensors(NamedTuple):
    """The tensors of a linear head: the logits are ``hidden @ weight.T + bias + low @ up.T``."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    low: Tensor | None = None  # (N, R): the hidden states in the low rank of an adapter, in the dtype of the GEMMs
    up: Tensor | None = None  # (V, R): the adapter's second factor

    def parameters(self) -> tuple[Tensor | None, ...]:
        """The tensors that may be partitioned over processes."""
        return self.weight, self.bias, self.up


COUNT = len(HeadTensors._fields)  # the first arguments of the autograd functions of heads


class Head:
    """A linear head whose logits are computed in tiles."""

    def __init__(self, tensors: HeadTensors, settings: Settings) -> None:
        self.hidden, self.weight, self.bias, low, up = tensors
        plain = settings._replace(exact_weight=False)
        self.adapter = None if low is None or up is None else Head(HeadTensors(low, up), plain)
        self.settings, self.dtype, self.logits_dtype = settings, settings.dtype, settings.logits_dtype
        self.vocab = self.weight.shape[0]
        self.held: tuple[slice, Tensor, Tensor | None] | None = None
        self.rest: tuple[slice, Tensor] | None = None
        wide = self.weight.dtype == self.logits_dtype == torch.float32 != self.dtype
        self.is_exact = settings.exact_weight and wide

    def remainder(self, columns: slice) -> Tensor:
        """The weight of these columns minus its value in the dtype of the GEMMs, in this dtype."""
        if self.rest is None or self.rest[0] != columns:
            self.rest = None
            rounded, _ = self.factors(columns)
            rest = torch.empty_like(rounded)
            for part, w, r in zip(*[t.split(ROWS_AT_ONCE) for t in (rest, self.weight[columns], rounded)]):
                part.copy_(w - r)
            self.rest = columns, rest
        return self.rest[1]

    def factors(self, columns: slice) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of these columns in the dtype of the GEMMs. Those of the last call are kept."""
        if self.held is None or self.held[0] != columns:
            self.held = None  # freed before others are allocated
            bias = None if self.bias is None else self.bias[columns].to(self.dtype)
            self.held = columns, self.weight[columns].to(self.dtype), bias
        return self.held[1:]

    def release(self) -> None:
        """Free what is kept of the weight. It is computed again when it is needed."""
        self.held = self.rest = None
        if self.adapter is not None:
            self.adapter.release()

    def product(self, hidden: Tensor, low: Tensor | None, columns: slice, out: Tensor) -> None:
        """Write the logits of these columns, for hidden states ``(n, H)`` in the dtype of the GEMMs, to ``out``.

        ``low`` are the same rows in the rank of the adapter, if there is one.
        """
        weight, bias = self.factors(columns)
        factors = [(hidden, weight)]  # of which the sum of the products is the logits
        if self.adapter is not None and low is not None:
            # First, since it is smaller, so that less is lost when the sum so far is rounded.
            factors.insert(0, (low, self.adapter.factors(columns)[0]))
        wide = out.dtype != self.dtype
        rounds = wide or self.settings.round_before_bias
        if self.settings.invariant_gemms:
            rounds = self.settings.round_before_bias and not wide
            factors += [(hidden, self.remainder(columns))] if self.is_exact else []
            for n, (a, b) in enumerate(factors):
                to = out if n == 0 else torch.empty_like(out)
                backend_of(hidden).row_gemm(a, b.t(), bias if n == 0 and not rounds else None, to)
                if n:
                    out.add_(to)
        elif not wide:
            start = None if rounds else bias
            for a, b in factors:
                start = torch.mm(a, b.t(), out=out) if start is None else torch.addmm(start, a, b.t(), out=out)
        elif self.upcasts:
            step = max(1, ON_CPU // (4 * hidden.shape[1]))  # columns whose weight is copied at a time
            factors[-1] = hidden, self.weight[columns] if self.is_exact else weight
            for n, (a, b) in enumerate(factors):
                for part, rows in zip(out.split(step, 1), b.split(step)):
                    product = torch.mm(a.to(out.dtype), rows.to(out.dtype).t())
                    part.copy_(product) if n == 0 else part.add_(product)
        else:
            factors += [(hidden, self.remainder(columns))] if self.is_exact else []
            torch.mm(factors[0][0], factors[0][1].t(), out_dtype=out.dtype, out=out)
            for a, b in factors[1:]:
                torch.addmm(out, a, b.t(), out_dtype=out.dtype, out=out)
        if rounds and bias is not None:
            out.add_(bias)

    def reads_its_product(self, inputs: Inputs, options: Options) -> bool:
        """Whether one kernel computes the logits and their statistics, and writes no logits."""
        supports: bool = backend_of(self.hidden).supports_linear_statistics(
            self.dtype, self.weight.t(), inputs, options
        )
        return supports and not self.is_exact and self.adapter is None

    def writes_exponentials(self, inputs: Inputs, options: Options) -> bool:
        """Whether one kernel computes the statistics and the gradient of the logits, but for a factor of each row.

        It does not with ``max_memory``, nor if rows need the statistics of other processes.
        """
        settings = self.settings
        if settings.max_memory is not None or settings.shard.sizes or settings.invariant_gemms:
            return False
        if self.logits_dtype != self.dtype or self.bias is not None or self.adapter is not None:
            return False
        of_head = self.dtype, len(self.hidden), self.weight.t()
        supports: bool = backend_of(self.hidden).supports_linear_exponentials(*of_head, inputs, options)
        return supports

    def exponentials_bytes(self, options: Options, in_place: bool = False) -> int:
        """Bytes of workspace per row if this head `writes_exponentials`.

        Args:
            options: of the statistics.
            in_place: whether the products with the weight are written to the gradient of the hidden states itself.
        """
        width = 0 if in_place else self.hidden.shape[1]
        return backend_of(self.hidden).exponentials_bytes(self.vocab, width, options)

    def write_exponentials(
        self, hidden: Tensor, inputs: Inputs, options: Options, out: Tensor, rest: Tensor | None
    ) -> tuple[Results, Tensor]:
        """The `softmax_statistics` of the product with ``hidden``, and the `Tile.row_factors`.

        See `linear_exponentials` for ``out`` and ``rest``.
        """
        results = empty_results(out, inputs.index, options)
        row_factors = backend_of(hidden).linear_exponentials(
            hidden, self.factors(ALL)[0].t(), inputs, options, results, out, rest
        )
        return results, row_factors

    def state_bytes(self, options: Options) -> int:
        """Bytes of workspace per row if this head `reads_its_product`; 0 if it is sharded, see `tile_shape`."""
        if self.settings.shard.sizes:
            return 0
        return backend_of(self.hidden).state_bytes(self.vocab, options)

    def read_product(self, hidden: Tensor, inputs: Inputs, options: Options, results: Results, states: bool) -> None:
        """Write the `softmax_statistics` of the product with ``hidden`` to ``results``, or the states of the rows."""
        weight, bias = self.factors(ALL)
        rounds = self.logits_dtype == self.dtype
        twice = self.settings.round_before_bias and rounds
        backend = backend_of(hidden)
        backend.linear_statistics(hidden, weight.t(), bias, inputs, options, rounds, twice, results, states)

    def row_bytes(self, gathered: bool) -> int:
        """Bytes per row of a tile, without its logits: those of its hidden states if they are gathered or cast."""
        hidden = self.hidden.shape[1] * (self.dtype.itemsize + self.hidden.dtype.itemsize)
        of_adapter = 0 if self.adapter is None else self.adapter.row_bytes(gathered)
        return hidden * (gathered or self.hidden.dtype != self.dtype) + of_adapter

    def logits_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a row of logits of this dtype."""
        return padded(self.vocab, dtype) * dtype.itemsize

    def cast_bytes(self) -> int:
        """Bytes of weight and bias in the dtype of the GEMMs, if they have another one, and of a `remainder`."""
        casts = [t for t in (self.weight, self.bias) if t is not None and t.dtype != self.dtype]
        rest = self.weight.numel() + 2 * ROWS_AT_ONCE * self.weight.shape[1] if self.is_exact else 0
        of_adapter = 0 if self.adapter is None else self.adapter.cast_bytes()
        return (sum(t.numel() for t in casts) + rest) * self.dtype.itemsize + of_adapter + self.low_bytes()

    def low_bytes(self) -> int:
        """Bytes of all hidden states in the rank of the adapter and of their gradient, and of a copy they come from."""
        if self.adapter is None:
            return 0
        copied = self.hidden.numel() * self.dtype.itemsize * (self.hidden.dtype != self.dtype)
        return self.adapter.hidden.numel() * (self.dtype.itemsize + 4) + copied

    @property
    def upcasts(self) -> bool:
        """Whether a GEMM with a float32 result needs float32 operands: torch has ``out_dtype`` on CUDA only."""
        return self.dtype.itemsize < 4 and (self.hidden.device.type != "cuda" or torch.version.hip is not None)

    def widest(self) -> "Head":
        """The head of the process that holds most columns, for plans that are the same on all processes."""
        most = max(self.settings.shard.sizes, default=self.vocab)
        if most == self.vocab:
            return self
        weight = self.weight.new_empty((most, self.weight.shape[1]), device="meta")
        bias = None if self.bias is None else self.bias.new_empty(most, device="meta")
        low = up = None
        if self.adapter is not None:
            low, up = self.adapter.hidden, self.adapter.weight.new_empty((most, self.rank), device="meta")
        return Head(HeadTensors(self.hidden, weight, bias, low, up), self.settings)

    @property
    def rank(self) -> int:
        """The rank of the adapter; 0 without one."""
        return 0 if self.adapter is None else self.adapter.hidden.shape[1]


def padded(columns: int, dtype: torch.dtype) -> int:
    """``columns``, rounded up to a multiple of `ALIGNED` bytes."""
    step = max(1, ALIGNED // dtype.itemsize)
    return -(-columns // step) * step
