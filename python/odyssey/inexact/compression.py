"""Compression: fewer bytes of gradients between ranks. fp16, bf16: rounded; topk: the largest;
powersgd: low rank.

What is lost in a step is kept by the rank that lost it and added to its next gradient (error
feedback; Stich, Cordonnier and Jaggi 2018), with topk and powersgd. What all ranks compute for
themselves from what they received is elementwise or exact, so it is the same bits on every kind of
processor; only what a rank sends is of matrix products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..comm import Request
from ..comm.calls import bfloat16, narrow, widen
from ..errors import ConfigError
from ..parallel.plan import ranges
from ..parallel.reduction import Phased, TreeReduction
from ..parallel.shared_memory_tree import SharedReduction
from ..settings.declarations import ReductionSettings, declared

WARMUP_RATIO = 0.25  # where the ratio of a warm-up begins (Lin et al. 2018)


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Positions of the k values that are largest in magnitude, ascending, int32; of equals the
    first ones.
    """
    # of floats from zero on, the order is that of their bits
    magnitude = np.abs(values).view(np.int32)
    least = np.partition(magnitude, len(magnitude) - k)[len(magnitude) - k]
    above = np.flatnonzero(magnitude > least)
    ties = np.flatnonzero(magnitude == least)[: k - len(above)]
    return np.sort(np.concatenate([above, ties])).astype(np.int32)


def count(floats: int, ratio: float) -> int:
    """How many of so many floats a ratio keeps: at least one, if there is one."""
    return min(floats, max(1, round(floats * ratio)))


class Compressed(Phased):
    """Base: compresses the first `content.floats` floats; the rest is summed along the tree,
    beside it.
    """

    def _prepare(self) -> None:
        super()._prepare()
        assert self.content is not None
        self.n = n = self.content.floats
        self.memory = self.content.memory
        self.local = self._take(n)
        self._steps = self._counted = 0
        extra_floats = self.floats - n
        tree = SharedReduction if hasattr(self.comm, "shared") else TreeReduction
        self._exact = (
            tree(self.comm, self.plan, extra_floats, self.workers) if extra_floats else None
        )

    def start(self) -> None:
        self._steps += 1
        self._add_up(self.local)
        if self._exact is not None:
            self._exact.buffers[:] = self.buffers[:, self.n :]
            self._exact.start()
        super().start()

    def finish(self) -> np.ndarray:
        super().finish()
        if self._exact is not None:
            self.result[self.n :] = self._exact.finish()
            self.bytes_sent += self._exact.bytes_sent - self._counted
            self._counted = self._exact.bytes_sent
        return self.result

    @property
    def bytes_plain(self) -> int:
        a, b = self.ranges[self.comm.rank]
        out = len(self.plan.partial) * (self.floats - (b - a))
        return 4 * self._steps * (out + (0 if self.scatter else (b - a) * (self.comm.size - 1)))

    def _recall(self, name: str) -> np.ndarray:
        """Returns what this rank still has to send, in units of this batch's sum."""
        unsent = self.memory.setdefault(name, np.zeros(self.n, np.float32))
        previous_samples = self.memory.setdefault("samples", self.content.samples)
        if previous_samples != self.content.samples:
            unsent *= np.float32(self.content.samples / previous_samples)
            self.memory["samples"] = self.content.samples
        return unsent


