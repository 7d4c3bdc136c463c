"""`odyssey verify`: the models of the command line on many layouts; scripts of one's own; what
it says when a layout differs or fails.
"""

from __future__ import annotations

import inspect
import json
import textwrap

import numpy as np
import pytest

from odyssey.audit import verify
from odyssey.errors import ConfigError
from odyssey.train.trainer import DistributedTrainer

HEAD = """
    import sys

    import numpy as np

    from odyssey import DistributedTrainer, data, device, functional as F, nn, optim
    from odyssey.nn import PipelineParallel, Stage

    nn.manual_seed(0)
    loader = data.DataLoader(data.load("mnist", train=True).take(300), batch_size=96, shuffle=True)
"""


def run(launch, *words, script=None, timeout=180):
    """Exit code, lines on standard output, standard error and the JSON of a verification."""
    out = launch.folder / "verify.json"
    if script is not None:
        path = launch.folder / "script.py"
        path.write_text(textwrap.dedent(HEAD) + textwrap.dedent(script))
        words = ("--script", path, *words)
    done = launch.python("-m", "odyssey", "verify", "--json", out, *words, timeout=timeout)
    found = json.loads(out.read_text()) if out.exists() else None
    return done.returncode, done.stdout.splitlines(), done.stderr, found


@pytest.mark.parametrize(
    "model,options,layouts",
    [
        pytest.param("lenet5", ("--global-batch-size", 200, "--steps", 2),
         ("dp=3", "dp=2,pp=2,zero=1", "dp=4,zero=3,bucket=0.01", "tp=2,dp=2", "dp=2,workers=2,accumulation=2",
          "execution=eager"), marks=pytest.mark.long),
        ("mlp", ("--global-batch-size", 96, "--steps", 2, "--optimizer", "adam", "--clip-norm", 0.5),
         ("dp=3,zero=2,bucket=0.5,overlap=0", "pp=2,schedule=interleaved")),
        ("convnet", ("--global-batch-size", 64, "--shard-size", 16, "--steps", 2), ("dp=2", "pp=2")),
    ],
)  # fmt: skip
def test_the_models_of_the_command_line(launch, model, options, layouts):
    code, lines, errors, found = run(launch, "--layouts", *layouts, "--model", model, *options)
    assert code == 0, "\n".join(lines) + errors
    assert lines[-1] == f"{len(layouts)} of {len(layouts)} layouts give the bits of one process"
    assert [r["layout"] for r in found["results"]] == list(layouts)
    values = {r["values"] for r in found["results"]}
    # weights, what the optimizer keeps, losses
    assert len(values) == 1 and values.pop() > 2 * 61_706
    assert all(r["same"] and r["steps"] == 2 and r["difference"] is None for r in found["results"])
    assert [r["ranks"] for r in found["results"]] == [
        verify.ranks(verify.parse(text)) for text in layouts
    ]


def test_scripts_of_ones_own(launch):
    """Two trainers, one of a model that is placed by hand, one with dropout and a last batch of
    12 samples.
    """
    code, lines, errors, found = run(
        launch,
        "--layouts", "dp=2,zero=3", "pp=2", "accumulation=3",
        script="""
        class Placed(nn.Module):
            def __init__(self):
                super().__init__()
                self.a = nn.Linear(784, 24) @ device(0)
                self.b = nn.Linear(24, 10) @ device(1)

            def forward(self, x):
                return self.b(F.relu(self.a(F.flatten(x))).to(1))

        DistributedTrainer(Placed(), optim.SGD(lr=0.1, momentum=0.9)).fit(loader, epochs=2)
        dropping = nn.Sequential(nn.Flatten(), nn.Linear(784, 24), nn.Dropout(0.3), nn.Tanh(), nn.Linear(24, 10))
        trainer = DistributedTrainer(dropping, optim.Adam(lr=1e-3), shard_size=8)
        trainer.fit(loader, loader, epochs=2)
        """,
    )  # fmt: skip
    assert code == 0, "\n".join(lines) + errors
    assert [r["steps"] for r in found["results"]] == [10, 10, 10]  # five of each trainer


