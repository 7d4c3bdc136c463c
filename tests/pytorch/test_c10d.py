"""The backend of torch.distributed: beside Gloo, under each launcher, and what is said of wrong
calls.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

import odyssey
from odyssey import distributed as dist
from odyssey.comm import mock
from odyssey.errors import ConfigError, ShapeError

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed (extra [torch])"
)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 3])
def test_random_collectives_are_those_of_gloo(launch, ranks):
    done = launch.python("-W", "ignore", HERE / "c10d_random.py", 7 + ranks, 120, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["compared"] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_random_collectives_of_a_device_in_the_order_of_its_streams(launch, ranks):
    program = HERE / "c10d_random.py"
    done = launch.python("-W", "ignore", program, 20 + ranks, 120, "pretend", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["compared"] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_ddp_of_a_module_on_a_device_has_the_weights_of_the_cpu(launch, ranks):
    found = set()
    for device in ("cpu", "pretend"):
        done = launch.python("-W", "ignore", HERE / "c10d_device.py", device, ranks=ranks)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.split()) == ranks
        found.update(done.stdout.split())
    assert len(found) == 1


@pytest.mark.long
def test_random_collectives_under_torchrun(launch):
    command = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        HERE / "c10d_random.py",
        3,
        60,
    )
    done = launch.python("-W", "ignore", *command)
    assert done.returncode == 0, done.stderr
    # of two processes on one pipe
    assert done.stdout.replace("compared", "compared ").split() == ["compared"] * 2


@pytest.mark.parametrize(
    "launcher",
    [
        "mpirun",
        *(pytest.param(other, marks=pytest.mark.long) for other in ("odyssey launch", "torchrun")),
    ],
)
def test_ddp_fsdp_and_zero_train_as_over_gloo(launch, launcher):
    program = [HERE / "c10d_wrappers.py"]
    if launcher == "mpirun":
        done = launch.python("-W", "ignore", *program, ranks=2)
    else:
        if importlib.metadata.entry_points(group="torch.backends", name="odyssey"):
            program.append("plain")  # only the backend's name
        module = (
            ("odyssey", "launch", "-n", 2)
            if launcher != "torchrun"
            else ("torch.distributed.run", "--nproc_per_node=2")
        )
        done = launch.python("-W", "ignore", "-m", *module, *program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2


REGISTERED = """
import importlib.metadata
import torch, torch.distributed as dist

names = [point.dist.name for point in importlib.metadata.entry_points(group="torch.backends", name="odyssey")]
assert {"odyssey", "ml-odyssey"} <= set(names), names
registered = []
register = dist.Backend.register_backend
dist.Backend.register_backend = lambda name, *rest, **more: registered.append(name) or register(name, *rest, **more)
torch._import_device_backends()  # what `import torch` calls last
import odyssey.torch

assert dist.Backend.backend_list.count("odyssey") == 1
dist.init_process_group("odyssey", rank=0, world_size=1, store=dist.HashStore())
print(*registered, dist.get_backend())
"""


def test_two_installations_register_the_backend_once(launch):
    """An editable installation under the old name and a wheel under the new one: torch calls
    both entry points.
    """
    for name in ("odyssey", "ml-odyssey"):
        info = launch.folder / "site" / f"{name.replace('-', '_')}-0.2.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.2.0\n")
        (info / "entry_points.txt").write_text(
            "[torch.backends]\nodyssey = odyssey_c10d:register\n"
        )
    paths = [launch.folder / "site", Path(odyssey.__file__).parents[1]]
    launch.environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    launch.environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # the program counts
    done = launch.python("-W", "ignore", "-c", REGISTERED)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["odyssey", "odyssey"]


START = (
    "import odyssey.torch, torch, torch.distributed as "
    "dist\ndist.init_process_group('odyssey')\nR = dist.get_rank()\n"
)


def ranks_of(launch, code: str, **environment: str):
    (launch.folder / "user.py").write_text(START + code)
    launch.environment.update(environment)
    done = launch.python("-W", "ignore", "user.py", ranks=2)
    assert done.returncode != 0
    return done


def test_calls_that_differ_are_named_with_the_lines_of_the_program(launch):
    done = ranks_of(launch, "dist.all_reduce(torch.ones(4 + R))\n")
    assert done.returncode == 76
    assert "rank 0 calls all_reduce float32 (4,) sum at" in done.stderr
    assert "user.py:4, but rank 1 calls all_reduce float32 (5,) sum at" in done.stderr
    assert "Traceback" not in done.stderr


BESIDE = """
import os, torch, torch.distributed as dist, odyssey.torch
rank, met = int(os.environ["RANK"]), os.path.abspath("meet")
dist.init_process_group("gloo", init_method=f"file://{met}", rank=rank, world_size=2)
"""


def test_groups_beside_a_default_group_of_gloo(launch):
    code = """