class HalfReduction(Compressed):
    """Sends 16-bit floats and adds them up in float32, in the order of the ranks; what comes
    back is rounded again.

    With fp16 each piece is multiplied by a power of two first so that its largest number is between
    2^14 and 2^15: nothing overflows, and only what is below 2^-29 of the largest loses bits to
    subnormals.
    """

    def _prepare(self) -> None:
        super()._prepare()
        comm = self.comm
        plain = self.n == self.floats
        self.cut = self.ranges if plain else ranges(self.n, comm.size)
        self._dtype = np.dtype(np.float16) if self.strategy.compression == "fp16" else bfloat16
        lo, hi = self.cut[comm.rank]
        # a piece on the wire: two words that are its scale (float32), then its numbers
        self._words = [b - a + 2 if b > a else 0 for a, b in self.cut]
        self._wire_ranges = list(itertools.pairwise(itertools.accumulate(self._words, initial=0)))
        self._wire = self._halves(sum(self._words))  # what goes out, then what comes back
        self._receive = self._halves(self._words[comm.rank] * comm.size)
        self._sum = self._take(hi - lo)
        self._scaled = self._take(self.n)
        self.phases = (self._hand_out, self._add)
        if not self.scatter:
            self._back = self.lanes.lane(comm, 1)
            self.phases = (self._hand_out, self._gather, self._unpack)

    def _halves(self, words: int) -> np.ndarray:
        return self._take(-(-words // 2)).view(np.uint16)[:words]

    def _pack(self, values: np.ndarray, words: np.ndarray) -> None:
        scale = np.float32(1)
        if self._dtype != bfloat16 and values.size:
            top = float(max(values.max(), -values.min()))
            if top > 0 and math.isfinite(top):
                scale = np.float32(2.0 ** min(max(15 - math.frexp(top)[1], -100), 100))
        words[:2] = scale.reshape(1).view(np.uint16)
        if scale != 1:
            values = np.multiply(values, scale, out=self._scaled[: values.size])
        narrow(values, words[2:].view(self._dtype))

    def _unpacked(self, words: np.ndarray) -> np.ndarray:
        scale = words[:2].copy().view(np.float32)[0]
        wide = widen(words[2:].view(self._dtype))
        return wide if scale == 1 else np.multiply(wide, np.float32(1 / scale), out=wide)

    def _hand_out(self) -> Request:
        for (a, b), (c, d) in zip(self.cut, self._wire_ranges, strict=True):
            if d > c:
                self._pack(self.local[a:b], self._wire[c:d])
        local_words = self._words[self.comm.rank]
        self.bytes_sent += 2 * (sum(self._words) - local_words)
        return self.comm.all_to_all_v(
            self._wire, self._words, self._receive, [local_words] * self.comm.size, wait=False
        )

    def _add(self) -> None:
        n = self._words[self.comm.rank]
        self._sum[:] = 0
        for r in range(self.comm.size if n else 0):
            self._sum += self._unpacked(self._receive[r * n : (r + 1) * n])
        if self.scatter:
            a, b = self.cut[self.comm.rank]
            self.result[a:b] = self._sum

    def _gather(self) -> Request:
        self._add()
        a, b = self._wire_ranges[self.comm.rank]
        if b > a:
            self._pack(self._sum, self._wire[a:b])
        self.bytes_sent += 2 * (b - a) * (self.comm.size - 1)
        return self._back.all_gather_v(self._wire, self._wire_ranges, wait=False)

    def _unpack(self) -> None:
        for (a, b), (c, d) in zip(self.cut, self._wire_ranges, strict=True):
            if d > c:
                self.result[a:b] = self._unpacked(self._wire[c:d])


class TopKReduction(Compressed):
    """Sends the k largest numbers with their positions, to all; keeps the others for the next step.

    k is `compression_ratio` of the gradients of a bucket. During `compression_warmup_steps` the
    ratio falls from a quarter to that, by a constant factor per step (Deep Gradient Compression;
    Lin et al. 2018).
    """

    def _prepare(self) -> None:
        super()._prepare()
        s = self.strategy
        max_count = count(
            self.n, max(s.compression_ratio, WARMUP_RATIO if s.compression_warmup_steps else 0)
        )
        self._wire = self._take(2 * max_count * self.comm.size).view(np.int32)
        self.phases = (self._exchange, self._add)

    def ratio(self, step: int) -> float:
        """Share of the gradients that are sent in a step, counted from 0."""
        s = self.strategy
        if step >= s.compression_warmup_steps or s.compression_ratio >= WARMUP_RATIO:
            return s.compression_ratio
        return WARMUP_RATIO * (s.compression_ratio / WARMUP_RATIO) ** (
            step / s.compression_warmup_steps
        )

    def _exchange(self) -> Request:
        comm = self.comm
        step = self.memory.get("steps", 0)
        self.memory["steps"] = step + 1
        self._k = k = count(self.n, self.ratio(step))
        self.local += self._recall("residual")
        message = self._wire[2 * k * comm.rank : 2 * k * (comm.rank + 1)]
        if np.isfinite(self.local).all():
            indices = largest(self.local, k)
            message[:k] = indices
            message[k:] = self.local[indices].view(np.int32)
        else:  # says so to all ranks; none takes the step
            message[:k] = np.arange(k)
            message[k:] = np.full(k, np.nan, np.float32).view(np.int32)
        self.bytes_sent += message.nbytes * (comm.size - 1)
        pairs = [(2 * k * p, 2 * k * (p + 1)) for p in range(comm.size)]
        return comm.all_gather_v(self._wire[: pairs[-1][1]], pairs, wait=False)

    def _add(self) -> None:
        k = self._k
        size = self.comm.size
        pairs = self._wire[: 2 * k * size].reshape(size, 2, k)
        self.result[: self.n] = 0
        for indices, values in pairs:
            self.result[indices] += values.view(np.float32)
        if np.isfinite(pairs[:, 1].view(np.float32)).all():
            self.local[pairs[self.comm.rank, 0]] = 0
            self.memory["residual"][:] = self.local


class PowerReduction(Compressed):
    """PowerSGD (Vogels, Karimireddy and Jaggi 2019): of each matrix M of gradients the product P
    Q^T of rank r.

    P = M Q, summed over ranks, its columns made orthonormal; Q = M^T P, summed; the next step
    begins with this Q. A matrix is a parameter's first dimension against all others; what would not
    get smaller is sent as it is.
    """

    def _prepare(self) -> None:
        super()._prepare()
        r = self.strategy.powersgd_rank
        self._matrices: list[tuple[int, int, int, int]] = []  # offset, rows, columns, rank
        plain = []
        plain_start = 0
        for offset, shape in sorted(self.content.shapes):
            m = shape[0] if shape else 1
            n = math.prod(shape[1:])
            if len(shape) < 2 or r * (m + n) >= m * n:
                continue
            self._matrices.append((offset, m, n, min(r, m, n)))
            plain.append((plain_start, offset))
            plain_start = offset + m * n
        self._plain = [(a, b) for a, b in (*plain, (plain_start, self.n)) if b > a]
        self._q: list[np.ndarray] = self.memory.setdefault(
            "q", [_start(i, n, k) for i, (_, _, n, k) in enumerate(self._matrices)]
        )
        size = self.comm.size
        self._first = sum(m * k for _, m, _, k in self._matrices) + sum(
            b - a for a, b in self._plain
        )
        self._second = sum(n * k for _, _, n, k in self._matrices)
        self._wires = [self._take(size * self._first), self._take(size * self._second)]
        self._total = self._take(max(self._first, self._second))
        self._back = self.lanes.lane(self.comm, 1)
        self.phases = (self._send_p, self._send_q, self._rebuild)

    def _matrix(self, flat: np.ndarray, matrix: tuple[int, int, int, int]) -> np.ndarray:
        offset, m, n, _ = matrix
        return flat[offset : offset + m * n].reshape(m, n)

    def _send(self, wire: np.ndarray, n: int, comm: Any, parts: Sequence[np.ndarray]) -> Request:
        if n:
            np.concatenate(
                [part.ravel() for part in parts], out=wire[n * comm.rank : n * (comm.rank + 1)]
            )
        self.bytes_sent += 4 * n * (comm.size - 1)
        return comm.all_gather_v(wire, [(n * p, n * (p + 1)) for p in range(comm.size)], wait=False)

    def _summed(self, wire: np.ndarray, n: int) -> np.ndarray:
        """Returns what the ranks sent, added in their order."""
        total = self._total[:n]
        total[:] = 0
        for p in range(self.comm.size):
            total += wire[n * p : n * (p + 1)]
        return total

    def _send_p(self) -> Request:
        self.local += self._recall("error")
        parts = [
            self._matrix(self.local, x) @ q for x, q in zip(self._matrices, self._q, strict=True)
        ]
        parts += [self.local[a:b] for a, b in self._plain]
        return self._send(self._wires[0], self._first, self.comm, parts)

    def _send_q(self) -> Request:
        total = self._summed(self._wires[0], self._first)
        offset = 0
        self._ps: list[np.ndarray] = []
        for _, m, _, k in self._matrices:
            self._ps.append(orthonormal(total[offset : offset + m * k].reshape(m, k)))
            offset += m * k
        for a, b in self._plain:
            self.result[a:b] = total[offset : offset + b - a]
            offset += b - a
        self._local_qs = [
            self._matrix(self.local, x).T @ p for x, p in zip(self._matrices, self._ps, strict=True)
        ]
        return self._send(self._wires[1], self._second, self._back, self._local_qs)

    def _rebuild(self) -> None:
        total = self._summed(self._wires[1], self._second)
        offset = 0
        q = []
        for x, p in zip(self._matrices, self._ps, strict=True):
            _, _, n, k = x
            q.append(total[offset : offset + n * k].reshape(n, k).copy())
            offset += n * k
            product(p, q[-1], self._matrix(self.result, x))
        if not np.isfinite(self.result[: self.n]).all():
            return  # no rank takes this step; nothing of it is kept
        for i, x in enumerate(self._matrices):
            part = self._matrix(self.local, x)
            part -= product(self._ps[i], self._local_qs[i], np.empty_like(part))
            dead = ~q[i].any(axis=0)
            # a direction without gradient would stay so for ever
            q[i][:, dead] = _start(i, *q[i].shape)[:, dead]
        for a, b in self._plain:
            self.local[a:b] = 0
        self._q[:] = q
        self.memory["error"][:] = self.local


def _start(i: int, rows: int, columns: int) -> np.ndarray:
    """Where the power iteration of matrix i begins: fixed random numbers."""
    return np.random.default_rng(i).uniform(-1, 1, (rows, columns)).astype(np.float32)


def orthonormal(columns: np.ndarray) -> np.ndarray:
    """The columns (m, r) made orthonormal by Gram-Schmidt; one that depends on those before is
    zero.

    Inner products are exact sums rounded once, so every processor gives the same bits.
    """
    basis: list[np.ndarray] = []
    with np.errstate(invalid="ignore"):
        for column in columns.T.astype(np.float64):
            length = _norm(column)
            for _ in range(2):  # once more removes what rounding left
                for earlier in basis:
                    column = column - _sum(column * earlier) * earlier
            residual_norm = _norm(column)
            basis.append(column / residual_norm if residual_norm > 1e-6 * length else column * 0)
    return np.stack(basis, axis=1).astype(np.float32)


def _sum(values: np.ndarray) -> float:
    try:
        return math.fsum(values.tolist())
    except (OverflowError, ValueError):
        return math.nan  # infinite numbers of both signs, or beyond range


def _norm(values: np.ndarray) -> float:
    return math.sqrt(_sum(values * values))


def product(p: np.ndarray, q: np.ndarray, out: np.ndarray) -> np.ndarray:
    """P Q^T into `out`, column by column, multiplied and added one after the other: the same
    bits everywhere.
    """
    out[:] = 0
    for a, b in zip(p.T, q.T, strict=True):
        out += np.multiply.outer(a, b)
    return out


# --- for a custom training loop ---


class Sparse(NamedTuple):
    """An array of which only some numbers are kept: positions (k,) int32 in the flat array,
    values (k,) float32.
    """

    indices: np.ndarray
    values: np.ndarray
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to send."""
        return self.indices.nbytes + self.values.nbytes


class GradientCompression:
    """Top-k of gradients with error feedback: what is left out is added the next time.

    Args:
        compression_ratio: the share of each array's numbers that is kept, at least one number.
        error_feedback: False: what is left out is lost.

    Raises ConfigError: the ratio is not above 0 and at most 1.
    """

    def __init__(self, compression_ratio: float = 0.1, *, error_feedback: bool = True) -> None:
        ratio = declared(ReductionSettings)["compression_ratio"]
        self.compression_ratio = ratio.check(compression_ratio, "[compression] compression_ratio")
        self.error_feedback = error_feedback
        self._residuals: dict[Any, np.ndarray] = {}

    def compress_gradients(self, gradients: Any) -> Any:
        """A dict or list of arrays (float32 of any shape, or tensors) as the same of `Sparse`.

        An array is known again by its key or position, and must keep its shape. None (no gradient)
        stays None.
        """
        return _map_gradients(gradients, self._compress)

    def _compress(self, key: Any, gradient: Any) -> Sparse:
        array = gradient.numpy() if hasattr(gradient, "numpy") else np.asarray(gradient)
        flat = array.astype(np.float32).ravel()  # a copy
        residual = self._residuals.get(key)
        if residual is not None:
            if residual.size != flat.size:
                raise ConfigError(
                    f"[compression] gradient {key!r} has {flat.size} numbers, and had "
                    f"{residual.size} before; use one GradientCompression per model"
                )
            flat += residual
        indices = (
            largest(flat, count(flat.size, self.compression_ratio))
            if flat.size
            else np.zeros(0, np.int32)
        )
        values = flat[indices]
        if self.error_feedback:
            flat[indices] = 0
            self._residuals[key] = flat
        return Sparse(indices, values, array.shape)

    def decompress_gradients(self, compressed: Any) -> Any:
        """The same dict or list with whole arrays (float32), zero where nothing was kept."""
        return _map_gradients(compressed, lambda _, s: _dense(s))


def _dense(sparse: Sparse) -> np.ndarray:
    flat = np.zeros(math.prod(sparse.shape), np.float32)
    flat[sparse.indices] = sparse.values
    return flat.reshape(sparse.shape)


def _map_gradients(items: Any, function: Any) -> Any:
    if isinstance(items, Mapping):
        return {
            key: None if value is None else function(key, value) for key, value in items.items()
        }
    if not isinstance(items, (list, tuple)):
        raise ConfigError(
            f"[compression] gradients are a {type(items).__name__}; give a dict or a list of arrays"
        )
    return [None if value is None else function(i, value) for i, value in enumerate(items)]