def test_a_difference_is_named(launch):
    """With two ranks one weight starts elsewhere; three ranks fail; one rank of another layout
    does not.
    """
    code, lines, errors, found = run(
        launch,
        "--layouts", "dp=2", "dp=3", "zero=1", "--steps", 3,
        script="""
        from odyssey import comm

        model = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.Linear(16, 10))
        for name, p in model.named_parameters():
            if name == "2.weight":
                p.data[...] = 0.25
        trainer = DistributedTrainer(model, optim.SGD(lr=1e-30))
        for step, batch in enumerate(loader):
            if comm.world().size == 2 and step == 1:
                model[2].weight.data[3, 5] = 0.5
            if comm.world().size == 3:
                raise SystemExit("error: three are a crowd")
            trainer.train_step(batch)
        """,
    )  # fmt: skip
    assert code == 1, "\n".join(lines) + errors
    two, three, zero = found["results"]
    assert two["difference"]["step"] == 2 and two["difference"]["tensor"] == "weight 2.weight"
    assert two["difference"]["element"] == [3, 5] and two["difference"]["differing"] == 1
    assert (two["difference"]["expected"], two["difference"]["found"]) == (0.25, 0.5) and two[
        "steps"
    ] == 1
    assert lines[0] == (
        "dp=2    2 ranks  DIFFERS  step 2: weight 2.weight[3, 5] is 0.5 instead of 0.25 (1 "
        "element differs)"
    )
    assert "three are a crowd" in three["error"] and lines[1].startswith("dp=3    3 ranks  FAILED")
    assert zero["same"] and lines[-1] == "1 of 3 layouts give the bits of one process"
    assert not two["same"] and not three["same"]


@pytest.mark.parametrize(
    "words,message",
    [
        (
            ("--layouts", "dp=2,zoro=1"),
            "'zoro=1' in layout 'dp=2,zoro=1'; write key=value with dp, pp, tp, zero",
        ),
        (("--layouts", "dp=two"), "dp must be a number"),
        (("--layouts", "dp=2,dp=3"), "dp is given twice"),
        (("--layouts", "dp=0"), "0 x 1 x 1; each must be at least 1"),
        (("--layouts", "dp=2", "--steps", 0), "--steps is 0"),
        (("--layouts", "dp=2", "--launcher", "mpirun"), "has no {ranks}"),
        (("--layouts", "dp=2", "--script", "none.py"), "the run on one process failed: "),
    ],
)
def test_what_cannot_be_verified_is_refused(launch, words, message):
    code, lines, errors, found = run(launch, *words)
    assert code == 64 and message in errors and not lines and found is None


def test_a_launcher_that_is_not_there(launch):
    words = ("--layouts", "dp=2", "--steps", 1, "--launcher", "/no/mpirun -n {ranks}")
    done = launch.python("-m", "odyssey", "verify", *words)
    assert done.returncode == 1
    assert (
        "FAILED  /no/mpirun cannot be started: No such file or directory; `odyssey doctor` says"
        in done.stdout
    )


def test_a_script_that_keeps_checkpoints_and_logs(launch):
    script = """
        from odyssey.loggers import JSONLLogger
        trainer = DistributedTrainer(nn.MLP(), optim.SGD(lr=0.1), shard_size=16)
        trainer.fit(loader, epochs=1, checkpoint_dir="mine", checkpoint_every=1, callbacks=[JSONLLogger("mine.jsonl")])
    """
    for _ in range(2):  # a second one finds nothing of the first
        code, lines, errors, _ = run(launch, "--layouts", "dp=2", "--steps", 2, script=script)
        assert code == 0 and lines[-1] == "1 of 1 layouts give the bits of one process", errors
        assert sorted(path.name for path in launch.folder.iterdir()) == ["script.py", "verify.json"]
    done = launch.python("script.py")
    assert done.returncode == 0 and (launch.folder / "mine").is_dir(), done.stderr
    again = script.replace("checkpoint_every=1", "resume='mine'").replace(
        'checkpoint_dir="mine", ', 'checkpoint_dir="other", '
    )
    code, _, errors, _ = run(launch, "--layouts", "dp=2", "--steps", 2, script=again)
    assert code == 64 and "it goes on from a checkpoint that is complete already" in errors


