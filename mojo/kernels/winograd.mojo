"""Convolutions of 3 x 3 with stride 1 by Winograd's minimal filtering, over lanes (see lanes.mojo for the letters).

F(4 x 4, 3 x 3) after Winograd (1980) and Lavin and Gray (2016): the image is cut into tiles of 4 x 4 outputs. The 6 x 6
inputs of a tile become 36 sums of theirs, each 3 x 3 kernel as many sums of its weights; these are multiplied and added over
the input channels, 36 products per tile and pair of channels instead of 144; and sums of the results are the outputs. In
lanes no transform needs a shuffle. The gradient of the input is the same with the kernels turned by half a circle, and x
and y changed about. Padding is read as zeros and never stored. A few samples in rows have a forward pass of their own, whose
vectors hold 16 tiles; its sums have the same order.

Which convolutions are computed so, products.py says; it depends on their shape alone. Each sum over channels is one chain
per output channel and tile; in the gradient of the input it is cut in parts (parts.mojo) before the last transform, so that
processes which share a layer add the parts there (`*_parts`, `*_end`). Bits therefore depend on the layer's shape alone.
"""

from std.math import ceildiv
from std.memory import unsafe_stack_allocation

from .buffers import fill
from .conv2d import Conv
from .lanes import F32, LANES, REGISTERS, Ptr, Vec, load, load_first, madd, splat, store, store_first, store_part
from .layout import transpose
from .op import Op, call
from .parts import PARTS, cut, fold
from .record import Record, sizes_of

comptime M = 4  # outputs of a tile in each direction
comptime N = M + 2  # its inputs

# --- the transforms of a row or column -------------------------------------------------------------------------------
# The points are 0, 1, -1, 2, -2 and infinity.


@always_inline
def _of_input(d: Array[Vec, N]) -> Array[Vec, N]:
    """B^T d."""
    var y = Array[Vec, N](fill=Vec(0))
    var a = madd(d[2], Vec(-4), d[4])
    var b = madd(d[1], Vec(-4), d[3])
    var e = d[4] - d[2]
    var f = d[3] - d[1]
    y[0] = madd(d[0], Vec(4), madd(d[2], Vec(-5), d[4]))
    y[1] = a + b
    y[2] = a - b
    y[3] = madd(f, Vec(2), e)
    y[4] = madd(f, Vec(-2), e)
    y[5] = madd(d[1], Vec(4), madd(d[3], Vec(-5), d[5]))
    return y^


@always_inline
def _of_output(d: Array[Vec, N]) -> Array[Vec, M]:
    """A^T d."""
    var y = Array[Vec, M](fill=Vec(0))
    var p = d[1] + d[2]
    var q = d[1] - d[2]
    var r = d[3] + d[4]
    var t = d[3] - d[4]
    y[0] = d[0] + p + r
    y[1] = madd(t, Vec(2), q)
    y[2] = madd(r, Vec(4), p)
    y[3] = madd(t, Vec(8), q) + d[5]
    return y^


@always_inline
def _of_weights(a: Vec, b: Vec, c: Vec) -> Array[Vec, N]:
    """G (a b c)^T."""
    var y = Array[Vec, N](fill=Vec(0))
    var s = (a + c) * (-1.0 / 6)
    var t = madd(c, Vec(1.0 / 6), a * (1.0 / 24))
    y[0] = a * 0.25
    y[1] = madd(b, Vec(-1.0 / 6), s)
    y[2] = madd(b, Vec(1.0 / 6), s)
    y[3] = madd(b, Vec(1.0 / 12), t)
    y[4] = madd(b, Vec(-1.0 / 12), t)
    y[5] = c
    return y^


# --- the weights ------------------------------------------------------------------------------------------------------


