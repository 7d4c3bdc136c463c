"""The mesh: equations, coordinates, groups, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from odyssey.comm import mock
from odyssey.errors import ConfigError
from odyssey.parallel.mesh import Groups, Mesh


@pytest.mark.parametrize("dp,pp,tp", list(itertools.product((1, 2, 3), (1, 2, 3), (1, 2, 4))))
def test_coordinates_number_the_ranks_one_by_one(dp, pp, tp):
    mesh = Mesh(dp, pp, tp).fit(dp * pp * tp)
    seen = [mesh.coordinates(r) for r in range(dp * pp * tp)]
    assert seen == list(itertools.product(range(dp), range(pp), range(tp)))
    assert [mesh.rank(*at) for at in seen] == list(range(dp * pp * tp))


@pytest.mark.parametrize(
    "given,world,devices,fitted",
    [
        ((None, None, None), 4, 1, (4, 1, 1)),
        ((None, None, None), 4, 2, (2, 2, 1)),  # a model placed on two devices
        # no two ranks for each replica: the devices are one rank's
        ((None, None, None), 3, 2, (3, 1, 1)),
        ((None, None, None), 1, 3, (1, 1, 1)),
        ((None, 2, None), 6, 1, (3, 2, 1)),
        ((None, None, 2), 4, 1, (2, 1, 2)),
        ((2, None, None), 2, 2, (2, 1, 1)),
        ((None, 2, 2), 8, 1, (2, 2, 2)),
    ],
)
def test_what_is_left_out_follows_from_the_world(given, world, devices, fitted):
    assert Mesh(*given).fit(world, devices) == Mesh(*fitted)


def test_numbers_that_do_not_fit_are_refused_with_the_equation():
    with pytest.raises(ConfigError) as error:
        Mesh(2, 2, 2).fit(6)
    assert (
        str(error.value)
        == "[mesh] dp(2) x pp(2) x tp(2) = 8, but 6 ranks are running; change --dp, --pp, --tp "
        "or -n"
    )
    with pytest.raises(ConfigError, match=r"= 2, but 1 rank is running; start 2 with mpirun -n 2"):
        Mesh(pp=2).fit(1)
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ConfigError, match=r"\[mesh\] dp is"):
            Mesh(dp=wrong)


@pytest.mark.parametrize("shape", [(2, 2, 1), (1, 3, 1), (2, 1, 2), (1, 2, 2), (3, 1, 1)])
def test_groups_are_the_lines_of_the_grid(shape):
    mesh = Mesh(*shape)
    world = mesh.dp * mesh.pp * mesh.tp

    def look(comm):
        g = Groups(comm, mesh)
        return (g.d, g.p, g.t), {
            name: getattr(g, name).ranks for name in ("dp", "pp", "tp", "model")
        }

    found = mock.run(world, look)
    at = dict(zip([where for where, _ in found], range(world), strict=True))
    for (d, p, t), groups in found:
        own = (mesh.rank(d, p, t),)
        assert groups["dp"] == tuple(at[i, p, t] for i in range(mesh.dp))
        if mesh.pp * mesh.tp > 1:
            assert groups["pp"] == tuple(at[d, i, t] for i in range(mesh.pp))
            assert groups["tp"] == tuple(at[d, p, i] for i in range(mesh.tp))
            assert groups["model"] == tuple(
                at[d, i, j] for i in range(mesh.pp) for j in range(mesh.tp)
            )
        else:  # groups of one, which do nothing
            assert all(len(groups[name]) == len(own) for name in ("pp", "tp", "model"))
