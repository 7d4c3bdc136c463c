"""Stopped at any step and gone on with, on other layouts too, a training has the bytes of an
undisturbed one.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from odyssey import data, nn, optim
from odyssey.checkpoints import Store, reader
from odyssey.errors import CheckpointError, ConfigError, Stopped
from odyssey.train.resume import PROBES
from odyssey.train.trainer import DistributedTrainer

RECIPE = (
    "--model",
    "mlp",
    "--global-batch-size",
    96,
    "--shard-size",
    16,
    "--no-eval",
    "--no-progress",
    "--seed",
    3,
)


# --- in this process -----------------------------------------------------------------------------


def dataset(n: int = 150, seed: int = 5) -> data.ArrayDataset:
    draw = np.random.default_rng(seed)
    return data.arrays(draw.normal(size=(n, 1, 6, 6)).astype(np.float32), draw.integers(0, 4, n))


def trainer(
    seed: int = 0, lr: float = 0.05, optimizer: type = optim.Adam, **settings
) -> DistributedTrainer:
    layers = nn.Sequential(
        nn.Flatten(), nn.Linear(36, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, 4)
    )
    draw = np.random.default_rng(seed)
    for p in layers.parameters():
        p.data[...] = draw.normal(size=p.shape).astype(np.float32) * 0.3
    return DistributedTrainer(layers, optimizer(lr=lr), shard_size=8, **settings)


def loader() -> data.DataLoader:
    return data.DataLoader(dataset(), batch_size=32, shuffle=True, seed=7)


def convolutional(dilation: int = 1, slope: float = 0.1, **loss) -> DistributedTrainer:
    layers = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=dilation, dilation=dilation),
        nn.LeakyReLU(slope),
        nn.Flatten(),
        nn.Linear(144, 4),
    )
    return DistributedTrainer(
        layers, optim.SGD(lr=0.05), loss=nn.CrossEntropyLoss(**loss), shard_size=8
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {"dilation": 2},
            r'\["Conv2d", "dilation", 1\], this training has \["Conv2d", "dilation", 2\]',
        ),
        ({"slope": 0.2}, r'"negative_slope", 0.1\], this training'),
        ({"label_smoothing": 0.1}, r'"label_smoothing", 0.0\], this training'),
        (
            {"weight": np.ones(4, np.float32)},
            r'\["CrossEntropyLoss", "weight", null\], this training',
        ),
    ],
)
def test_layers_and_a_loss_of_other_settings_are_refused(other, said):
    snapshot = convolutional().state({})
    convolutional().load(snapshot, "step_0")
    with pytest.raises(ConfigError, match=said):
        convolutional(**other).load(snapshot, "step_0")
    older = {
        k: v for k, v in snapshot.values["configuration"].items() if not k.startswith("settings of")
    }
    values = {**snapshot.values, "configuration": older}
    del values["captured"]
    convolutional(**other).load(dataclasses.replace(snapshot, values=values), "old")


def test_a_checkpoint_of_other_kernels_is_resumed_and_said(capsys):
    before = trainer()
    before.fit(loader(), epochs=1)
    snapshot = before.state({})
    for made_with, said in ((snapshot.values["kernels"], 0), (1, 1)):
        after = trainer()
        after.feed.configuration = before.feed.configuration
        after.load(
            dataclasses.replace(snapshot, values={**snapshot.values, "kernels": made_with}),
            "step_5",
        )
        assert after.weights_sha256() == before.weights_sha256()
        assert (
            "".join(capsys.readouterr()).count("[resume] step_5 was made with kernels 1, these are")
            == said
        )


class Interrupted(Exception):
    pass


def interrupt(t: DistributedTrainer, step: int) -> None:
    """As if the process died after a step: nothing is saved at the end."""
    take = t.train_step

    def train_step(batch):
        result = take(batch)
        if t.steps == step:
            raise Interrupted
        return result

    t.train_step = train_step


def records(history) -> list[dict]:
    """What does not depend on the clock."""
    return [
        {k: r[k] for k in ("epoch", "train_loss", "train_accuracy", "test_loss")}
        for r in history.records
    ]


@pytest.fixture(scope="module")
def undisturbed():
    t = trainer()
    history = t.fit(loader(), dataset(40), epochs=3)
    return t.weights_sha256(), records(history), history.steps, history.samples


@pytest.mark.parametrize("dies", [1, 4, 5, 6, 11, 14])
@pytest.mark.parametrize("every", [1, 2, None])
def test_goes_on_as_if_it_had_not_died(tmp_path, undisturbed, dies, every):
    first = trainer()
    interrupt(first, dies)
    with pytest.raises(Interrupted):
        first.fit(
            loader(), dataset(40), epochs=3, checkpoint_dir=tmp_path / "c", checkpoint_every=every
        )
    saved = dies - 1 >= (every or 5)
    second = trainer(seed=int(saved))  # with a checkpoint its own start must not matter
    history = second.fit(
        loader(), dataset(40), epochs=3, checkpoint_dir=tmp_path / "c", checkpoint_every=every
    )
    assert (
        second.weights_sha256(),
        records(history),
        history.steps,
        history.samples,
    ) == undisturbed


def test_more_steps_go_on_within_the_epoch(tmp_path, undisturbed):
    short = trainer().fit(loader(), dataset(40), epochs=3, steps=7, checkpoint_dir=tmp_path)
    again = trainer(seed=1)
    assert records(
        again.fit(loader(), dataset(40), epochs=3, steps=7, checkpoint_dir=tmp_path)
    ) == records(short)
    assert again.steps == 7
    whole = trainer(seed=1)
    history = whole.fit(loader(), dataset(40), epochs=3, checkpoint_dir=tmp_path)
    assert (whole.weights_sha256(), records(history), history.steps, history.samples) == undisturbed


def test_a_complete_training_gives_its_history_again(tmp_path, undisturbed):
    trainer().fit(loader(), dataset(40), epochs=3, checkpoint_dir=tmp_path)
    again = trainer(seed=1)
    assert (
        records(again.fit(loader(), dataset(40), epochs=3, checkpoint_dir=tmp_path))
        == undisturbed[1]
    )
    assert again.weights_sha256() == undisturbed[0]


def test_the_manifest_does_not_grow_with_the_epochs(tmp_path, undisturbed):
    """The last record is in it, those before lie beside it; checkpoints that have all of them
    there are read.
    """
    trainer().fit(loader(), dataset(40), epochs=3, checkpoint_dir=tmp_path / "new", keep=3)
    snapshots = [reader.load(path)[0] for path in sorted((tmp_path / "new").glob("step_*"))]
    assert [len(one.values["history"]["records"]) for one in snapshots] == [1, 1, 1]
    before = json.loads(snapshots[-1].arrays.pop("history")["records"].tobytes())
    assert [record["epoch"] for record in before] == [1, 2]
    snapshots[-1].values["history"]["records"][:0] = before
    with Store(tmp_path / "old") as store:
        store.save(snapshots[-1])
    for form in ("new", "old"):
        again = trainer(seed=1)
        assert (
            records(again.fit(loader(), dataset(40), epochs=3, checkpoint_dir=tmp_path / form))
            == undisturbed[1]
        )


def test_other_layouts_of_one_process(tmp_path, undisturbed):
    for steps, layout in (
        (3, {"num_gpus": 2}),
        (8, {"execution": "eager"}),
        (13, {"num_gpus": 4, "threads": 2}),
    ):
        t = trainer(seed=steps if steps > 3 else 0, **layout)
        t.fit(loader(), dataset(40), epochs=3, steps=steps, checkpoint_dir=tmp_path)
    t = trainer(seed=1)
    t.fit(loader(), dataset(40), epochs=3, checkpoint_dir=tmp_path)
    assert t.weights_sha256() == undisturbed[0]


def test_a_signal_stops_after_a_step_with_a_checkpoint(tmp_path, undisturbed):
    t = trainer()
    take = t.train_step

    def train_step(batch):
        if t.steps == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return take(batch)

    t.train_step = train_step
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match="SIGTERM after step"):
        # agreed at the end of an epoch at the latest
        t.fit(loader(), dataset(40), epochs=3, checkpoint_dir=tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before
    assert 8 <= t.steps <= 10
    rest = trainer(seed=1)
    history = rest.fit(loader(), dataset(40), epochs=3, checkpoint_dir=tmp_path)
    assert (rest.weights_sha256(), records(history), history.steps, history.samples) == undisturbed


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"lr": 0.06}, "optimizer"),
        ({"precision": "bf16"}, "precision"),
        ({"optimizer": optim.SGD}, "optimizer"),
        ({"clip_norm": 1.0}, "clip norm"),
        ({"schedule": optim.step_decay(PROBES[2])}, "schedule"),
    ],
)
def test_another_training_is_refused_by_name(tmp_path, change, named):
    trainer().fit(loader(), epochs=1, checkpoint_dir=tmp_path)
    with pytest.raises(ConfigError, match=named):
        trainer(**change).fit(loader(), epochs=2, checkpoint_dir=tmp_path)


def test_never_refuses_a_directory_in_use(tmp_path):
    trainer().fit(loader(), epochs=1, checkpoint_dir=tmp_path, resume="never")
    with pytest.raises(ConfigError, match="never"):
        trainer().fit(loader(), epochs=1, checkpoint_dir=tmp_path, resume="never")


def test_a_path_to_resume_from_must_be_valid(tmp_path):
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        trainer().fit(loader(), epochs=1, checkpoint_dir=tmp_path / "a", resume=tmp_path / "b")


def test_a_loop_of_ones_own(tmp_path):
    batches = list(loader())
    whole, first, second = trainer(), trainer(), trainer(seed=2, num_gpus=2)
    for b in batches:
        whole.train_step(b)
    for b in batches[:2]:
        first.train_step(b)
    first.save_checkpoint(tmp_path)
    assert second.load_checkpoint(tmp_path) == 2
    for b in batches[2:]:
        second.train_step(b)
    assert second.weights_sha256() == whole.weights_sha256()


# --- on ranks ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(launch_once):
    return launch_once.result(*RECIPE, "--steps", 24)


@pytest.mark.parametrize("optimizer", [pytest.param("sgd", marks=pytest.mark.long), "adam"])
def test_on_other_ranks_meshes_and_stages(launch, optimizer):
    """Each stretch of a training on another layout."""
    common = (*RECIPE, "--optimizer", optimizer, "--schedule", "constant", "--warmup-steps", 0)
    expected = launch.result(*common, "--steps", 24)
    stretches = [
        (5, 4, ()),
        (9, 3, ("--zero", 2)),
        (13, 1, ("--num-gpus", 2)),
        (17, 2, ("--pp", 2)),
        (20, 2, ("--zero", 3)),
        (22, 2, ("--tp", 2)),
        (24, 4, ("--pp", 2)),
    ]
    for steps, ranks, layout in stretches:
        result = launch.result(
            *common,
            "--steps",
            steps,
            *layout,
            "--checkpoint-dir",
            launch.folder / "c",
            ranks=ranks,
            timeout=120,
        )
    assert result["weights_sha256"] == expected["weights_sha256"]
    assert result["train_loss"] == expected["train_loss"]


@pytest.mark.parametrize(
    "settings", [("--precision", "fp16"), ("--compression", "topk", "--compression-ratio", 0.1)]
)
def test_what_else_a_training_remembers(launch, settings):
    """Loss scale; what a compression still has to send."""
    common = (*RECIPE, *settings, "--schedule", "constant", "--warmup-steps", 0)
    common += ("--scaler-init-scale", 2**40) if "fp16" in settings else ()
    expected = launch.result(*common, "--steps", 12, ranks=2)
    for steps in (5, 12):
        result = launch.result(
            *common, "--steps", steps, "--checkpoint-dir", launch.folder / "c", ranks=2
        )
    assert result["weights_sha256"] == expected["weights_sha256"]
    if "topk" in settings:
        other = launch.train(
            *common, "--steps", 14, "--checkpoint-dir", launch.folder / "c", ranks=3
        )
        assert other.returncode != 0
        assert "2 ranks with compression" in other.stderr


def test_a_signal_to_the_launcher_stops_all_ranks(launch, plain):
    """Open MPI ends ranks at SIGTERM, but hands SIGUSR1 on."""
    folder = launch.folder / "c"
    command = [launch.mpirun, *(["--oversubscribe"] if launch.open_mpi else []), "-n", "3"]
    command += [sys.executable, "-m", "odyssey.train", *map(str, RECIPE), "--steps", "24"]
    command += ["--checkpoint-dir", str(folder), "--checkpoint-every", "1", "--epochs", "1000"]
    command[command.index("24")] = "200000"
    running = subprocess.Popen(
        command, env=launch.environment, cwd=launch.folder, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not list(folder.glob("step_*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        running.send_signal(signal.SIGUSR1)
        _, said = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 75, said
    assert said.count("stopped by SIGUSR1 after step") == 1
    newest = sorted(folder.glob("step_*"))[-1]
    assert f"checkpoint {newest.name} is written" in said
    assert json.loads((newest / "manifest.json").read_text())


def test_a_configuration_under_other_names(tmp_path):
    from odyssey.distributed.config import DistributedConfig

    config = DistributedConfig(
        checkpoint_dir=tmp_path, checkpoint_frequency=2, epochs=3, resume_from_checkpoint=False
    )
    first = trainer()
    interrupt(first, 14)  # in the third epoch of five steps
    with pytest.raises(Interrupted):
        first.fit(loader(), **config.fit_options())
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_00000010"]
    with pytest.raises(ConfigError, match="resume is 'never'"):
        trainer().fit(loader(), **config.fit_options())
    config.resume_from_checkpoint = str(tmp_path / "step_00000010")
    assert trainer().fit(loader(), **config.fit_options()).steps == 15


def test_from_a_path_to_another_directory_and_on_from_there(tmp_path, undisturbed):
    here, there = tmp_path / "here", tmp_path / "there"
    trainer().fit(loader(), dataset(40), epochs=3, steps=9, checkpoint_dir=here, checkpoint_every=3)
    settings = {"checkpoint_dir": there, "checkpoint_every": 2, "resume": here / "step_00000006"}
    first = trainer(seed=1)
    interrupt(first, 12)
    with pytest.raises(Interrupted):
        first.fit(loader(), dataset(40), epochs=3, **settings)
    second = trainer(seed=2)
    interrupt(second, 11)  # it begins with step 11: after step 10, not 6
    with pytest.raises(Interrupted):
        second.fit(loader(), dataset(40), epochs=3, **settings)
    assert second.steps == 11
    last = trainer(seed=3)
    history = last.fit(loader(), dataset(40), epochs=3, **settings)
    assert (last.weights_sha256(), records(history), history.steps, history.samples) == undisturbed


def test_an_older_checkpoint_of_the_same_directory_is_not_gone_on_from(tmp_path):
    trainer().fit(loader(), epochs=1, checkpoint_dir=tmp_path, checkpoint_every=2)
    with pytest.raises(ConfigError, match="use another directory for the new ones"):
        trainer().fit(
            loader(), epochs=1, checkpoint_dir=tmp_path, resume=tmp_path / "step_00000004"
        )


def test_signed_checkpoints(tmp_path, monkeypatch, capfd):
    """With a key, checkpoints are signed, and those that are not are refused."""
    key = tmp_path / "key"
    key.write_text("0123456789abcdef")
    key.chmod(0o600)
    trainer().fit(loader(), epochs=1, checkpoint_dir=tmp_path / "c")
    monkeypatch.setenv("ODYSSEY_CHECKPOINT_KEY_FILE", str(key))
    second = trainer()
    second.fit(loader(), epochs=1, checkpoint_dir=tmp_path / "c")
    assert "step_00000005 is refused" in capfd.readouterr().err
    third = trainer()
    third.fit(loader(), epochs=2, checkpoint_dir=tmp_path / "c")
    assert "resumed from step_00000005" in capfd.readouterr().err


@pytest.mark.parametrize("dies", [2, 3, 4, 5])
def test_with_accumulation(tmp_path, dies):
    """Five batches in groups of two: the last group of an epoch is one batch."""
    expected = trainer(accumulation_steps=2).fit(loader(), epochs=2)
    first = trainer(accumulation_steps=2)
    interrupt(first, dies)
    with pytest.raises(Interrupted):
        first.fit(loader(), epochs=2, checkpoint_dir=tmp_path, checkpoint_every=1)
    second = trainer(seed=1, accumulation_steps=2)
    assert records(second.fit(loader(), epochs=2, checkpoint_dir=tmp_path)) == records(expected)


def test_a_failed_save_before_the_last_loses_nothing(tmp_path, monkeypatch, capfd):
    from odyssey.checkpoints import Store
    from odyssey.errors import OutputError

    write, calls = Store._write_checkpoint, []

    def fails_once(self, *arguments):
        calls.append(1)
        if len(calls) == 1:
            raise OutputError("[checkpoint] no space")
        return write(self, *arguments)

    monkeypatch.setattr(Store, "_write_checkpoint", fails_once)
    trainer().fit(loader(), epochs=2, checkpoint_dir=tmp_path, checkpoint_every=5)
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_00000010"]
    assert "no space; training goes on" in capfd.readouterr().err


def test_a_failed_save_of_the_last_step_is_made_again(tmp_path, monkeypatch):
    from odyssey.checkpoints import Store
    from odyssey.errors import OutputError

    write, calls = Store._write_checkpoint, []

    def fails_once(self, snapshot, *arguments):
        calls.append(snapshot.step)
        if calls == [5]:
            raise OutputError("[checkpoint] no space")
        return write(self, snapshot, *arguments)

    monkeypatch.setattr(Store, "_write_checkpoint", fails_once)
    trainer().fit(loader(), epochs=1, checkpoint_dir=tmp_path, checkpoint_every=5)
    assert calls == [5, 5]
    assert [p.name for p in tmp_path.glob("step_*")] == ["step_00000005"]


def test_batches_of_ones_own(tmp_path, undisturbed):
    """A list of arrays instead of a DataLoader."""
    batches = [tuple(b) for b in loader()]
    expected = trainer()
    expected.fit(batches, epochs=3)
    first = trainer()
    interrupt(first, 8)
    with pytest.raises(Interrupted):
        first.fit(batches, epochs=3, checkpoint_dir=tmp_path, checkpoint_every=1)
    second = trainer(seed=1)
    second.fit(batches, epochs=3, checkpoint_dir=tmp_path)
    assert second.weights_sha256() == expected.weights_sha256()


def test_two_fits_of_a_run_go_on_where_they_were(tmp_path, monkeypatch):
    """The second begins where the first left the loader, also where the first only finds its own
    end.
    """
    from odyssey.train import completion, session

    def both(t: DistributedTrainer, dies: int | None = None) -> str:
        monkeypatch.setattr(session, "_fits", 0)
        if dies is not None:
            interrupt(t, dies)
        data_loader = loader()
        t.fit(data_loader, epochs=1, steps=3, checkpoint_every=1)
        t.fit(data_loader, epochs=2, checkpoint_every=1)
        return t.weights_sha256()

    monkeypatch.setenv("ODYSSEY_RUN_DIR", str(tmp_path / "a"))
    expected = both(trainer())
    monkeypatch.setenv("ODYSSEY_RUN_DIR", str(tmp_path / "b"))
    with pytest.raises(Interrupted):
        both(trainer(), dies=6)
    assert both(trainer(seed=1)) == expected
    assert not (tmp_path / "b" / "DONE.json").exists()  # the program has not ended
    completion.incomplete()


def test_a_second_fit_needs_a_directory_of_its_own(tmp_path):
    t = trainer()
    t.fit(loader(), epochs=1, checkpoint_dir=tmp_path)
    with pytest.raises(ConfigError, match="name another checkpoint_dir"):
        t.fit(loader(), epochs=1, checkpoint_dir=tmp_path)


def test_other_data_is_another_training(tmp_path):
    trainer().fit(loader(), epochs=1, checkpoint_dir=tmp_path)
    other = data.DataLoader(dataset(seed=6), batch_size=32, shuffle=True, seed=7)
    with pytest.raises(ConfigError, match="data set"):
        trainer().fit(other, epochs=2, checkpoint_dir=tmp_path)


def test_a_schedule_made_of_a_table(tmp_path):
    table = [1.0, 0.5, 0.25, 0.5, 1.0]
    t = trainer(schedule=lambda step: np.float32(table[step]))
    t.fit(loader(), epochs=1, checkpoint_dir=tmp_path)
    assert (
        trainer(schedule=lambda step: np.float32(table[step]))
        .fit(loader(), epochs=1, checkpoint_dir=tmp_path)
        .steps
        == 5
    )


STRATEGIES = """
import sys
from odyssey import comm, data, nn, optim
from odyssey.train.trainer import DistributedTrainer
import numpy as np

