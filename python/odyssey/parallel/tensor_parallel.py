"""Tensor parallelism: rewrites the recorded program of a shard so that several processes compute
each layer together.

After Megatron-LM (Shoeybi et al. 2019); docs/tensor-parallel.md has what is split how. Ranks of one
group run the same shards; between native records they meet in pseudo-records
(tensor_collectives.py). Splits are runs of the four parts in which the kernels add
(mojo/kernels/parts.mojo), so loss and gradients have the bits of the program that was rewritten.

Pure functions. Neither the exchange with other ranks (tensor_exchange.py) nor the optimizer: all
parameters stay in one arena, of which a rank reads and trains its pieces (`Piece`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.native import PARAMS
from ..core.products import TILE
from ..core.program import Memory, OwnMemory, Range, Record, Slot
from ..errors import ConfigError
from .mesh import PARTS
from .plan import Run
from .tensor_collectives import LANES, Gather, Pseudo, Regroup, TreeSlice, TreeSum, owned, parts

# the sizes of an op that computes each channel by itself
POOL = ("planes", "H", "W", "R", "T", "S")
# --- what a rewritten program consists of ---------------------------------------------------------


class Piece(NamedTuple):
    """Who trains which piece of a parameter.

    axis 0: rank r trains rows ranges[r], contiguous in the arena. axis 1: columns ranges[r] of each
    row; gradients lie at the same places of the gradient buffer, in the rows of the whole
    parameter, and are zero elsewhere. axis None: all of it on every rank, from gradients that have
    the same bits on all.
    """

    axis: int | None = None
    ranges: tuple[Run, ...] = ()

    def of(self, array: np.ndarray, rank: int) -> np.ndarray:
        """The view of a parameter (or of its gradient, its momentum), in its shape, that a rank
        trains.
        """
        if self.axis is None:
            return array
        a, b = self.ranges[rank]
        return array[a:b] if self.axis == 0 else array[:, a:b]


class Layer(NamedTuple):
    """How one layer is split, decided for its weight, and the bytes that a rank receives for it
    per shard.
    """

    name: str
    shape: tuple[int, ...]  # of its weight
    split: str  # "outputs", "inputs" or "whole"
    ranges: tuple[Run, ...]  # of the split axis, one per rank; empty if whole
    forward: int = 0
    backward: int = 0


class Split(NamedTuple):
    """A program as one rank of a tensor-parallel group runs it."""

    records: list[Record]  # the pseudo-records in the same order on all ranks
    ownership: dict[str, Piece]  # of every parameter of the arena, by name
    layers: tuple[Layer, ...]  # in the order of the forward pass


def describe(layers: Sequence[Layer], shards: int = 1) -> str:
    """A table of the layers: the split, and the KiB that this rank receives per step in which it
    runs `shards`.
    """

    def kib(n: int) -> str:
        return f"{n * shards / 1024:,.1f}" if n else "-"

    rows = [("layer", "weight", "split", "runs", "forward KiB", "backward KiB")]
    for layer in layers:
        runs = " ".join(f"{a}-{b}" for a, b in layer.ranges) or "-"
        shape = " x ".join(map(str, layer.shape))
        rows.append((layer.name, shape, layer.split, runs, kib(layer.forward), kib(layer.backward)))
    total = [sum(getattr(layer, phase) for layer in layers) for phase in ("forward", "backward")]
    rows.append(("total", "", "", "", *map(kib, total)))
    columns = zip("<<<<>>", zip(*rows, strict=True), strict=True)
    forms = [f"{side}{max(map(len, column))}" for side, column in columns]
    return "\n".join("  ".join(map(format, row, forms)).rstrip() for row in rows)


# --- rewriting ------------------------------------------------------------------------------------


def rewrite(
    records: Sequence[Record], rank: int, size: int, like: Mapping[str, Piece] | None = None
) -> Split:
    """The program of a rank of a tensor-parallel group of `size`.

    Works on records before or after `program.fuse`, before `program.plan_memory`; the records given
    are not changed. A layer is split by inputs if its input lies split just so, else by outputs. A
    layer with fewer than four outputs, of which some rank would get none, stays whole. Between two
    layers, values stay split as long as only pooling and ops with the trait "features" or "heads"
    (mojo/kernels/op.mojo) use them, and are gathered before anything else.

    `like` is the ownership of some parameters, or of another program of the same model, whose
    splits are to be followed: a rank may read only what it trains, and an evaluation, without
    dropout, would be split in another way than the training. Raises ConfigError: size is not 1 to
    4; a shard in rows (of at most four samples); products of another precision than fp32; a program
    of which nothing can be split.
    """
    if not 1 <= size <= PARTS or not 0 <= rank < size:
        raise ConfigError(
            f"[tp] rank {rank} of {size}; sums are cut in {PARTS} parts, so --tp must be 1 to "
            f"{PARTS} (more ranks: raise --dp or --pp)"
        )
    work = _Rewriter(rank, size, like or {}, records)
    if size == 1:
        work.note(records)
        return Split(list(records), work.ownership, ())
    for r in records:
        work.rewrite(r)
    work.note(records)
    split = Split(work.out, work.ownership, work.summary())
    if all(layer.split == "whole" for layer in split.layers):
        names = ", ".join(layer.name for layer in split.layers) or "none"
        raise ConfigError(
            f"[tp] no layer can be split over {size} ranks (layers: {names}); use --tp 1"
        )
    return split


@dataclasses.dataclass
class _Value:
    """Where the numbers of an activation are: whole, as this rank's features, or both."""

    groups: int
    ranges: tuple[Run, ...]
    device: int  # of the record that made it
    tag: int
    layer: str
    local_slot: Slot | None  # (groups, F_r, 16)
    whole: bool = False  # its own memory holds it
    node: Slot | None = None  # what this rank adds to it, if neither is made yet
    floats: int = 0  # of the node
    heads: Slot | None = None  # this rank's heads of q, k and v side by side, if it is these