def _weights[turned: Bool](u: Ptr, w: Ptr, O: Int, I: Int, w_out: Int, w_in: Int):
    """Makes u (N N, O, I) of w, whose 3 x 3 kernels lie w_out floats apart by outputs and w_in by inputs."""
    for i in range(0, I, LANES):
        var some = min(I - i, LANES)
        for o in range(O):
            var a = Array[Vec, LANES](fill=Vec(0))
            comptime for l in range(LANES):
                if l < some:
                    a[l] = load_first(w, o * w_out + (i + l) * w_in, 9)
            transpose(a)
            var t = Array[Vec, 3 * N](fill=Vec(0))
            comptime for c in range(3):
                comptime at = 8 - c if turned else c
                comptime step = -3 if turned else 3
                var column = _of_weights(a[at], a[at + step], a[at + 2 * step])
                comptime for r in range(N):
                    t[r * 3 + c] = column[r]
            comptime for r in range(N):
                var row = _of_weights(t[r * 3], t[r * 3 + 1], t[r * 3 + 2])
                comptime for c in range(N):
                    var to = ((r * N + c) * O + o) * I + i
                    if some == LANES:
                        store(u, to, row[c])
                    else:
                        store_first(u, to, row[c], some)


# --- tiles ------------------------------------------------------------------------------------------------------------
# 6 outputs of 4 tiles: 24 sums + 4 + 1 of 32 registers; AVX2's 8 hold 2 x 2.
comptime TILES: List[Int] = [4, 2, 1] if REGISTERS == 32 else [2, 1]
comptime OUTPUTS: List[Int] = [6, 4, 2, 1] if REGISTERS == 32 else [2, 1]
comptime NB = 4 if REGISTERS == 32 else 2


@fieldwise_init
struct _Images(TrivialRegisterPassable):
    """What is read, I channels of H x W, and what is written, O channels of P x Q, of a group."""

    var I: Int
    var H: Int
    var W: Int
    var O: Int
    var P: Int
    var Q: Int
    var above: Int  # rows of zeros above what is read
    var left: Int

    @always_inline
    def tiles(self) -> Int:
        """Of one channel."""
        return ceildiv(self.P, M) * ceildiv(self.Q, M)

    @always_inline
    def row(self, t: Int) -> Int:
        """The first row of y of tile t."""
        return t // ceildiv(self.Q, M) * M

    @always_inline
    def column(self, t: Int) -> Int:
        """The first column of y of tile t."""
        return t % ceildiv(self.Q, M) * M


@always_inline
def _framed(to: Ptr, x: Ptr, h: Int, w: Int, H: Int, W: Int):
    """The N x N numbers of a channel x from (h, w) on, with zeros where it has none."""
    comptime for r in range(N):
        comptime for c in range(N):
            var inside = h + r >= 0 and h + r < H and w + c >= 0 and w + c < W
            var d = Vec(0)
            if inside:
                d = load(x, ((h + r) * W + w + c) * LANES)
            store(to, (r * N + c) * LANES, d)


@always_inline
def _transform(v: Ptr, at: Int, step: Int, x: Ptr, row: Int):
    """Makes the sums of a tile x, whose rows are `row` floats apart; the sums are `step` floats apart."""
    var t = Array[Vec, N * N](fill=Vec(0))
    comptime for c in range(N):
        var d = Array[Vec, N](fill=Vec(0))
        comptime for r in range(N):
            d[r] = load(x, r * row + c * LANES)
        var y = _of_input(d)
        comptime for r in range(N):
            t[r * N + c] = y[r]
    comptime for r in range(N):
        var d = Array[Vec, N](fill=Vec(0))
        comptime for c in range(N):
            d[c] = t[r * N + c]
        var y = _of_input(d)
        comptime for c in range(N):
            store(v, (r * N + c) * step + at, y[c])


@always_inline
def _outputs[relu: Bool](y: Ptr, row: Int, rows: Int, columns: Int, z: Ptr, at: Int, step: Int, bias: Vec):
    """Makes the first rows and columns of a tile y, whose rows are `row` floats apart, of sums `step` floats apart."""
    var t = Array[Vec, M * N](fill=Vec(0))
    comptime for c in range(N):
        var d = Array[Vec, N](fill=Vec(0))
        comptime for r in range(N):
            d[r] = load(z, (r * N + c) * step + at)
        var a = _of_output(d)
        comptime for r in range(M):
            t[r * N + c] = a[r]
    comptime for r in range(M):
        var d = Array[Vec, N](fill=Vec(0))
        comptime for c in range(N):
            d[c] = t[r * N + c]
        var a = _of_output(d)
        if r < rows:
            comptime for c in range(M):
                var e = a[c] + bias
                comptime if relu:
                    e = e.lt(0).select(Vec(0), e)
                if c < columns:
                    store(y, r * row + c * LANES, e)


