"""Worker processes: the same batches with any number of them, and what happens when things go
wrong.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from odyssey import data
from odyssey.errors import ConfigError, DataError

sys.path.insert(0, str(Path(__file__).parent))
import own_data  # noqa: E402
from test_random_loaders import drawn, expected, loader_of, same  # noqa: E402


@pytest.mark.parametrize("number", range(8))
def test_any_number_of_workers_gives_the_same(number):
    case = drawn(100 + number)
    workers = int(case["draw"].integers(1, 4))
    loader = loader_of(case, num_workers=workers)
    if loader is None:
        return
    for epoch in range(2):
        want = expected(case, epoch)
        if number % 2:  # abandoned: the next iteration is whole all the same
            next(iter(loader))
            loader.set_epoch(epoch)
        got = list(loader.steps(pieces=case["pieces"], join=case["join"], part=lambda n: (0, n)))
        for batch, (numbers, samples) in zip(got, want, strict=True):
            if len(numbers):
                same(batch, numbers, samples)


def loader(dataset, **more) -> data.DataLoader:
    return data.DataLoader(dataset, 4, num_workers=2, **more)


def run(path: Path, text: str, *arguments: object, **more):
    path.write_text(text)
    return subprocess.run(
        [sys.executable, path, *map(str, arguments)], capture_output=True, text=True, **more
    )


def ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] == "Z"
    except OSError:
        return True


def wait_until(condition) -> bool:
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_an_exception_is_shown_with_its_sample():
    seen = []
    with pytest.raises(
        DataError, match=r"KeyError: 'no such picture' .*sample 7 of Broken was read, epoch 0"
    ) as caught:
        for batch in loader(own_data.Broken("raise")):
            seen.append(batch.index)
    assert seen == [0]
    assert 'raise KeyError("no such picture")' in str(caught.value.__cause__)
    with pytest.raises(
        DataError, match=r"ZeroDivisionError: one by nothing .*transform of sample 0 of Made"
    ):
        list(loader(own_data.Made("image", 8), transform=own_data.failing))


def test_a_worker_that_ends():
    with pytest.raises(
        DataError, match=r"a worker process of Broken has ended \(exit code 3\) before its batch"
    ):
        list(loader(own_data.Broken("exit")))


@pytest.mark.parametrize(
    ("dataset", "transform"),
    [
        (own_data.Made("image", 8), lambda x, rng: x),
        ([(np.zeros(2), k) for k in range(4)], sys.stderr.buffer),
    ],
    ids=["lambda", "file"],
)
def test_what_cannot_be_sent_is_named(dataset, transform):
    made = object.__new__(data.transforms.Paired)
    made.function = transform
    with pytest.raises(
        ConfigError,
        match=r"num_workers=2 sends .* cannot be done: .*\(no lambda, .*or use num_workers=0",
    ):
        next(iter(loader(dataset, transform=made)))


def shared() -> set[str]:
    """The names of segments of shared memory, but those of MPI, which other tests' processes
    make.
    """
    return {
        name for name in os.listdir("/dev/shm") if not name.startswith(("mpich_", "ucx_", "bed-"))
    }


def test_workers_end_with_their_loader_and_leave_nothing():
    before = shared(), len(os.listdir("/proc/self/fd"))
    made = loader(own_data.Made("image", 40))
    list(made)
    pids = [p.pid for p in made._workers._processes]
    list(made)
    assert [p.pid for p in made._workers._processes] == pids  # they go on from epoch to epoch
    next(iter(made))
    assert wait_until(lambda: all(map(ended, pids)))  # of an abandoned iteration
    list(made)
    pids = [p.pid for p in made._workers._processes]
    del made
    gc.collect()
    assert wait_until(lambda: all(map(ended, pids)))
    assert shared() <= before[0] and len(os.listdir("/proc/self/fd")) <= before[1]


KILLED = """
import sys
sys.path.insert(0, {tests!r})
import own_data
from odyssey import data
from odyssey.data import workers
started = []
class Noted(workers.subprocess.Popen):
    def __init__(self, *a, **k):
        super().__init__(*a, **k)
        started.append(self)
if __name__ == "__main__":
    workers.subprocess.Popen = Noted
    made = data.DataLoader(own_data.Broken("sleep"), 4, num_workers=2)
    batches = iter(made)
    next(batches)
    import time
    print(*[p.pid for p in started])
    sys.stdout.flush()
    time.sleep(600)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_when_their_parent_is_killed(tmp_path, how):
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(tests=str(Path(__file__).parent)))
    process = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    pids = list(map(int, process.stdout.readline().split()))
    assert len(pids) == 2 and not any(map(ended, pids))
    process.send_signal(how)
    process.wait()
    assert wait_until(lambda: all(map(ended, pids)))


OWN = """
import numpy as np
from odyssey import data
class Own:
    def __len__(self): return 12
    def __getitem__(self, i): return np.full(3, i, np.float32), i % 2
def main():
    for batch in data.DataLoader(Own(), 4, num_workers=2):
        print(batch.inputs[:, 0].tolist())
{call}
"""


def test_a_program_s_own_classes(tmp_path):
    done = run(tmp_path / "own.py", OWN.format(call='if __name__ == "__main__": main()'))
    assert done.stdout == "[0.0, 1.0, 2.0, 3.0]\n[4.0, 5.0, 6.0, 7.0]\n[8.0, 9.0, 10.0, 11.0]\n", (
        done.stderr
    )
    done = run(tmp_path / "own.py", OWN.format(call="main()"))
    assert done.returncode == 64 and done.stdout == ""
    assert 'put what trains under `if __name__ == "__main__":`, or use num_workers=0' in done.stderr
    done = subprocess.run(
        [sys.executable, "-c", OWN.format(call="main()")], capture_output=True, text=True
    )
    assert (
        "a worker process cannot be given the data set" in done.stderr
        and "in a file that can be imported" in done.stderr
    )


BUILT_IN = """
from odyssey import data
made = data.arrays(__import__("numpy").zeros((8, 3, 4, 4), "uint8"), range(8))
print(len(list(data.DataLoader(made, 4, num_workers=2, transform=data.transforms.HorizontalFlip()))))
"""


def test_a_program_is_not_imported_for_what_is_not_its_own(tmp_path):
    done = run(tmp_path / "plain.py", BUILT_IN)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


TRAINED = """
import sys
sys.path.insert(0, {tests!r})
from test_ranks import AUGMENTED, fitted
import own_data
if __name__ == "__main__":
    from odyssey import comm
    world = comm.world()
    sha = fitted(world, own_data.Made("image", 66), loader={{**AUGMENTED, "num_workers": int(sys.argv[1])}})
    if world.rank == 0:
        print(sha)
"""


def test_a_training_on_ranks_with_workers(launch):
    script = launch.folder / "trained.py"
    script.write_text(TRAINED.format(tests=str(Path(__file__).parent)))
    alone = launch.python(script, 0)
    assert alone.returncode == 0, alone.stderr
    for ranks, workers in ((0, 2), (2, 2), (3, 1)):
        done = launch.python(script, workers, ranks=ranks)
        assert (done.returncode, done.stdout) == (0, alone.stdout), done.stderr
