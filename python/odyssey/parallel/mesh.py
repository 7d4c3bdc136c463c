"""The mesh: the ranks as a grid dp x pp x tp.

A pure function of the world size and three numbers.

Ranks of one tensor-parallel group are neighbours (they talk most), then pipeline stages, then data
parallel replicas:

    rank = (d * pp + p) * tp + t

Nothing here communicates; `Groups` asks a communicator for its sub-groups once.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..comm import Communicator

PARTS = 4  # of which sums are made, as in mojo/kernels/parts.mojo: so many ranks can share a layer


@dataclasses.dataclass(frozen=True)
class Mesh:
    """How many ranks each kind of parallelism has.

    Args:
        dp: replicas of the model, each with its own shards of the batch; None: as many as the world
            gives.
        pp: pipeline stages, each on its own rank; None: as many as the model has devices if there
            are ranks for them.
        tp: ranks that share each layer.
    """

    dp: int | None = None
    pp: int | None = None
    tp: int | None = None

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "tp"):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise ConfigError(
                    f"[mesh] {name} is {value!r}; it must be an integer of at least 1"
                )

    def fit(self, world: int, devices: int = 1) -> Mesh:
        """The same with every number known, for `world` ranks and a model placed on `devices`
        devices. Raises ConfigError: the numbers do not give `world`, with the equation.
        """
        tp = self.tp or 1
        pp = self.pp
        if pp is None:
            pp = devices if world % (devices * tp * (self.dp or 1)) == 0 else 1
        dp = self.dp or max(1, world // (pp * tp))
        if dp * pp * tp != world:
            product = dp * pp * tp
            running = f"{world} ranks are" if world > 1 else "1 rank is"
            options = (
                ", ".join(f"--{n}" for n in ("dp", "pp", "tp") if getattr(self, n) is not None)
                or "--dp"
            )
            do = (
                f"change {options} or -n"
                if world > 1
                else f"start {product} with mpirun -n {product}"
            )
            raise ConfigError(
                f"[mesh] dp({dp}) x pp({pp}) x tp({tp}) = {product}, but {running} running; {do}"
            )
        return Mesh(dp, pp, tp)

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(d, p, t) of a rank; the mesh must be fitted."""
        return rank // (self.pp * self.tp), rank // self.tp % self.pp, rank % self.tp

    def rank(self, d: int, p: int, t: int) -> int:
        """The rank at (d, p, t)."""
        return (d * self.pp + p) * self.tp + t

    def __str__(self) -> str:
        return f"dp({self.dp}) x pp({self.pp}) x tp({self.tp})"


class Groups:
    """This rank's communicators along each axis of a fitted mesh.

    dp: ranks with the same part of the model and other shards. pp: the stages of one replica, in
    order. tp: the ranks that share the layers of one stage. model: the pp x tp ranks that make up
    one replica.
    """

    def __init__(self, world: Communicator, mesh: Mesh) -> None:
        from ..comm import Communicator

        self.world = world
        self.mesh = mesh
        self.d, self.p, self.t = d, p, t = mesh.coordinates(world.rank)
        pure_dp = world.size == 1 or (mesh.pp == 1 and mesh.tp == 1)

        def group(ds: range, ps: range, ts: range) -> Communicator:
            if pure_dp:
                return Communicator()
            part = world.subgroup(
                [mesh.rank(*coordinates) for coordinates in itertools.product(ds, ps, ts)]
            )
            assert part is not None
            return part

        every = range(mesh.dp), range(mesh.pp), range(mesh.tp)
        one = range(d, d + 1), range(p, p + 1), range(t, t + 1)
        self.dp = world if pure_dp else group(every[0], one[1], one[2])
        self.pp = group(one[0], every[1], one[2])
        self.tp = group(one[0], one[1], every[2])
        self.model = group(one[0], every[1], every[2])