def _read[nb: Int](v: Ptr, x: Ptr, first: Int, s: _Images):
    """Makes v (N N, I, nb) of the nb tiles from `first` on of all channels of x."""
    var frame = unsafe_stack_allocation[N * N * LANES, F32, alignment=64]()
    var h = Array[Int, nb](fill=0)
    var w = Array[Int, nb](fill=0)
    comptime for j in range(nb):
        h[j] = s.row(first + j) - s.above
        w[j] = s.column(first + j) - s.left
    for i in range(s.I):
        var channel = x.unsafe_offset(i * s.H * s.W * LANES)
        for j in range(nb):
            var from_ = channel.unsafe_offset((h[j] * s.W + w[j]) * LANES)
            var row = s.W * LANES
            if min(h[j], w[j]) < 0 or h[j] + N > s.H or w[j] + N > s.W:
                _framed(frame, channel, h[j], w[j], s.H, s.W)
                from_ = frame
                row = N * LANES
            _transform(v, (i * nb + j) * LANES, s.I * nb * LANES, from_, row)


def _write[nb: Int, relu: Bool](y: Ptr, z: Ptr, b: Optional[Ptr], first: Int, s: _Images):
    """Makes the nb tiles from `first` on of all channels of y of z (N N, O, nb)."""
    for j in range(nb):
        var p = s.row(first + j)
        var q = s.column(first + j)
        var rows = min(s.P - p, M)
        var columns = min(s.Q - q, M)
        for o in range(s.O):
            var to = y.unsafe_offset(((o * s.P + p) * s.Q + q) * LANES)
            var bias = Vec(0)
            if b:
                bias = splat(b.value(), o)
            _outputs[relu](to, s.Q * LANES, rows, columns, z, (o * nb + j) * LANES, s.O * nb * LANES, bias)


@always_inline
def _sums[ob: Int, nb: Int, split: Bool](z: Ptr, v: Ptr, u: Ptr, I: Int, inputs: Int, part: Int, parts: Int):
    """ob outputs of nb tiles, for one place of the tiles; rows of u are I floats apart."""
    var saved = unsafe_stack_allocation[2 * ob * nb * LANES, F32, alignment=64]()
    var acc = Array[Vec, ob * nb](fill=Vec(0))
    var start = cut(inputs, part) if split else 0
    for p in range(parts):
        var begin = cut(inputs, part + p) - start if split else 0
        var end = cut(inputs, part + p + 1) - start if split else I
        comptime for i in range(ob * nb):
            acc[i] = Vec(0)
        for i in range(begin, end):
            var d = Array[Vec, nb](fill=Vec(0))
            comptime for j in range(nb):
                d[j] = load(v, (i * nb + j) * LANES)
            comptime for o in range(ob):
                var s = splat(u, o * I + i)
                comptime for j in range(nb):
                    acc[o * nb + j] = madd(d[j], s, acc[o * nb + j])
        comptime if split:
            fold(acc, saved, p, parts)
    comptime for i in range(ob * nb):
        store(z, i * LANES, acc[i])


def _multiply[
    nb: Int, split: Bool
](z: Ptr, v: Ptr, u: Ptr, places: Int, s: _Images, inputs: Int, part: Int, parts: Int):
    """Makes z (places, O, nb) of v (places, I, nb) and u (places, O, I)."""
    for e in range(places):
        var ve = v.unsafe_offset(e * s.I * nb * LANES)
        var o = 0
        comptime for k in range(len(OUTPUTS)):
            comptime ob = materialize[OUTPUTS]()[k]
            while o + ob <= s.O:
                _sums[ob, nb, split](
                    z.unsafe_offset((e * s.O + o) * nb * LANES),
                    ve,
                    u.unsafe_offset((e * s.O + o) * s.I),
                    s.I,
                    inputs,
                    part,
                    parts,
                )
                o += ob