class _Rewriter:
    """Follows the records, and for every activation where it is whole and where it is split."""

    def __init__(
        self, rank: int, size: int, like: Mapping[str, Piece], records: Sequence[Record]
    ) -> None:
        self.rank = rank
        self.size = size
        self.like = like
        self.part, end = parts(rank, size)
        self.parts = end - self.part
        self.out: list[Record] = []
        self.ownership = dict(like)
        self.plans: dict[int, Layer] = {}  # by the weight's offset in the arena
        self.tags: dict[int, Layer] = {}  # by forward op
        # inputs and channels of split pools, by forward op
        self.pools: dict[int, tuple[_Value, tuple[Run, ...]]] = {}
        # parameters that other ops than products read, as an embedding that is the output layer's
        # weight: not split
        other_records = (r for r in records if not r.declared.traits & {"rounds", "features"})
        self.read_whole = {
            a.offset
            for r in other_records
            for a in r.args
            if isinstance(a, Range) and a.space == PARAMS
        }
        # by id of the activation's own memory, which the records keep alive
        self.values: dict[int, _Value] = {}

    def rewrite(self, r: Record) -> None:
        """Rewrites the next record: by its traits, and by what its arguments are called
        (mojo/kernels/op.mojo).
        """
        traits = r.declared.traits
        if "rounds" in traits:
            if r.dtype != "fp32":
                instead = "use --precision fp32, or --tp 1"
                raise ConfigError(
                    f"[tp] {r.op} in {r.dtype}: only products in fp32 are split; {instead}"
                )
            if r.layout == "rows":
                raise ConfigError(
                    "[tp] a shard of at most 4 samples is computed in rows, which are not split; "
                    "use a larger --shard-size or batch, or --tp 1"
                )
            self._product(r)
        elif r.declared.sizes[: len(POOL)] == POOL:
            self._pool(r)
        elif "features" in traits:
            self._features(r)
        elif "heads" in traits:
            self._heads(r)
        else:
            self._any(r)

    def note(self, records: Sequence[Record]) -> None:
        """Completes the ownership: what was not split is everybody's."""
        arenas = [a.arena for r in records for a in r.args if isinstance(a, Range)]
        for name, _ in arenas[0].named if arenas else ():
            self.ownership.setdefault(name, Piece())

    def summary(self) -> tuple[Layer, ...]:
        """The layers with the bytes of their exchanges."""
        sums: Counter[tuple[str, str]] = Counter()
        for r in self.out:
            if isinstance(r, Pseudo):
                sums[r.layer, r.phase] += r.received(self.rank)
        layers = self.plans.values()
        return tuple(
            x._replace(forward=sums[x.name, "forward"], backward=sums[x.name, "backward"])
            for x in layers
        )

    # --- values ---

    def _emit(self, r: Record, op: str, *args: Any) -> None:
        """A native record in the place of r."""
        self.out.append(r.changed(op=op, args=list(args)))

    def _owned(self, n: int) -> tuple[Run, ...]:
        return tuple(owned(n, t, self.size) for t in range(self.size))

    def _slot(self, groups: int, features: int) -> Slot:
        return Slot(4 * LANES * groups * features)

    def _split_value(
        self, memory: Memory, r: Record, groups: int, ranges: tuple[Run, ...], layer: str
    ) -> Slot:
        """Memory for this rank's features of a new activation."""
        a, b = ranges[self.rank]
        local_slot = self._slot(groups, b - a)
        self.values[id(memory)] = _Value(groups, ranges, r.device, r.tag, layer, local_slot)
        return local_slot

    def _lies_split(self, memory: Memory) -> _Value | None:
        """The value of an activation that is split and not whole."""
        v = self.values.get(id(memory))
        return v if v is not None and not v.whole and v.local_slot is not None else None

    def _ensure_whole(self, memory: Memory, r: Record) -> Memory:
        """The activation as a whole, gathered or summed now if it is not."""
        v = self.values.get(id(memory))
        if v is not None and not v.whole:
            v.whole = True
            if v.local_slot is not None:
                self._meet(r, v, Gather([memory, v.local_slot], v.groups, v.ranges))
            else:
                self._meet(r, v, TreeSum([memory, v.node], v.floats, self.size))
        return memory

    def _meet(self, r: Record, v: _Value, meeting: Pseudo) -> None:
        """Adds a pseudo-record that r needs, behind the op that made the value: r may be of
        another pipeline stage.
        """
        meeting.device = v.device
        meeting.tag = v.tag
        meeting.layer = v.layer
        meeting.phase = r.phase
        meeting.recompute = r.recompute
        index = len(self.out)
        while index and (self.out[index - 1].tag, self.out[index - 1].phase) != (v.tag, r.phase):
            index -= 1
        self.out.insert(index or len(self.out), meeting)

    def _ensure_split(
        self, memory: Memory, r: Record, groups: int, ranges: tuple[Run, ...]
    ) -> Slot:
        """This rank's features of an activation, cut now if it is whole or cut otherwise."""
        v = self.values.get(id(memory))
        if v is not None and v.local_slot is not None and v.ranges == ranges:
            return v.local_slot
        a, b = ranges[self.rank]
        local_slot = self._slot(groups, b - a)
        if v is not None and v.local_slot is None and not v.whole:
            v.local_slot = local_slot
            v.groups = groups
            v.ranges = ranges
            self._meet(r, v, TreeSlice([local_slot, v.node], groups, ranges))
            return local_slot
        self._ensure_whole(memory, r)
        self._emit(r, "take_features", local_slot, memory, groups, ranges[-1][1], a, b - a)
        if v is None:
            self.values[id(memory)] = _Value(
                groups, ranges, r.device, r.tag, "", local_slot, whole=True
            )
        return local_slot

    def _forget_parts(self, memory: Memory) -> None:
        """The activation's memory was written as a whole: what was cut from it before is out of
        date.
        """
        self.values.pop(id(memory), None)

    def _any(self, r: Record) -> None:
        """An op that needs all features."""
        for a in r.args:
            if isinstance(a, Slot):
                self._ensure_whole(a, r)
        self.out.append(r.changed(args=list(r.args)))
        if r.args and isinstance(r.args[0], Slot):
            self._forget_parts(r.args[0])

    # --- layers ---

    def _plan(self, r: Record, w: Memory, b: Memory, shape: tuple[int, ...], x: Memory) -> Layer:
        """How the layer of a forward record is split; decided the first time."""
        if not isinstance(w, Range):
            raise ConfigError(
                f"[tp] {r.op}: its weight is not a parameter of the model; use --tp 1"
            )
        plan = self.plans.get(w.offset)
        if plan is None:
            name = _name(w)
            split = "whole"
            ranges = ()
            v = self._lies_split(x)
            # of a layer with the same bias
            shared = self.ownership.get(_name(b)) if isinstance(b, Range) else None
            if w.offset in self.read_whole:
                pass
            elif name in self.like:
                piece = self.like[name]
                split = {None: "whole", 0: "outputs", 1: "inputs"}[piece.axis]
                ranges = piece.ranges
            elif (
                shared in (None, Piece())
                and len(shape) == 2
                and v is not None
                and v.ranges == self._owned(shape[1])
            ):
                split = "inputs"
                ranges = v.ranges
            elif shared != Piece() and all(b > a for a, b in self._owned(shape[0])):
                split = "outputs"
                ranges = self._owned(shape[0])
            self.ownership[name] = {
                "outputs": Piece(0, ranges),
                "inputs": Piece(1, ranges),
                "whole": Piece(),
            }[split]
            plan = self.plans[w.offset] = Layer(name.removesuffix(".weight"), shape, split, ranges)
        if isinstance(b, Range):  # a weight may have a bias of its own in each layer that shares it
            piece = Piece(0, plan.ranges) if plan.split == "outputs" else Piece()
            if self.ownership.setdefault(_name(b), piece) != piece:
                raise ConfigError(
                    f"[tp] {_name(b)} is the bias of layers that are shared by ranks in different "
                    "ways; give each a bias of its own, or use --tp 1"
                )
        if r.tag >= 0:
            self.tags[r.tag] = plan
        return plan

    def _planned(self, r: Record, w: Memory) -> Layer | None:
        """The plan of the layer that a backward record belongs to; `w` is its weight or the
        gradient of it.
        """
        if r.tag in self.tags:
            return self.tags[r.tag]
        return self.plans.get(w.offset) if isinstance(w, Range) else None

    def _sum(
        self, r: Record, y: Memory, node: Slot, groups: int, features: int, layer: str
    ) -> None:
        """y is the sum over the ranks' nodes; made when it is known whether all of it is needed."""
        floats = groups * features * LANES
        self.values[id(y)] = _Value(
            groups, (), r.device, r.tag, layer, None, node=node, floats=floats
        )

    def _product(self, r: Record) -> None:
        """A linear layer or a convolution, forward (y) or backward (dw, db; dx)."""
        a = r.named
        if "K" in a:
            shape = (a["K"], a["C"], a["R"], a["T"])
            inputs = a["C"] * a["H"] * a["W"]
        else:
            shape = (a["O"], a["I"])
            inputs = a["I"]
        plan = (
            self._plan(r, a["w"], a["b"], shape, a["x"])
            if "y" in a
            else self._planned(r, a.get("dw", a.get("w")))
        )
        if plan is not None and plan.split == "outputs":
            self._by_outputs(r, a, plan, math.prod(shape[1:]), inputs)
        elif plan is not None and plan.split == "inputs":
            self._by_inputs(r, a, plan)
        else:
            self._any(r)

    def _by_outputs(
        self, r: Record, a: dict[str, Any], plan: Layer, weights: int, inputs: int
    ) -> None:
        """A product of which this rank makes, or has, some outputs; weights: per output. inputs:
        features of x.
        """
        lo, hi = plan.ranges[self.rank]
        ranges = _times(plan.ranges, _pixels(a))
        g = a["G"]
        local_sizes = [hi - lo if name in ("K", "O") else a[name] for name in r.declared.sizes]
        if "y" in a:
            local_slot = self._split_value(a["y"], r, g, ranges, plan.name)
            w = _from(a["w"], lo * weights)
            b = _from(a["b"], lo)
            self._emit(
                r, r.op, local_slot, self._ensure_whole(a["x"], r), w, b, a["scratch"], *local_sizes
            )
        elif "dw" in a:
            dys = self._ensure_split(a["dy"], r, g, ranges)
            dw = _from(a["dw"], lo * weights)
            db = _from(a["db"], lo)
            self._emit(
                r, r.op, dw, db, dys, self._ensure_whole(a["x"], r), a["scratch"], *local_sizes
            )
        else:
            full_sizes = [a[name] for name in r.declared.sizes]
            winograd = "ph" in a  # adds what dx is made of afterwards
            features = _transformed(a) if winograd else inputs
            node = self._slot(g, features)
            dys = self._ensure_split(a["dy"], r, g, ranges)
            # a direct convolution's has none
            memory = [node, dys, a["w"]] + [a["scratch"]] * ("I" in a or winograd)
            self._emit(r, f"{r.op}_parts", *memory, *full_sizes, self.part, self.parts)
            total = self._slot(g, features) if winograd else a["dx"]
            self._sum(r, total, node, g, features, plan.name)
            if winograd:
                self._emit(r, f"{r.op}_end", a["dx"], self._ensure_whole(total, r), *full_sizes)
                self._forget_parts(a["dx"])

    def _by_inputs(self, r: Record, a: dict[str, Any], plan: Layer) -> None:
        """A linear layer of which this rank has some inputs."""
        lo, hi = plan.ranges[self.rank]
        g = a["G"]
        i = a["I"]
        o = a["O"]
        if "y" in a:
            node = self._slot(g, o)
            xs = self._ensure_split(a["x"], r, g, plan.ranges)
            self._emit(r, f"{r.op}_parts", node, xs, a["w"], g, i, o, self.part, self.parts)
            self._sum(r, a["y"], node, g, o, plan.name)
            self._emit(
                r, "linear_bias", a["y"], self._ensure_whole(a["y"], r), a["b"], g, o, a["relu"]
            )
            self._forget_parts(a["y"])
            return
        if "dw" in a:
            xs = self._ensure_split(a["x"], r, g, plan.ranges)
            memory = (_from(a["dw"], lo), a["db"], self._ensure_whole(a["dy"], r), xs, a["scratch"])
        else:
            dy = self._ensure_whole(a["dy"], r)
            memory = (
                self._split_value(a["dx"], r, g, plan.ranges, plan.name),
                dy,
                _from(a["w"], lo),
                a["scratch"],
            )
        self._emit(r, f"{r.op}_columns", *memory, g, hi - lo, o, i)

    # --- what runs on a rank's features as on all ---

    def _features(self, r: Record) -> None:
        """An op that computes every feature by itself; its last size counts numbers.

        With one input it goes by how that lies; a gradient goes by what was saved, its last input.
        """
        inputs = r.args[1 : 1 + len(r.declared.inputs)]
        v = self._lies_split(inputs[0]) if len(inputs) == 1 else self._made_split(inputs[-1])
        if v is None:
            return self._any(r)
        local_inputs = [self._ensure_split(a, r, v.groups, v.ranges) for a in inputs]
        y = self._split_value(r.args[0], r, v.groups, v.ranges, v.layer)
        self._emit(r, r.op, y, *local_inputs, *r.args[1 + len(inputs) : -1], y.nbytes // 4)

    def _made_split(self, memory: Memory) -> _Value | None:
        """The value of an activation that a layer made split, whether it was gathered later or
        not.
        """
        v = self.values.get(id(memory))
        return v if v is not None and v.layer else None

    def _heads(self, r: Record) -> None:
        """Attention, forward or backward, of the heads that are this rank's features of y, if q
        lies split.

        q, k and v of one layer are thirds of its outputs, of which a rank has another run: the sums
        of its input's gradient are cut so. Its y is regrouped for attention, and the gradient of y
        back.
        """
        a = r.named
        backward = "dy" in a
        d = a["D"]
        v = self._made_split(a["lse"]) if backward else self._lies_split(a["q"])
        features = self._owned(a["H"] * d)
        by_head = a["masks"] & 4  # a mask with the axis of heads stays whole
        if v is None or by_head or any(hi == lo or lo % d or hi % d for lo, hi in features):
            return self._any(r)
        heads = tuple((lo // d, hi // d) for lo, hi in features)
        lo, hi = heads[self.rank]
        g = {
            name: -(-a["N"] * a["S" if name in ("k", "v", "dk", "dv") else "T"] // LANES)
            for name in a
        }
        local_args = {**a, "H": hi - lo, "head": a["head"] + lo}
        if a["fused"]:
            qkv = self.values[id(a["q"])]
            thirds = tuple(
                tuple((i * a["H"] * d + x, i * a["H"] * d + y) for i in range(3))
                for x, y in features
            )
            outputs = tuple((run,) for run in qkv.ranges)
            if qkv.heads is None:
                qkv.heads = self._slot(g["q"], 3 * (hi - lo) * d)
                self._meet(r, qkv, Regroup([qkv.heads, qkv.local_slot], g["q"], outputs, thirds))
            local_args |= dict.fromkeys(("q", "k", "v"), qkv.heads)
        if a["fused"] and backward:
            local_args |= dict.fromkeys(("dq", "dk", "dv"), self._slot(g["q"], 3 * (hi - lo) * d))
        for name in (*r.declared.outputs, *r.declared.inputs):
            if local_args[name] is a[name] and name not in ("mask", "scratch"):
                ranges = heads if name == "lse" else features
                if name in r.declared.outputs:
                    local_args[name] = self._split_value(a[name], r, g[name], ranges, v.layer)
                else:
                    local_args[name] = self._ensure_split(a[name], r, g[name], ranges)
        local_args["mask"] = self._ensure_whole(a["mask"], r) if a["masks"] else local_args["q"]
        self._emit(r, r.op, *local_args.values())
        if a["fused"] and backward:
            local_dq = self._split_value(a["dq"], r, g["q"], qkv.ranges, v.layer)
            self._meet(
                r,
                self.values[id(a["dq"])],
                Regroup([local_dq, local_args["dq"]], g["q"], thirds, outputs),
            )

    def _pool(self, r: Record) -> None:
        """A pool, forward or backward, whose channels are split."""
        a = r.named
        size = a["H"] * a["W"]
        pixels = _pixels(a)
        backward = "dx" in a
        if not backward:
            self._split_pool(r, a["x"], a["planes"], size)
        saved = [self._made_split(a[name]) for name in r.declared.inputs[1:]]
        if r.tag not in self.pools or (backward and r.tag < 0) or None in saved:
            return self._any(r)
        v, channels = self.pools[r.tag]
        lo, hi = channels[self.rank]
        small = _times(channels, pixels)
        large = _times(channels, size)
        if backward:
            dys = self._ensure_split(a["dy"], r, v.groups, small)
            memory = [
                self._split_value(a["dx"], r, v.groups, large, v.layer),
                dys,
                *(s.local_slot for s in saved),
            ]
        else:
            memory = [
                self._split_value(a[name], r, v.groups, small, v.layer)
                for name in r.declared.outputs
            ]
            for places in memory[1:]:
                places.nbytes //= 4  # a byte each
            memory.append(v.local_slot)
        self._emit(r, r.op, *memory, v.groups * (hi - lo), *r.args[len(memory) + 1 :])

    def _split_pool(self, r: Record, x: Memory, planes: int, size: int) -> None:
        """Notes the value of a pool's input, and each rank's channels, if they are split;
        `size`: of a plane.
        """
        self.pools.pop(r.tag, None)
        v = self._lies_split(x)
        if v is not None and not any(edge % size for run in v.ranges for edge in run):
            channels = tuple((a // size, b // size) for a, b in v.ranges)
            if channels[-1][1] * v.groups == planes:
                self.pools[r.tag] = v, channels


def _pixels(a: Mapping[str, Any]) -> int:
    """Numbers that a convolution or pool with these arguments makes per channel; 1 for a linear
    layer.
    """
    return ((a["H"] - a["R"]) // a["S"] + 1) * ((a["W"] - a["T"]) // a["S"] + 1) if "H" in a else 1


def _transformed(a: Mapping[str, Any]) -> int:
    """Numbers per sample that are added in the gradient of the input of a Winograd convolution."""
    tiles = [-(-(a[size] - 2 * a[frame]) // TILE) for size, frame in (("H", "ph"), ("W", "pw"))]
    return math.prod(tiles) * (TILE + 2) ** 2 * a["C"]


def _times(ranges: tuple[Run, ...], n: int) -> tuple[Run, ...]:
    return tuple((a * n, b * n) for a, b in ranges)


def _from(memory: Memory, floats: int) -> Memory:
    """The memory from a float on. Scratch memory is everybody's own: it starts where it starts."""
    if isinstance(memory, Range):
        return Range(memory.arena, memory.space, memory.offset + 4 * floats)
    return OwnMemory(memory.array[floats:]) if isinstance(memory, OwnMemory) else memory


def _name(memory: Range) -> str:
    float_offset = memory.offset // 4
    return next(name for name, offset in memory.arena.offsets.items() if offset == float_offset)
