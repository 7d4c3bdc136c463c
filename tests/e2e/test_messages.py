"""What a user's slip is answered: names, next steps and exit codes; with programs as users write
them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from odyssey import DistributedTrainer, data, nn, optim
from odyssey.callbacks import EarlyStopping, LambdaCallback, ReduceLROnPlateau
from odyssey.errors import CollectiveError, ConfigError, DataError, ShapeError

RNG = np.random.default_rng(0)
SET = data.arrays(RNG.normal(size=(40, 6)).astype(np.float32), RNG.integers(0, 3, 40))


def trainer(**settings):
    return DistributedTrainer(nn.Sequential(nn.Linear(6, 3)), optim.SGD(lr=0.1), **settings)


def loader():
    return data.DataLoader(SET, batch_size=20)


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (
            lambda: trainer().fit(loader(), epochs="2", verbose=False),
            "epochs is '2'; it must be an integer",
        ),
        (
            lambda: trainer().fit(loader(), max_steps="3", verbose=False),
            "steps is '3'; it must be an integer",
        ),
        (lambda: optim.SGD(lr="0.1"), "lr is '0.1'; it must be a number at least 0"),
        (
            lambda: trainer().fit(loader(), epochs=1.5, verbose=False),
            "epochs is 1.5; it must be an integer",
        ),
        (
            lambda: trainer().fit(loader(), callbacks=EarlyStopping("val_loss"), verbose=False),
            "give fit() a validation set, whose figures are test_loss",
        ),
        (
            lambda: trainer().fit(
                loader(), SET, callbacks=EarlyStopping("val_loss"), verbose=False
            ),
            "write 'test_loss', or choose from",
        ),
        (
            lambda: trainer(num_gpus=99, shard_size=8).fit(loader(), verbose=False),
            "num_gpus is 99, and a batch of 20 samples has 3 shards .* give at most 3",
        ),
        (
            lambda: trainer().fit(loader(), max_epochs=3),
            "unknown argument 'max_epochs'; use epochs=",
        ),
        (lambda: trainer(max_epochs=3), "unknown setting 'max_epochs'; give epochs= to fit()"),
        (lambda: trainer(learning_rate=3), "'learning_rate'; give lr= to the optimizer"),
        (lambda: trainer(steps=3), "unknown setting 'steps'; give it to fit()"),
        (lambda: optim.Adam(learning_rate=1), "[Adam] unknown argument 'learning_rate'; use lr="),
        (lambda: optim.AdamW(weight_decy=1), "[AdamW] .*; did you mean 'weight_decay'?"),
        (lambda: DistributedTrainer(nn.MLP(), "adam"), "optimizer is 'adam'; use optim.Adam()"),
        (lambda: DistributedTrainer(nn.MLP(), "best"), "optimizer is 'best'; give an object"),
        (lambda: DistributedTrainer(nn.MLP(), optim.Adam), "the class Adam; .* such as Adam(...)"),
        (lambda: DistributedTrainer("mlp", optim.Adam()), "use nn.models.build('mlp')"),
    ],
)
def test_slips_in_python(do, said):
    pattern = "".join(f"\\{letter}" if letter in "()[]?" else letter for letter in said)
    with pytest.raises(ConfigError, match=pattern):
        do()


def test_fit_within_fit_is_refused():
    made = trainer()
    again = LambdaCallback(on_step_end=lambda context: made.fit(loader(), verbose=False))
    with pytest.raises(
        ConfigError, match=r"fit\(\) is called while a fit\(\) of this trainer runs"
    ):
        made.fit(loader(), callbacks=again, verbose=False)
    assert made.fit(loader(), verbose=False).steps == 2


def test_what_pytorch_allows_is_allowed():
    made = DistributedTrainer(nn.Sequential(nn.Linear(6, 3)), optim.SGD(lr=0))
    before = made.weights_sha256()
    plateau = ReduceLROnPlateau("train_loss", patience=0, factor=0.5)
    made.fit(loader(), epochs=2.0, verbose=False)
    assert made.weights_sha256() == before
    second = trainer()
    second.fit(loader(), epochs=2, callbacks=plateau, verbose=False)
    assert second.optimizer.lr == 0.1  # the loss fell: no epoch was without a better figure


def test_a_pytorch_module_is_sent_to_its_trainer():
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(6, 3)
    with pytest.raises(
        ConfigError, match="model is PyTorch's .*; odyssey.torch.DistributedTrainer trains"
    ):
        DistributedTrainer(module, optim.SGD(lr=0.1))
    with pytest.raises(ConfigError, match="optimizer is PyTorch's"):
        DistributedTrainer(nn.MLP(), torch.optim.SGD(module.parameters(), lr=0.1))


def test_errors_are_built_in_ones_too():
    for kind, builtin in (
        (ConfigError, ValueError),
        (ShapeError, RuntimeError),
        (DataError, ValueError),
        (CollectiveError, RuntimeError),
    ):
        assert issubclass(kind, builtin)
    with pytest.raises(ValueError, match="lr is -1"):
        optim.SGD(lr=-1)


SCRIPT = """
import sys, time
import numpy as np
from odyssey import DistributedTrainer, data, nn, optim
from odyssey.callbacks import LambdaCallback
if sys.argv[1] == "slip":
    optim.SGD(lr=-1)
