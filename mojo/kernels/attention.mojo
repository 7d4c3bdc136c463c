"""Scaled dot-product attention over lanes that are tokens: y = softmax(q k^T scale) v, for each sequence and head.

Scores never leave the cache: of a block of queries, in lanes, the scores of all its keys, or in the backward pass of a
block of keys (Dao 2023, FlashAttention-2; the maximum is taken before anything is exponentiated, so nothing is
rescaled). Saved is the log of the sum of exponentials; the backward pass computes probabilities again, and draws again
which of them stay if there is dropout.

Every sum is one chain of multiply-adds over ascending keys, queries or features, whatever the blocks are; where tiles
of bf16 are multiplied (`tiles`, attention_amx.mojo), one of sums of 32. A sequence that does not begin a group of lanes
is moved to where it would (`panel_of`). So a token's result is the same bits beside any other sequences, at any place
in the batch, and with keys computed in another call.

    N  sequences       T  queries of each       S  keys of each       H  heads       D  features of a head
    past  keys before the first query: query i sees keys up to i + past. S: all; 0: up to its own
    fused  1 if q, k and v are thirds of the features of one tensor
    p, layer  dropout of probabilities, and its number in the model; 0: none
    head  number of the first head in the layer, for dropout: of a layer's heads a rank may have some
    masks  whether `mask` is added to the scores, and which of its axes are there, (N, H, S, T) with T last so that
           lanes are neighbours. A key with -inf is not seen: it adds 0 to every sum, so that its place changes no bit
           (in tiles: it has a place). A query that sees no key gives 0.
"""

from std.math import ceildiv
from std.memory import unsafe_memset_zero
from std.utils.numerics import inf

from .amx import begin, end
from .attention_amx import KEYS, Tiles
from .attention_tiles import (
    AREA,
    Attention,
    BLOCK,
    Drawn,
    HIDDEN,
    Mask,
    SIDE,
    TILE,
    all_see,
    combine,
    dots,
    drop,
    keys_of,
    last_seen,
)
from .functions import exp_of_vectors as exp, log
from .lanes import F32, LANES, Ptr, Vec, first as first_lanes, in_tiles_and_ones, load, madd, store
from .layout import transpose
from .lowp import BF16, HAS_AMX
from .panels import Panel, clear_rest, panel_of, put_group
from .op import Op, call, no_scratch
from .products import in_tiles
from .record import ContextPtr, Record, sizes_of

# --- forward ----------------------------------------------------------------------------------------------------------


@always_inline
def _products[lo: Int, gb: Int](x: Ptr, key: Int) -> Array[Vec, TILE * (gb - lo)]:
    """TILE keys of x (keys, gb, L), from `key` on, as `dots` gives them."""
    var s = Array[Vec, TILE * (gb - lo)](fill=Vec(0))
    comptime for j in range(TILE):
        comptime for i in range(lo, gb):
            s[j * (gb - lo) + i - lo] = load(x, ((key + j) * gb + i) * LANES)
    return s^