def test_scripts_that_cannot_be_compared(launch):
    code, _, errors, _ = run(launch, "--layouts", "dp=2", script="print('no trainer')")
    assert code == 64 and "took no step with a DistributedTrainer" in errors
    code, lines, errors, _ = run(
        launch,
        "--layouts", "dp=2",
        script="""
        from odyssey import comm

        batches = [(np.ones((64, 784), np.float32), np.arange(64) % 10)] * (5 - comm.world().size)
        DistributedTrainer(nn.Linear(784, 10), optim.SGD()).fit(batches)
        """,
    )  # fmt: skip
    assert code == 1, lines + [errors]
    assert "this layout ended before step 4; the other went on" in lines[0]


# --- without processes ----------------------------------------------------------------------------


def test_every_key_is_a_setting_of_the_trainer():
    names = set(inspect.signature(DistributedTrainer.__init__).parameters)
    assert {name for name, _ in verify.KEYS.values()} - {"dp", "pp", "tp"} <= names


def test_layouts_are_read():
    assert verify.parse("pp=2, dp=2,zero=1") == {"pp": 2, "dp": 2, "zero": 1}
    assert verify.parse("bucket=0.5,schedule=gpipe,workers=2") == {
        "bucket_size_mb": 0.5, "pipeline_schedule": "gpipe", "num_gpus": 2
    }  # fmt: skip
    assert verify.parse("") == {} and verify.ranks({}) == 1
    assert verify.ranks(verify.parse("dp=2,pp=3,tp=2,zero=1")) == 12


def test_bits_are_compared_not_numbers(tmp_path):
    """-0 and 0 differ, a NaN is the same as itself and differs from another."""
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()

    def write(folder, step, **arrays):
        np.savez(verify.step_file(folder, 0, step), **arrays)

    x = np.array([[1.0, np.nan, 0.0]], np.float32)
    for folder in folders:
        write(folder, 1, w=x)
    assert verify.compare(*folders, 5) == (None, 1, 3)
    y = x.copy()
    y[0, 2] = -0.0
    write(folders[0], 2, w=x)
    write(folders[1], 2, w=y)
    found, steps, values = verify.compare(*folders, 5)
    assert (found.step, found.tensor, found.element, found.differing) == (2, "w", (0, 2), 1) and (
        steps,
        values,
    ) == (
        1,
        3,
    )
    assert str(found) == "step 2: w[0, 2] is -0.0 instead of 0.0 (1 element differs)"
    y = x.copy()
    y.view(np.uint32)[0, 1] += 1
    write(folders[1], 2, w=y)
    assert verify.compare(*folders, 5)[0].element == (0, 1)
    write(folders[1], 2, w=x.astype(np.float64))
    with pytest.raises(ConfigError, match="float64 instead of"):
        verify.compare(*folders, 5)
    write(folders[1], 2, v=x)
    with pytest.raises(ConfigError, match="other tensors: "):
        verify.compare(*folders, 5)


def test_accumulation_of_ones_own_stays_out_of_layouts(tmp_path, monkeypatch):
    monkeypatch.setenv(verify.TRACE, f"{tmp_path}:2")
    monkeypatch.setenv(verify.LAYOUT, "accumulation=2")
    from odyssey import nn, optim

    with pytest.raises(ConfigError, match="the training accumulates 3 batches itself"):
        DistributedTrainer(nn.Linear(4, 2), optim.SGD(), accumulation_steps=3)
    monkeypatch.setenv(verify.TRACE, "nowhere")
    with pytest.raises(ConfigError, match="it must be DIRECTORY:STEPS"):
        DistributedTrainer(nn.Linear(4, 2), optim.SGD())