x = np.zeros((4000, 6), np.float32)
trainer = DistributedTrainer(nn.Sequential(nn.Linear(6, 3)), optim.SGD(lr=0.1))
wait = LambdaCallback(on_step_end=lambda context: (print("step", flush=True), time.sleep(0.05)))
trainer.fit(data.DataLoader(data.arrays(x, np.zeros(4000, int)), batch_size=4), callbacks=[wait], checkpoint_dir="kept")
"""


def test_exit_codes_of_programs_without_a_launcher(launch):
    (launch.folder / "script.py").write_text(SCRIPT)
    slip = launch.python("script.py", "slip")
    # with the place
    assert slip.returncode == 64 and "lr is -1" in slip.stderr and "script.py" in slip.stderr


def test_ctrl_c_is_one_line(launch):
    (launch.folder / "script.py").write_text(SCRIPT)
    job = subprocess.Popen(
        [sys.executable, "script.py", "go"],
        cwd=launch.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None and job.stdout.readline() == "step\n"
    time.sleep(0.2)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 75, err
    lines = [line for line in err.splitlines() if "stopped by" in line]
    assert (
        len(lines) == 1
        and lines[0].startswith("odyssey: [train] stopped by")
        and "Traceback" not in err
    )


def test_ctrl_c_where_nothing_is_saved_is_one_line(launch):
    (launch.folder / "script.py").write_text(SCRIPT.replace('"kept"', "None"))
    words = [sys.executable, "script.py", "go"]
    job = subprocess.Popen(
        words, cwd=launch.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert job.stdout is not None and job.stdout.readline() == "step\n"
    time.sleep(0.2)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=60)
    assert (job.returncode, err.splitlines()[-1]) == (
        130,
        "odyssey: interrupted",
    ) and "Traceback" not in err


RANKS = """
import os, sys
import numpy as np
kind = sys.argv[1]
rank = int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
if kind in ("ODYSSEY_BACKEND", "ODYSSEY_RUN_DIR") and rank == 1:
    os.environ[kind] = sys.argv[2]
from odyssey import DistributedTrainer, data, nn, optim
from odyssey.callbacks import LambdaCallback
trainer = DistributedTrainer(nn.Sequential(nn.Linear(6, 3)), optim.SGD(lr=0.1), shard_size=8)
loader = data.DataLoader(data.arrays(np.zeros((60, 6), np.float32), np.zeros(60, int)), 20)
def on_step_end(context):
    if (rank, trainer.steps) == (1, 2):
        if kind == "caught":
            raise ValueError("no such file")
        if kind == "fork" and (process := os.fork()):
            print("child", os.waitpid(process, 0)[1] >> 8)
try:
    trainer.fit(loader, callbacks=[LambdaCallback(on_step_end=on_step_end)], verbose=False)
except ValueError:
    trainer.fit(loader, verbose=False)
print("steps", trainer.steps)
"""


@pytest.mark.parametrize("name", ["ODYSSEY_BACKEND", "ODYSSEY_RUN_DIR"])
def test_a_variable_that_only_one_rank_has_is_named(launch, name):
    (launch.folder / "ranks.py").write_text(RANKS)
    value = "mpi" if name == "ODYSSEY_BACKEND" else str(launch.folder / "run")
    done = launch.python("ranks.py", name, value, ranks=2)
    line = f"[launch] {name} is set on rank 1, but not on rank 0; export the same value"
    assert done.returncode == 64 and done.stderr.count(line) == 1, done.stderr


def test_an_exception_that_one_rank_caught_is_named_when_its_calls_differ(launch):
    (launch.folder / "ranks.py").write_text(RANKS)
    done = launch.python("ranks.py", "caught", ranks=2)
    assert done.returncode == 76, done.stderr
    assert "(after ValueError: no such file, which left fit())" in done.stderr


def test_a_process_forked_from_a_rank_is_refused_and_the_ranks_continue(launch):
    (launch.folder / "ranks.py").write_text(RANKS)
    done = launch.python("ranks.py", "fork", ranks=2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "child 64", "steps 3", "steps 3"]
    assert "this process was forked from rank 1 and is no rank" in done.stderr