@always_inline
def _score[
    lo: Int, gb: Int, masked: Bool, tiles: Bool
](
    scores: Ptr,  # (keys, gb, L); the products, if `tiles`
    mut most: Array[Vec, gb],
    q: Panel,
    k: Panel,
    mask: Mask,
    g: Int,
    start: Int,
    end: Int,
    size: Attention,
):
    """The scores of keys start .. end - 1 and groups lo .. gb - 1 of a block."""
    for key in range(start, end, TILE):
        var s = Array[Vec, TILE * (gb - lo)](fill=Vec(0))
        comptime if tiles:
            s = _products[lo, gb](scores, key)
        else:
            s = dots[TILE, gb - lo](q, g + lo, k.group(key // LANES).unsafe_offset(key % LANES), size.D)
        comptime for i in range(lo, gb):
            var last = last_seen(size, g + i)
            comptime for j in range(TILE):
                var score = s[j * (gb - lo) + i - lo] * size.scale
                comptime if masked:
                    score += mask.at(key + j, g + i)
                var seen = last.ge(Int32(key + j))
                most[i] = max(most[i], seen.select(score, most[i]))
                store(scores, ((key + j) * gb + i) * LANES, score)


@always_inline
def _exponentiate[
    lo: Int, gb: Int, masked: Bool
](scores: Ptr, mut total: Array[Vec, gb], most: Array[Vec, gb], g: Int, start: Int, end: Int, size: Attention):
    """Turns scores into exponentials, 0 for keys that are not seen, and adds them up."""
    comptime for i in range(lo, gb):
        var last = last_seen(size, g + i)
        for key in range(start, end):
            var at = (key * gb + i) * LANES
            # selected before as well: exp takes long where it ends in subnormal numbers
            var seen = last.ge(Int32(key))
            comptime if masked:
                seen &= load(scores, at).gt(HIDDEN)
            var e = exp(seen.select(load(scores, at) - most[i], Vec(0)))
            e = seen.select(e, Vec(0))
            total[i] += e
            store(scores, at, e)


@always_inline
def _forward_block[
    gb: Int, masked: Bool, tiles: Bool
](
    y: Ptr,  # (gb, D rounded up to 16, L)
    lse: Ptr,  # (gb, L)
    scores: Ptr,  # (keys, gb, L)
    q: Panel,
    k: Panel,
    v: Panel,
    packed: Tiles,
    mask: Mask,
    drawn: Drawn,
    g: Int,
    size: Attention,
):
    """The queries of gb groups from g on."""
    var keys = keys_of(g, size)
    var most = Array[Vec, gb](fill=Vec(-inf[F32]()))
    var total = Array[Vec, gb](fill=Vec(0))
    var all = keys
    comptime if gb == 2:
        all = all_see(size, g, keys)
    comptime if tiles:
        packed.pack_block[gb](packed.q, q, g, size)
        packed.score[gb](scores, packed.k, packed.q, 0, ceildiv(keys, LANES), size)
    _score[0, gb, masked, tiles](scores, most, q, k, mask, g, 0, all, size)
    comptime if gb == 2:
        _score[1, gb, masked, tiles](scores, most, q, k, mask, g, all, keys, size)
    _exponentiate[0, gb, masked](scores, total, most, g, 0, all, size)
    if size.p > 0:
        drop[0, gb](scores, drawn, g, 0, 0, all, size)
    comptime if not tiles:
        unsafe_memset_zero(y, gb * size.part())
        combine[gb](y, size.part(), scores, LANES, gb * LANES, v, 0, all, size.D)
    comptime if gb == 2:
        if all < keys:
            _exponentiate[1, gb, masked](scores, total, most, g, all, keys, size)
            if size.p > 0:
                drop[1, gb](scores, drawn, g, 0, all, keys, size)
            comptime if not tiles:
                combine[1](
                    y.unsafe_offset(size.part()),
                    size.part(),
                    scores.unsafe_offset((all * gb + 1) * LANES),
                    LANES,
                    gb * LANES,
                    v,
                    all // LANES,
                    keys - all,
                    size.D,
                )
    comptime if tiles:
        for key in range(all, keys):  # not seen by the first group
            store(scores, key * gb * LANES, Vec(0))
        packed.pack_scores[gb](scores, 0, keys, size)
        packed.combine[gb](y, keys, size)
    comptime for i in range(gb):
        comptime if masked:  # of queries that see nothing
            most[i] = total[i].gt(0).select(most[i], Vec(0))
            total[i] = total[i].gt(0).select(total[i], Vec(1))
        store(lse, i * LANES, most[i] + log(total[i]))
        var inverse = 1 / total[i]
        for d in range(size.D):
            var at = i * size.part() + d * LANES
            store(y, at, load(y, at) * inverse)


@no_inline
def _forward[
    masked: Bool, tiles: Bool
](
    y: Ptr,  # (G, H * D, L)
    lse: Ptr,  # (G, H, L): log sum exp of each query's scores
    q: Ptr,  # (G, features, L)
    k: Ptr,
    v: Ptr,
    mask: Ptr,
    scratch: Ptr,
    size: Attention,
    context: ContextPtr,
):
    """Computes y = dropout(softmax(q k^T scale)) v."""
    var s = size
    var token = UInt32(context[].first) * UInt32(s.T)
    var scores = scratch
    var block = scores.unsafe_offset(_padded(s.S) * SIDE)
    var sums = block.unsafe_offset(BLOCK * s.part())
    var qr = sums.unsafe_offset(SIDE)
    var kr = qr.unsafe_offset(s.panel(s.T))
    var vr = kr.unsafe_offset(s.panel(s.S))
    var packed = Tiles(vr.unsafe_offset(s.panel(s.S)), s)
    comptime if tiles:
        begin()
    for n in range(s.N):
        for h in range(s.H):
            var qp = panel_of(q, s.features(), s.at(0, h), n, s.T, s.D, qr)
            var kp = panel_of(k, s.features(), s.at(1, h), n, s.S, s.D, kr)
            var vp = panel_of(v, s.features(), s.at(2, h), n, s.S, s.D, vr)
            var mp = Mask(mask, n, h, s)
            var drawn = Drawn(token + UInt32(n * s.T), s.draws(h), context)
            comptime if tiles:
                packed.pack_keys(packed.k, kp, s)
                packed.pack_along(vp, s)

            @always_inline
            def queries[gb: Int](g: Int) {imm}:
                _forward_block[gb, masked, tiles](block, sums, scores, qp, kp, vp, packed, mp, drawn, g, s)
                comptime for i in range(gb):
                    var part = block.unsafe_offset(i * s.part())
                    var at = h * s.D
                    put_group(y, s.H * s.D, at, n, s.T, s.D, part, g + i)
                    part = sums.unsafe_offset(i * LANES)
                    put_group(lse, s.H, h, n, s.T, 1, part, g + i)

            in_tiles_and_ones[BLOCK](ceildiv(s.T, LANES), queries)
    comptime if tiles:
        end()
    clear_rest(y, s.H * s.D, 0, s.N * s.T, s.H * s.D)


def _attention_forward(r: Record):
    var masked = sizes_of[Attention](r, 8).masks != 0
    if in_tiles(r):
        if masked:
            call[_forward[True, HAS_AMX]](r)
        else:
            call[_forward[False, HAS_AMX]](r)
    elif masked:
        call[_forward[True, False]](r)
    else:
        call[_forward[False, False]](r)


# --- backward ---------------------------------------------------------------------------------------------------------


@always_inline
def _transposed[gb: Int](y: Ptr, x: Ptr, groups: Int):
    """The scores of `groups` groups of keys, x (keys, gb, L of queries), as y (groups, queries, L of keys)."""
    for group in range(groups):
        comptime for i in range(gb):
            var a = Array[Vec, LANES](fill=Vec(0))
            comptime for j in range(LANES):
                a[j] = load(x, ((group * LANES + j) * gb + i) * LANES)
            transpose(a)
            comptime for j in range(LANES):
                store(y, (group * SIDE + i * LANES + j) * LANES, a[j])


@always_inline
def _differentiate[
    lo: Int, gb: Int, more: Bool, tiles: Bool
](
    p: Ptr,  # (keys of the block, gb, L of queries); q k^T, if `tiles`
    ds: Ptr,  # dy v^T, if `tiles`
    factors: Ptr,  # for dropout
    mask: Mask,
    drawn: Drawn,
    dy: Panel,
    q: Panel,
    k: Panel,
    v: Panel,
    lse: Panel,
    delta: Panel,
    g: Int,
    first: Int,
    start: Int,
    end: Int,
    size: Attention,
):
    """The probabilities, after dropout, and the gradients of the scores of keys start .. end - 1 of the block from key
    `first` on, and of groups lo .. gb - 1 of queries.
    """
    comptime n = gb - lo
    comptime if more:
        for i in range(start * gb, end * gb):
            store(factors, i * LANES, Vec(1))
        if size.p > 0:
            drop[lo, gb](factors, drawn, g, first, start, end, size)
    for key in range(start, end, TILE):
        var s = Array[Vec, TILE * n](fill=Vec(0))
        var d = Array[Vec, TILE * n](fill=Vec(0))
        comptime if tiles:
            s = _products[lo, gb](p, key)
            d = _products[lo, gb](ds, key)
        else:
            var group = (first + key) // LANES
            s = dots[TILE, n](q, g + lo, k.group(group).unsafe_offset(key % LANES), size.D)
            d = dots[TILE, n](dy, g + lo, v.group(group).unsafe_offset(key % LANES), size.D)
        comptime for i in range(lo, gb):
            var last = last_seen(size, g + i)
            comptime if tiles:  # lanes without a query add nothing to dk and dv
                last = first_lanes(size.T - (g + i) * LANES).select(last, -1)
            var log_sum = load(lse.group(g + i), 0)
            var shift = load(delta.group(g + i), 0)
            comptime for j in range(TILE):
                var at = ((key + j) * gb + i) * LANES
                var from_ = j * n + i - lo
                var seen = last.ge(Int32(first + key + j))
                var e = s[from_] * size.scale - log_sum
                comptime if more:  # added last: the rest is one multiply-add
                    var added = mask.at(first + key + j, g + i)
                    e += added
                    seen &= added.gt(HIDDEN)
                e = seen.select(e, Vec(0))
                var share = seen.select(exp(e), Vec(0))
                store(p, at, share)
                var slope = d[from_] - shift
                comptime if more:  # said, as the compiler makes one multiply-add of it or not by what stands around it
                    slope = madd(d[from_], load(factors, at), -shift)
                slope *= share * size.scale
                store(ds, at, seen.select(slope, Vec(0)))
    comptime if more:
        for i in range(start * gb, end * gb):
            var at = i * LANES
            store(p, at, load(p, at) * load(factors, at))


@always_inline
def _backward_block[
    gb: Int, more: Bool, tiles: Bool
](
    dq: Ptr,  # (gb, D rounded up to 16, L)
    dk: Ptr,  # (groups of S, D rounded up to 16, L), added to
    dv: Ptr,
    room: Ptr,  # 3 blocks of keys, or 5 AREA
    mask: Mask,
    drawn: Drawn,
    dy: Panel,
    q: Panel,
    k: Panel,
    v: Panel,
    lse: Panel,
    delta: Panel,
    packed: Tiles,
    g: Int,
    size: Attention,
):
    """The queries of gb groups from g on, with all keys they see."""
    var D = size.D
    var part = size.part()
    var keys = keys_of(g, size)
    var all = keys
    comptime if gb == 2:
        all = all_see(size, g, keys)
    var queries = min(size.T - g * LANES, gb * LANES)
    comptime block = KEYS if tiles else SIDE
    var p = room  # (keys of the block, gb, L of queries)
    var ds = room.unsafe_offset(block * SIDE)
    var factors = room.unsafe_offset(2 * block * SIDE)
    var pt = room.unsafe_offset(3 * AREA)  # (groups, queries, L of keys), unless `tiles`
    var dst = room.unsafe_offset(4 * AREA)
    comptime if tiles:
        packed.pack_block[gb](packed.q, q, g, size)
        packed.pack_block[gb](packed.dy, dy, g, size)
        packed.pack_block_along(packed.qt, q, g, size)
        packed.pack_block_along(packed.dyt, dy, g, size)
    else:
        unsafe_memset_zero(dq, gb * part)
    for start in range(0, keys, block):
        var count = min(keys - start, block)
        var groups = ceildiv(count, LANES)
        # whether the last group of keys is seen by the second group of queries alone
        var corner = start < all and all < start + count
        var whole = all - start if corner else count
        comptime if tiles:
            packed.score[gb](p, packed.k, packed.q, start // LANES, groups, size)
            packed.score[gb](ds, packed.v, packed.dy, start // LANES, groups, size)
        _differentiate[0, gb, more, tiles](
            p, ds, factors, mask, drawn, dy, q, k, v, lse, delta, g, start, 0, whole if corner else groups * LANES, size
        )
        comptime if not tiles:
            combine[gb](dq, part, ds, LANES, gb * LANES, k, start // LANES, whole, D)
        comptime if gb == 2:
            if corner:
                _differentiate[1, gb, more, tiles](
                    p, ds, factors, mask, drawn, dy, q, k, v, lse, delta, g, start, whole, groups * LANES, size
                )
                comptime if tiles:
                    for key in range(whole, groups * LANES):  # not seen by the first group
                        store(p, key * SIDE, Vec(0))
                        store(ds, key * SIDE, Vec(0))
                else:
                    combine[1](
                        dq.unsafe_offset(part),
                        part,
                        ds.unsafe_offset((LANES * gb + 1) * LANES),
                        LANES,
                        gb * LANES,
                        k,
                        start // LANES + 1,
                        count - LANES,
                        D,
                    )
        var at = start // LANES * part
        comptime if tiles:
            packed.pack_scores_along[gb](packed.pt, p, start, groups, g)
            packed.pack_scores_along[gb](packed.dst, ds, start, groups, g)
            packed.pack_scores[gb](ds, start, count, size)
            continue
        _transposed[gb](pt, p, groups)
        _transposed[gb](dst, ds, groups)

        @always_inline
        def columns[kb: Int](first: Int, count: Int) {imm}:
            var w = first * LANES
            var from_ = g + first // LANES
            combine[kb](dv.unsafe_offset(at), part, pt.unsafe_offset(w), SIDE * LANES, LANES, dy, from_, count, D)
            combine[kb](dk.unsafe_offset(at), part, dst.unsafe_offset(w), SIDE * LANES, LANES, q, from_, count, D)

        if corner:
            columns[1](0, LANES)
            columns[BLOCK](LANES, queries - LANES)
        elif groups == BLOCK:
            columns[BLOCK](0, queries)
        else:
            columns[1](0, queries)
    comptime if tiles:
        packed.combine[gb](dq, keys, size)


def _delta[tiles: Bool](delta: Ptr, dy: Ptr, y: Ptr, size: Attention):
    """The sum over the features of each head of dy y: (G, H, L).

    Of dy as products take it, so that the gradients of the scores of a query add up to 0.
    """
    for g in range(ceildiv(size.N * size.T, LANES)):
        for h in range(size.H):
            var i = g * size.H + h
            var s = Vec(0)
            for d in range(size.D):
                var at = (i * size.D + d) * LANES
                var slope = load(dy, at)
                comptime if tiles:
                    slope = slope.cast[BF16]().cast[F32]()
                s = madd(slope, load(y, at), s)
            store(delta, i * LANES, s)


@no_inline
def _backward[
    more: Bool, tiles: Bool  # more: a mask, or dropout
](
    dq: Ptr,  # (G, features, L); dk and dv are parts of the same memory if fused
    dk: Ptr,
    dv: Ptr,
    dy: Ptr,  # (G, H * D, L)
    y: Ptr,
    lse: Ptr,  # (G, H, L)
    q: Ptr,
    k: Ptr,
    v: Ptr,
    mask: Ptr,
    scratch: Ptr,
    size: Attention,
    context: ContextPtr,
):
    """Computes the gradients of q, k and v.

    With p the probabilities: dv = p^T dy, ds = p (dy v^T - sum dy y) scale, dq = ds k, dk = ds^T q. With dropout, of
    factors f: dv = (p f)^T dy, ds = p (dy v^T f - sum dy y) scale.
    """
    var s = size
    var token = UInt32(context[].first) * UInt32(s.T)
    var of = s.features()
    var room = scratch
    var dqr = room.unsafe_offset(3 * KEYS * SIDE if tiles else 5 * AREA)
    var dkr = dqr.unsafe_offset(BLOCK * s.part())
    var dvr = dkr.unsafe_offset(s.panel(s.S))
    var qr = dvr.unsafe_offset(s.panel(s.S))
    var dyr = qr.unsafe_offset(s.panel(s.T))
    var kr = dyr.unsafe_offset(s.panel(s.T))
    var vr = kr.unsafe_offset(s.panel(s.S))
    var lr = vr.unsafe_offset(s.panel(s.S))
    var er = lr.unsafe_offset(_padded(s.T))
    var delta = er.unsafe_offset(_padded(s.T))
    var packed = Tiles(delta.unsafe_offset(_padded(s.N * s.T) * s.H), s)
    _delta[tiles](delta, dy, y, s)
    comptime if tiles:
        begin()
    for n in range(s.N):
        for h in range(s.H):
            var qp = panel_of(q, of, s.at(0, h), n, s.T, s.D, qr)
            var kp = panel_of(k, of, s.at(1, h), n, s.S, s.D, kr)
            var vp = panel_of(v, of, s.at(2, h), n, s.S, s.D, vr)
            var dp = panel_of(dy, s.H * s.D, h * s.D, n, s.T, s.D, dyr)
            var lp = panel_of(lse, s.H, h, n, s.T, 1, lr)
            var ep = panel_of(delta, s.H, h, n, s.T, 1, er)
            var mp = Mask(mask, n, h, s)
            var drawn = Drawn(token + UInt32(n * s.T), s.draws(h), context)
            unsafe_memset_zero(dkr, 2 * s.panel(s.S))
            comptime if tiles:
                packed.pack_keys(packed.k, kp, s)
                packed.pack_keys(packed.v, vp, s)
                packed.pack_along(kp, s)

            @always_inline
            def queries[gb: Int](g: Int) {imm}:
                _backward_block[gb, more, tiles](dqr, dkr, dvr, room, mp, drawn, dp, qp, kp, vp, lp, ep, packed, g, s)
                comptime for i in range(gb):
                    var part = dqr.unsafe_offset(i * s.part())
                    put_group(dq, of, s.at(0, h), n, s.T, s.D, part, g + i)
                comptime if tiles:
                    packed.add(dkr, dvr, g + gb, s)

            in_tiles_and_ones[BLOCK](ceildiv(s.T, LANES), queries)
            for g in range(ceildiv(s.S, LANES)):
                var at = g * s.part()
                var part = dkr.unsafe_offset(at)
                put_group(dk, of, s.at(1, h), n, s.S, s.D, part, g)
                part = dvr.unsafe_offset(at)
                put_group(dv, of, s.at(2, h), n, s.S, s.D, part, g)
    comptime if tiles:
        end()
    clear_rest(dq, of, 0, s.N * s.T, of)
    if not s.fused:
        clear_rest(dk, of, 0, s.N * s.S, of)
        clear_rest(dv, of, 0, s.N * s.S, of)


def _attention_backward(r: Record):
    # Functions of their own: in one that has the code of both, a backward pass without dropout takes a fifth longer
    var s = sizes_of[Attention](r, 12)
    var more = s.p > 0 or s.masks != 0
    if in_tiles(r):
        if more:
            call[_backward[True, HAS_AMX]](r)
        else:
            call[_backward[False, HAS_AMX]](r)
    elif more:
        call[_backward[True, False]](r)
    else:
        call[_backward[False, False]](r)


# --- the ops ----------------------------------------------------------------------------------------------------------


@always_inline
def _padded(tokens: Int) -> Int:
    return ceildiv(tokens, LANES) * LANES


@always_inline
def _packed(r: Record, size: Attention) -> Int:
    return Tiles.floats(size) if in_tiles(r) else 0


def _forward_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var s = sizes_of[Attention](r, 8)
    var panels = s.panel(s.T) + 2 * s.panel(s.S)
    return 4 * (_padded(s.S) * SIDE + BLOCK * s.part() + SIDE + panels + _packed(r, s))


def _backward_scratch(r: Record, shards: Int, fold: Int) -> Int:
    var s = sizes_of[Attention](r, 12)
    var panels = 2 * s.panel(s.T) + 4 * s.panel(s.S) + 2 * _padded(s.T)
    var delta = _padded(s.N * s.T) * s.H
    var room = 3 * KEYS * SIDE if in_tiles(r) else 5 * AREA
    return 4 * (room + BLOCK * s.part() + panels + delta + _packed(r, s))


def ops() -> List[Op]:
    """The ops of this file."""
    return [
        Op(
            "attention_forward",
            "y, lse; q, k, v, mask, ~scratch; N, T, S, H, D, past, fused, scale, p, layer, head, masks",
            _attention_forward,
            "lanes heads",
            _forward_scratch,
        ),
        Op(
            "attention_backward",
            "dq, dk, dv; dy, y, lse, q, k, v, mask, ~scratch; N, T, S, H, D, past, fused, scale, p, layer, head, masks",
            _attention_backward,
            "lanes heads",
            _backward_scratch,
        ),
    ]