draw = np.random.default_rng(5)
x, y = draw.normal(size=(150, 36)).astype(np.float32), draw.integers(0, 4, 150)
loader = data.DataLoader(data.arrays(x, y), batch_size=32)
from odyssey import manual_seed
manual_seed(0)
trainer = DistributedTrainer(nn.Sequential(nn.Linear(36, 4)), optim.SGD(lr=0.05), shard_size=8, **eval(sys.argv[1]))
history = trainer.fit(loader, epochs=3, steps=int(sys.argv[2]), **eval(sys.argv[3]))
if trainer.comm.rank == 0:
    print("result", trainer.weights_sha256(), history.steps, history.train_loss)
else:
    trainer.weights_sha256()
"""


def test_local_sgd_goes_on_from_its_averages(launch):
    script = launch.folder / "s.py"
    script.write_text(
        STRATEGIES.replace("eval(sys.argv", "__import__('ast').literal_eval(sys.argv")
    )
    settings = "{'reduction': 'local_sgd', 'local_steps': 3}"

    def run(steps: int, saving: str) -> list[str]:
        done = launch.python(script, settings, steps, saving, ranks=2)
        assert done.returncode == 0, done.stderr
        return next(line for line in done.stdout.splitlines() if line.startswith("result")).split()

    expected = run(12, "{}")
    saving = f"{{'checkpoint_dir': {str(launch.folder / 'c')!r}, 'checkpoint_every': 2}}"
    run(8, saving)  # three steps into the second epoch: an average
    assert run(12, saving) == expected


def test_a_stage_without_parameters_takes_part_in_the_comparison(launch):
    script = launch.folder / "s.py"
    text = STRATEGIES.replace("eval(sys.argv", "__import__('ast').literal_eval(sys.argv")
    text = text.replace(
        "nn.Sequential(nn.Linear(36, 4))",
        "nn.Sequential(nn.Linear(36, 8), nn.Linear(8, 4), nn.Tanh())",
    )
    text = text.replace(
        "shard_size=8,", "shard_size=8, mesh=__import__('odyssey').Mesh(pp=4), check_every=2,"
    )
    script.write_text(text)
    done = launch.python(script, "{}", 5, "{}", ranks=4)
    assert done.returncode == 0, done.stderr
