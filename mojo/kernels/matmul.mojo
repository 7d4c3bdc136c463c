"""Products of pairs of matrices that lie anywhere: C[i, j] = A[i, j] B[i, j] for all i, j, each with strides of its
own, 0 for a matrix that is used again. A transposed matrix is one whose strides are exchanged.

Each number of C is one chain of additions in the order of k, whatever the sizes of tiles. Tiles are MOST rows of A
against a panel of B, which is copied first: as many vectors of 16 columns as the registers hold.
"""

from .lanes import LANES, Ptr, REGISTERS, Vec, load, madd, splat, store, store_first
from .layout import transpose
from .op import Op
from .record import Record

comptime MOST = 8 if REGISTERS >= 32 else 4  # rows of a tile
comptime WIDE = 3 if REGISTERS >= 32 else 1  # vectors of a panel


@fieldwise_init
struct Product(TrivialRegisterPassable):
    """The sizes of a record, from argument `first` on: batches, M, N, K, then the strides."""

    var outer: Int
    var inner: Int
    var M: Int
    var N: Int
    var K: Int
    var a_outer: Int
    var a_inner: Int
    var a_m: Int
    var a_k: Int
    var b_outer: Int
    var b_inner: Int
    var b_k: Int
    var b_n: Int


def _pack(p: Ptr, b: Ptr, K: Int, n: Int, bk: Int, bn: Int, V: Int):
    """Panel p (K, V 16) of n columns of b; columns from n on become 0."""
    var W = V * LANES
    for v in range(V):
        var left = min(max(n - v * LANES, 0), LANES)
        var from_ = b.unsafe_offset(v * LANES * bn)
        var to = p.unsafe_offset(v * LANES)
        var k = 0
        if bn == 1 and left == LANES:
            while k < K:
                store(to, k * W, load(from_, k * bk))
                k += 1
        elif bk == 1:
            while k + LANES <= K:
                var rows = Array[Vec, LANES](fill=0)
                comptime for j in range(LANES):
                    if j < left:
                        rows[j] = load(from_, j * bn + k)
                transpose(rows)
                comptime for j in range(LANES):
                    store(to, (k + j) * W, rows[j])
                k += LANES
        while k < K:
            store(to, k * W, Vec(0))
            for j in range(left):
                to[unsafe_offset=k * W + j] = from_[unsafe_offset=k * bk + j * bn]
            k += 1


@always_inline
def _tile[M: Int, V: Int](c: Ptr, C: Int, a: Ptr, am: Int, ak: Int, p: Ptr, K: Int, n: Int):
    """M rows of n columns of c, whose rows are C apart."""
    var acc = Array[Vec, M * V](fill=0)
    for k in range(K):
        var b = Array[Vec, V](fill=0)
        comptime for v in range(V):
            b[v] = load(p, (k * V + v) * LANES)
        comptime for m in range(M):
            var x = splat(a, m * am + k * ak)
            comptime for v in range(V):
                acc[m * V + v] = madd(x, b[v], acc[m * V + v])
    comptime for m in range(M):
        comptime for v in range(V):
            if (v + 1) * LANES <= n:
                store(c, m * C + v * LANES, acc[m * V + v])
            else:
                store_first(c, m * C + v * LANES, acc[m * V + v], n - v * LANES)


def _panel[V: Int](c: Ptr, a: Ptr, b: Ptr, p: Ptr, s: Product, n: Int):
    _pack(p, b, s.K, n, s.b_k, s.b_n, V)
    var m = 0
    while m + MOST <= s.M:
        var at = a.unsafe_offset(m * s.a_m)
        _tile[MOST, V](c.unsafe_offset(m * s.N), s.N, at, s.a_m, s.a_k, p, s.K, n)
        m += MOST
    while m < s.M:
        var at = a.unsafe_offset(m * s.a_m)
        _tile[1, V](c.unsafe_offset(m * s.N), s.N, at, s.a_m, s.a_k, p, s.K, n)
        m += 1


def matmul(c: Ptr, a: Ptr, b: Ptr, scratch: Ptr, s: Product):
    """Computes C (outer, inner, M, N), without gaps."""
    for i in range(s.outer):
        for j in range(s.inner):
            var ci = c.unsafe_offset((i * s.inner + j) * s.M * s.N)
            var ai = a.unsafe_offset(i * s.a_outer + j * s.a_inner)
            var bi = b.unsafe_offset(i * s.b_outer + j * s.b_inner)
            var n = 0
            while n < s.N:
                var left = s.N - n
                var cn = ci.unsafe_offset(n)
                var bn = bi.unsafe_offset(n * s.b_n)
                if left > LANES and WIDE > 1:
                    _panel[WIDE](cn, ai, bn, scratch, s, min(left, WIDE * LANES))
                    n += WIDE * LANES
                else:
                    _panel[1](cn, ai, bn, scratch, s, min(left, LANES))
                    n += LANES


@always_inline
def sizes[size: def(Int) -> Int](get: size) -> Product:
    """The sizes of a record; get(i): number i of them."""
    return Product(
        get(0), get(1), get(2), get(3), get(4), get(5), get(6), get(7), get(8), get(9), get(10), get(11), get(12)
    )


def _matmul(r: Record):
    @always_inline
    def get(i: Int) {imm r} -> Int:
        return r.int(5 + i)

    matmul(r.ptr(1), r.ptr(2), r.ptr(3), r.ptr(4), sizes(get))


def _scratch(r: Record, shards: Int, fold: Int) -> Int:
    return 4 * WIDE * LANES * r.int(5 + 4)


def ops() -> List[Op]:
    """The ops of this file."""
    return [
        Op(
            "matmul",
            "c; a, b, ~scratch; outer, inner, M, N, K, a_outer, a_inner, a_m, a_k, b_outer, b_inner, b_k, b_n",
            _matmul,
            "",
            _scratch,
        )
    ]