whole = dist.new_group(backend="odyssey")
alone = [dist.new_group([r], backend="odyssey") for r in range(2)][dist.get_rank()]
for group, size in ((whole, 2.0), (alone, 1.0), (dist.group.WORLD, 2.0)):
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [size] * 3
del whole, alone, group  # Gloo's threads end with its last reference, which must not be that of the interpreter's end
dist.barrier()
dist.destroy_process_group()
"""
    (launch.folder / "user.py").write_text(BESIDE + code)
    done = launch.python("-W", "ignore", "user.py", ranks=2)
    assert done.returncode == 0, done.stderr


def test_a_backward_pass_that_others_do_not_make_is_named(launch):
    code = """
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
if R == 0:
    net(torch.ones(2, 4)).sum().backward()
else:
    dist.barrier()
"""
    done = ranks_of(launch, code)
    assert "rank 0 calls all_reduce float32 (10,) sum at" in done.stderr
    assert "user.py:7, but rank 1 calls barrier at" in done.stderr and "user.py:9;" in done.stderr


def test_a_rank_that_does_not_come_is_named(launch):
    code = "import time\nif R == 1:\n    time.sleep(20)\ndist.all_reduce(torch.ones(1))\n"
    done = ranks_of(launch, code, ODYSSEY_TIMEOUT="1")
    assert "waited 1 s in all_reduce float32 (1,) sum at" in done.stderr
    assert "user.py:7: rank 1 did not come" in done.stderr


REFUSED = {
    "dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BXOR)": "cannot combine torch.float32 by BXOR",
    "dist.all_reduce(torch.ones(2).to(torch.float8_e5m2))": "cannot combine torch.float8_e5m2",
    "dist.broadcast(torch.ones(2).to_sparse(), 0)": "takes dense tensors",
    "dist.all_reduce(torch.ones(2).to_sparse(), "
    "op=dist.ReduceOp.MAX)": "adds sparse tensors, and combines them in no",
}


def test_what_is_not_there_is_refused_in_a_line(launch):
    code = "".join(
        f"try:\n    {call}\nexcept Exception as e:\n    print('said:', e)\n" for call in REFUSED
    )
    done = ranks_of(launch, code + "raise SystemExit(3)\n")
    # two ranks
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("said: "))[::2]
    assert len(said) == len(REFUSED), (done.stdout, done.stderr)
    for message in REFUSED.values():
        assert any(re.search(message, line) for line in said), (message, said)


def test_own_collectives_take_tensors_of_any_dtype_and_strides():
    import torch

    def work(comm):
        dist.init_process_group()
        flags = torch.tensor([[comm.rank == 0, True], [False, True]]).t()
        assert dist.all_reduce(flags) is flags and flags.tolist() == [[True, False], [True, True]]
        assert dist.all_reduce(torch.tensor(comm.rank == 0), "prod").item() is False
        half = torch.full((2, 3), comm.rank + 0.5, dtype=torch.bfloat16, requires_grad=True)
        assert (
            dist.all_reduce(half) is half
            and half.dtype is torch.bfloat16
            and half.tolist() == [[2.0] * 3] * 2
        )
        parts = dist.all_gather(torch.tensor(1j * comm.rank))
        assert [p.item() for p in parts] == [0, 1j] and parts[0].dtype is torch.complex64
        wide = torch.zeros(3, 4, dtype=torch.complex128).t()
        dist.all_gather_into_tensor(
            wide, torch.full((2, 3), 1j + comm.rank, dtype=torch.complex128)
        )
        assert wide[:, 0].tolist() == [1j, 1j, 1 + 1j, 1 + 1j]
        with pytest.raises(ConfigError, match="all_reduce cannot combine torch.complex64 by sum"):
            dist.all_reduce(torch.ones(1, dtype=torch.complex64))
        with pytest.raises(ShapeError, match="takes dense tensors"):
            dist.broadcast(torch.ones(2).to_sparse())
        dist.destroy_process_group()

    mock.run(2, work)


def test_importing_odyssey_does_not_import_torch(launch):
    code = "import odyssey, sys\nassert 'torch' not in sys.modules\nimport torch\n"
    assert (
        launch(sys.executable, "-c", code + "assert 'odyssey.torch' not in sys.modules").returncode
        == 0
    )