# --- a few samples, in rows: lanes hold tiles -------------------------------------------------------------------------


def _frame_width(s: _Images) -> Int:
    """Returns the width of one channel in memory: all tiles of a row, and the border around them."""
    return ceildiv(s.Q, M) * M + N - M


def _frame(s: _Images) -> Int:
    """Floats of all tiles of a channel, with their frame."""
    return (ceildiv(s.P, M) * M + N - M) * _frame_width(s)


@fieldwise_init
struct _Spot(TrivialRegisterPassable):
    """Where a tile is."""

    var sample: Int
    var p: Int  # its first row and column of y
    var q: Int

    @staticmethod
    @always_inline
    def of(t: Int, s: _Images) -> Self:
        """The place of tile t of all samples."""
        var of_sample = t % s.tiles()
        return Self(t // s.tiles(), s.row(of_sample), s.column(of_sample))


def _read_rows[nb: Int](v: Ptr, x: Ptr, frames: Ptr, first: Int, tiles: Int, s: _Images):
    """Makes v (N N, I, nb) of the nb vectors of tiles from `first` on of all channels of x (samples, I, H, W).

    The frames (samples, ...) are zeros where x has no numbers. The last vector repeats the last tile.
    """
    var tile = unsafe_stack_allocation[N * N * LANES, F32, alignment=64]()
    var width = _frame_width(s)
    var last = min(first + nb * LANES, tiles) - 1
    var at = Array[Int, nb * LANES](fill=0)
    for l in range(nb * LANES):
        var spot = _Spot.of(min(first + l, last), s)
        at[l] = spot.sample * _frame(s) + spot.p * width + spot.q
    for i in range(s.I):
        for sample in range(first // s.tiles(), last // s.tiles() + 1):
            var channel = x.unsafe_offset((sample * s.I + i) * s.H * s.W)
            var inside = frames.unsafe_offset(sample * _frame(s) + s.above * width + s.left)
            for h in range(s.H):
                for w in range(0, s.W, LANES):
                    var n = min(s.W - w, LANES)
                    store_first(inside, h * width + w, load_first(channel, h * s.W + w, n), n)
        for j in range(nb):
            comptime for r in range(N):
                var row = Array[Vec, LANES](fill=Vec(0))
                comptime for l in range(LANES):
                    row[l] = load(frames, at[j * LANES + l] + r * width)
                transpose(row)
                comptime for c in range(N):
                    store(tile, (r * N + c) * LANES, row[c])
            _transform(v, (i * nb + j) * LANES, s.I * nb * LANES, tile, N * LANES)


def _write_rows[nb: Int, relu: Bool](y: Ptr, z: Ptr, b: Ptr, first: Int, tiles: Int, s: _Images):
    """Makes the nb vectors of tiles from `first` on of all channels of y (samples, O, P, Q) of z (N N, O, nb)."""
    var tile = unsafe_stack_allocation[M * M * LANES, F32, alignment=64]()
    for j in range(nb):
        var start = first + j * LANES
        for o in range(s.O):
            _outputs[relu](tile, M * LANES, M, M, z, (o * nb + j) * LANES, s.O * nb * LANES, splat(b, o))
            var numbers = Array[Vec, M * M](fill=Vec(0))
            comptime for i in range(M * M):
                numbers[i] = load(tile, i * LANES)
            transpose(numbers)
            for l in range(min(tiles - start, LANES)):
                var spot = _Spot.of(start + l, s)
                var to = y.unsafe_offset((spot.sample * s.O + o) * s.P * s.Q)
                var columns = min(s.Q - spot.q, M)
                comptime for r in range(M):
                    if spot.p + r < s.P:
                        var part = numbers[l].slice[M, offset=r * M]()
                        store_part[False, M](to, (spot.p + r) * s.Q + spot.q, part, columns)


def _forward_rows[relu: Bool](y: Ptr, x: Ptr, w: Ptr, b: Ptr, u: Ptr, samples: Int, s: _Images):
    var v = u.unsafe_offset(ceildiv(N * N * s.I * s.O, LANES) * LANES)
    var z = v.unsafe_offset(N * N * s.I * NB * LANES)
    var frames = z.unsafe_offset(N * N * s.O * NB * LANES)
    _weights[False](u, w, s.O, s.I, s.I * 9, 9)
    fill(frames, 0, samples * _frame(s) + LANES)
    var tiles = samples * s.tiles()
    var first = 0
    comptime for k in range(len(TILES)):
        comptime nb = materialize[TILES]()[k]
        while first + (nb - 1) * LANES < tiles:
            _read_rows[nb](v, x, frames, first, tiles, s)
            _multiply[nb, False](z, v, u, N * N, s, 0, 0, 1)
            _write_rows[nb, relu](y, z, b, first, tiles, s)
            first += nb * LANES


# --- a convolution ----------------------------------------------------------------------------------------------------


def scratch_floats(size: Conv) -> Int:
    """Of scratch memory that an op in lanes wants: the weights, a block of tiles and its sums."""
    var block = NB * (size.C + size.K) * LANES
    return LANES + N * N * (size.C * size.K + block)


def _scratch[at: Int](r: Record, shards: Int, fold: Int) -> Int:
    """Bytes, for the sizes from argument `at` on: those of Conv, ph, pw."""
    var size = sizes_of[Conv](r, at)
    var rows = 0
    if r.rows():
        rows = size.G * _frame(_images(size, r.int(at + 8), r.int(at + 9))) + LANES
    return 4 * (scratch_floats(size) + rows)


def _images(size: Conv, ph: Int, pw: Int) -> _Images:
    """x and y."""
    return _Images(size.C, size.H - 2 * ph, size.W - 2 * pw, size.K, size.P(), size.Q(), ph, pw)


def _forward[relu: Bool](y: Ptr, x: Ptr, w: Ptr, b: Ptr, u: Ptr, G: Int, s: _Images):
    var v = u.unsafe_offset(ceildiv(N * N * s.I * s.O, LANES) * LANES)
    var z = v.unsafe_offset(N * N * s.I * NB * LANES)
    _weights[False](u, w, s.O, s.I, s.I * 9, 9)
    for g in range(G):
        var xg = x.unsafe_offset(g * s.I * s.H * s.W * LANES)
        var yg = y.unsafe_offset(g * s.O * s.P * s.Q * LANES)
        var first = 0
        comptime for k in range(len(TILES)):
            comptime nb = materialize[TILES]()[k]
            while first + nb <= s.tiles():
                _read[nb](v, xg, first, s)
                _multiply[nb, False](z, v, u, N * N, s, 0, 0, 1)
                _write[nb, relu](yg, z, b, first, s)
                first += nb


def _backward[whole: Bool](dx: Ptr, dy: Ptr, w: Ptr, u: Ptr, G: Int, s: _Images, K: Int, part: Int, parts: Int):
    """dx, or if not `whole` what `winograd_backward_input_end` makes it of."""
    var v = u.unsafe_offset(ceildiv(N * N * s.I * s.O, LANES) * LANES)
    var z = v.unsafe_offset(N * N * s.I * NB * LANES)
    var wp = w.unsafe_offset(cut(K, part) * s.O * 9)
    _weights[True](u, wp, s.O, s.I, 9, s.O * 9)
    for g in range(G):
        var dyg = dy.unsafe_offset(g * s.I * s.H * s.W * LANES)
        var dxg = dx.unsafe_offset(g * s.O * s.P * s.Q * LANES)
        var first = 0
        comptime for k in range(len(TILES)):
            comptime nb = materialize[TILES]()[k]
            while first + nb <= s.tiles():
                comptime if not whole:
                    var at = (g * s.tiles() + first) * N * N * s.O * LANES
                    z = dx.unsafe_offset(at)
                _read[nb](v, dyg, first, s)
                _multiply[nb, True](z, v, u, N * N, s, K, part, parts)
                comptime if whole:
                    _write[nb, False](dxg, z, None, first, s)
                first += nb


def _back(size: Conv, ph: Int, pw: Int, held: Int) -> _Images:
    """dy of `held` channels, and dx."""
    return _Images(held, size.P(), size.Q(), size.C, size.H - 2 * ph, size.W - 2 * pw, 2 - ph, 2 - pw)


def winograd_forward(
    y: Ptr,  # (G, K, P, Q, L)
    x: Ptr,  # (G, C, H - 2 ph, W - 2 pw, L)
    w: Ptr,  # (K, C, 3, 3)
    b: Ptr,  # (K)
    scratch: Ptr,
    size: Conv,  # of the padded x
    ph: Int,
    pw: Int,
    relu: Bool,
    rows: Bool = False,  # L is 1, and G counts samples
):
    """Computes y = x * w + b, x in a frame of zeros; then max(y, 0) if `relu`."""
    var s = _images(size, ph, pw)
    if rows and relu:
        _forward_rows[True](y, x, w, b, scratch, size.G, s)
    elif rows:
        _forward_rows[False](y, x, w, b, scratch, size.G, s)
    elif relu:
        _forward[True](y, x, w, b, scratch, size.G, s)
    else:
        _forward[False](y, x, w, b, scratch, size.G, s)


def _winograd_forward_op(
    y: Ptr, x: Ptr, w: Ptr, b: Ptr, scratch: Ptr, size: Conv, ph: Int, pw: Int, relu: Bool, r: Record
):
    winograd_forward(y, x, w, b, scratch, size, ph, pw, relu, r.rows())


def winograd_backward_input(
    dx: Ptr,  # (G, C, H - 2 ph, W - 2 pw, L)
    dy: Ptr,  # (G, K, P, Q, L)
    w: Ptr,  # (K, C, 3, 3)
    scratch: Ptr,
    size: Conv,
    ph: Int,
    pw: Int,
):
    """Writes the gradient of x without its frame. The sum over K in parts."""
    var s = _back(size, ph, pw, size.K)
    _backward[True](dx, dy, w, scratch, size.G, s, size.K, 0, PARTS)


def winograd_backward_input_parts(
    dz: Ptr,  # (G, tiles, N N, C, L), in blocks of tiles
    dy: Ptr,  # (G, the output channels of the parts, P, Q, L)
    w: Ptr,  # (K, C, 3, 3), all of it
    scratch: Ptr,
    size: Conv,
    ph: Int,
    pw: Int,
    part: Int,
    parts: Int,
):
    """The sum over K of `parts` parts (1, 2 or 4) from `part` on; winograd_backward_input_end finishes it."""
    var held = cut(size.K, part + parts) - cut(size.K, part)
    _backward[False](dz, dy, w, scratch, size.G, _back(size, ph, pw, held), size.K, part, parts)


def winograd_backward_input_end(dx: Ptr, dz: Ptr, size: Conv, ph: Int, pw: Int):
    """The gradient of x from the sum of all parts."""
    var s = _back(size, ph, pw, size.K)
    for g in range(size.G):
        var dxg = dx.unsafe_offset(g * s.O * s.P * s.Q * LANES)
        var first = 0
        comptime for k in range(len(TILES)):
            comptime nb = materialize[TILES]()[k]
            while first + nb <= s.tiles():
                var at = (g * s.tiles() + first) * N * N * s.O * LANES
                _write[nb, False](dxg, dz.unsafe_offset(at), None, first, s)
                first += nb


def ops() -> List[Op]:
    """The ops of this file. H and W are those of x in its frame of zeros, ph high and pw wide on each side."""
    return [
        Op(
            "winograd_forward",
            "y; x, w, b, ~scratch; G, C, H, W, K, R, T, S, ph, pw, relu",
            call[_winograd_forward_op],
            "rounds",
            _scratch[6],
        ),
        Op(
            "winograd_backward_input",
            "dx; dy, w, ~scratch; G, C, H, W, K, R, T, S, ph, pw",
            call[winograd_backward_input],
            "rounds lanes",
            _scratch[5],
        ),
        Op(
            "winograd_backward_input_parts",
            "dz; dy, w, ~scratch; G, C, H, W, K, R, T, S, ph, pw, part, parts",
            call[winograd_backward_input_parts],
            "lanes",
            _scratch[5],
        ),
        Op(
            "winograd_backward_input_end",
            "dx; dz; G, C, H, W, K, R, T, S, ph, pw",
            call[winograd_backward_input_end],
            "lanes",
        ),
    ]
