"""`odyssey train`: from the command line and the configuration file to the calls of the library."""

from __future__ import annotations

import json
import os
import sys

import pytest

from odyssey.base import launcher, runs
from odyssey.cli.commands import train
from odyssey.settings.declarations import SECTIONS, Settings, declared
from odyssey.settings.recipes import OPTIMIZERS, RECIPES, SCHEDULES


def test_defaults_are_the_recipe(odyssey_command, fake):
    done = odyssey_command("train", "--no-progress")
    assert (done.code, done.err) == (0, "")
    recipe = RECIPES["lenet5"]
    assert fake.calls["SGD"][1] == {
        "lr": recipe["lr"],
        "momentum": recipe["momentum"],
        "nesterov": False,
        "weight_decay": recipe["weight_decay"],
    }
    assert fake.calls["fit"]["epochs"] == recipe["epochs"]
    assert fake.calls["fit"]["steps"] is None
    assert fake.calls["schedule"] == (
        (recipe["schedule"],),
        {"total_steps": 469 * recipe["epochs"], "warmup_steps": recipe["warmup_steps"]},
    )
    assert fake.calls["model"] == (
        ("lenet5",),
        {"sample_shape": (1, 28, 28), "classes": 10, "seed": 0},
    )
    made = fake.calls["trainer"]
    assert (made["shard_size"], made["threads"], made["num_gpus"], made["device"]) == (
        None,
        None,
        None,
        "auto",
    )
    assert (made["reduction"], made["execution"], made["progress"]) == ("tree", "replay", None)
    assert made["comm"] is fake.world


def test_summary_fits_on_a_terminal(odyssey_command):
    """The hash has its own line, because 80 columns cut it off behind the numbers."""
    lines = odyssey_command("train", "--no-progress").out.splitlines()
    assert lines == [
        "test accuracy 99.05 %  train loss 0.0123  3752 steps  61,234 samples/s  7.7 s",
        "weights 3f2a3f2a3f2a3f2a",
    ]
    assert max(map(len, lines)) <= 80


def test_no_eval_loads_no_test_set(odyssey_command, fake):
    done = odyssey_command("train", "--no-eval", "--no-progress")
    assert fake.calls["fit"]["validation"] is None
    assert done.out.startswith("train loss")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["val_loss"],
            "names 'val_loss'; choose from test_loss, test_accuracy, train_loss, train_accuracy",
        ),
        (["test_loss", "--no-eval"], "names 'test_loss'; choose from train_loss, train_accuracy"),
        (
            ["test_accuracy", "--metrics", "top2, mae"],
            "choose from test_loss, test_top2, test_mae, train_loss",
        ),
        (
            ["test_loss:soon"],
            "is 'test_loss:soon'; give FIGURE[:PATIENCE[:MIN_DELTA]], such as test_loss:3:0.01",
        ),
        (["test_loss:3:0.1:min"], "is 'test_loss:3:0.1:min'; give FIGURE"),
        (["test_loss:-1"], "[EarlyStopping] patience is -1; it must be"),
        (["test_loss:2:nan"], "[EarlyStopping] min_delta is nan; it must be"),
    ],
)
def test_early_stopping_by_a_figure_that_is_there(odyssey_command, fake, tmp_path, words, says):
    done = odyssey_command("train", "--no-progress", "--early-stopping", *words)
    assert (
        done.code == 64
        and says in done.err
        and done.err.count("\n") == 1
        and "fit" not in fake.calls
    )


def test_early_stopping_reaches_fit_and_keeps_the_best_where_there_are_checkpoints(
    odyssey_command, fake, tmp_path
):
    file = tmp_path / "run.toml"
    file.write_text('early-stopping = "test_accuracy: 5 :0.01"\n')
    odyssey_command("train", "--no-progress", "--config", str(file))
    (early,) = fake.calls["saving"]["callbacks"]
    assert (early.monitor, early.patience, early.min_delta, early.mode) == (
        "test_accuracy",
        5,
        0.01,
        "max",
    )
    odyssey_command(
        "train",
        "--no-progress",
        "--early-stopping",
        "train_loss",
        "--checkpoint-dir",
        str(tmp_path / "c"),
    )
    early, best = fake.calls["saving"]["callbacks"]
    assert (early.patience, early.mode, best.monitor, best.mode) == (3, "min", "train_loss", "min")


def test_options_reach_the_trainer(odyssey_command, fake):
    done = odyssey_command(
        *"train --model mlp --num-gpus 2 --threads 3 --reduction mpi --execution eager --device cpu "
        "--shard-size 16".split(),
        *"--seed 7 --optimizer adamw --lr 0.002 --schedule constant --warmup-steps 5 "
        "--no-progress".split(),
    )
    assert done.code == 0
    made = fake.calls["trainer"]
    assert (made["num_gpus"], made["threads"], made["reduction"], made["execution"]) == (
        2,
        3,
        "mpi",
        "eager",
    )
    assert (made["device"], made["shard_size"], made["seed"]) == ("cpu", 16, 7)
    assert fake.calls["AdamW"][1] == {
        "lr": 0.002,
        "weight_decay": OPTIMIZERS["adamw"]["weight_decay"],
    }
    assert fake.calls["schedule"][1]["warmup_steps"] == 5


def test_another_optimizer_brings_its_own_learning_rate(odyssey_command, fake):
    odyssey_command("train", "--optimizer", "adam")
    assert fake.calls["Adam"][1] == {"lr": 1e-3, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("given", "epochs", "total", "warmup"),
    [
        ([], 8, 8 * 469, 100),
        (["--steps", "1"], 1, 1, 0),
        (["--steps", "100"], 1, 100, 20),
        (["--steps", "470"], 2, 470, 94),
        (["--steps", "9999", "--epochs", "2"], 2, 938, 100),
    ],
)
def test_length_of_a_run(odyssey_command, fake, given, epochs, total, warmup):
    assert odyssey_command("train", *given).code == 0
    assert fake.calls["fit"]["epochs"] == epochs
    assert fake.calls["schedule"][1] == {"total_steps": total, "warmup_steps": warmup}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--epochs", "0"], "--epochs is 0; it must be an integer of at least 1"),
        (["--steps", "-1"], "--steps is -1"),
        (["--global-batch-size", "0"], "--global-batch-size is 0"),
        (["--shard-size", "0"], "--shard-size is 0"),
        (["--num-gpus", "0"], "--num-gpus is 0"),
        (["--threads", "0"], "--threads is 0"),
        (["--lr", "-1"], "--lr is -1.0; it must be a number of at least 0 and finite"),
        (["--lr", "nan"], "--lr is nan"),
        (["--lr", "inf"], "--lr is inf"),
        (["--momentum", "1"], "--momentum is 1.0"),
        (["--momentum", "nan"], "--momentum is nan"),
        (["--momentum", "0", "--nesterov"], "--nesterov needs momentum, but --momentum is 0"),
        (
            ["--optimizer", "adam", "--momentum", "0.9"],
            "--momentum applies only to --optimizer sgd or FILE.py:CLASS, not adam; remove it",
        ),
        (
            ["--optimizer", "adam", "--nesterov"],
            "--nesterov applies only to --optimizer sgd or FILE.py:CLASS, not adam; remove it",
        ),
        (["--weight-decay", "-1"], "--weight-decay is -1.0"),
        (["--warmup-steps", "-1"], "--warmup-steps is -1"),
        (["--warmup-steps", "50", "--steps", "10"], "50 warm-up steps but 10 steps altogether"),
        (["--seed", "-1"], "--seed is -1"),
        (["--json", "a", "--save-weights", "./a"], "both name a"),
        (["--model", "resnet"], "'resnet' is not one of 'lenet5', 'mlp', 'convnet'"),
        (["--epoch", "1"], "--epochs"),
        (["--epochs", "many"], "'many' is not a valid integer"),
        (["--epochs"], "requires an argument"),
        (["extra"], "unexpected extra argument"),
    ],
)
def test_wrong_value_is_one_line_and_64(odyssey_command, fake, given, says):
    done = odyssey_command("train", *given)
    assert done.code == 64
    assert done.out == ""
    assert done.err.startswith("odyssey: error: ") and done.err.count("\n") == 1
    assert says in done.err
    assert "trainer" not in fake.calls


def test_every_recipe_is_complete_and_allowed():
    for recipe in RECIPES.values():
        assert set(recipe) == set(RECIPES["lenet5"])
        assert recipe["optimizer"] in OPTIMIZERS
        assert recipe["schedule"] in SCHEDULES


def test_every_help_text_states_its_default():
    for option in train.command.params:
        assert "default: " in option.help, option.name


def test_help_lists_every_option_under_a_heading(odyssey_command):
    options = {option.name for option in train.command.params}
    assert options >= {name for name, s in declared(Settings).items() if s.option}
    text = odyssey_command("train", "--help").out
    assert all(f"\n{heading}:\n" in text for heading in SECTIONS) and "-h, --help" in text
    assert all(option.opts[0] in text for option in train.command.params)


def test_help_and_version(odyssey_command):
    assert odyssey_command("train", "--help").code == 0
    done = odyssey_command()
    assert done.code == 0 and "Commands:" in done.out
    done = odyssey_command("--version")
    assert done.code == 0 and done.out.startswith("odyssey ")
    done = odyssey_command("trian")
    assert done.code == 64 and done.err.count("\n") == 1


# -- the configuration file ------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def test_config_gives_values_and_the_command_line_goes_before(odyssey_command, fake, config):
    path = config(
        'model = "mlp"\nglobal-batch-size = 256\nshard_size = 16\neval = false\nno-progress = '
        "true\nlr = 1\n"
    )
    done = odyssey_command("train", "--shard-size", "64", "--config", path)
    assert done.code == 0
    assert fake.calls["model"][0] == ("mlp",)
    assert fake.calls["trainer"]["shard_size"] == 64
    assert fake.calls["trainer"]["progress"] is None
    assert fake.calls["fit"]["validation"] is None
    assert fake.calls["Adam"][1]["lr"] == 1.0


def test_config_no_eval_and_the_command_line_turns_it_on_again(odyssey_command, fake, config):
    path = config("no-eval = true\n")
    odyssey_command("train", "--config", path)
    assert fake.calls["fit"]["validation"] is None
    odyssey_command("train", "--config", path, "--eval")
    assert fake.calls["fit"]["validation"] is not None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("epoch = 3\n", "unknown key 'epoch'; did you mean 'epochs'?"),
        ("zzzzzz = 3\n", "unknown key 'zzzzzz'; known are accumulation-steps"),
        ("config = 'x'\n", "unknown key 'config'"),
        ("epochs = 1.5\n", "epochs = 1.5; an integer is allowed"),
        ("epochs = true\n", "epochs = true; an integer is allowed"),
        ("lr = 'fast'\n", 'lr = "fast"; a number is allowed'),
        ("eval = 1\n", "eval = 1; true or false is allowed"),
        ("model = 5\n", "model = 5; a text in quotes is allowed"),
        ("model = 'resnet'\n", "'resnet' is not one of"),
        ("epochs = 0\n", "--epochs is 0"),
        ("[train]\nepochs = 1\n", "unknown key 'train'"),
        ("shard-size = 1\nshard_size = 2\n", "given twice"),
        ("eval = true\nno-eval = true\n", "given twice"),
        ("epochs =\n", "is not TOML"),
    ],
)
def test_wrong_config_is_one_line_and_64(odyssey_command, config, text, says):
    done = odyssey_command("train", "--config", config(text))
    assert done.code == 64
    assert done.err.startswith("odyssey: error: ") and done.err.count("\n") == 1
    assert says in done.err


@pytest.mark.parametrize("attempt", [None, "1"])
def test_a_started_rank_leaves_what_is_the_launcher_s(
    odyssey_command, fake, config, monkeypatch, tmp_path, attempt
):
    """`odyssey launch` has read ranks and directory, here or on its command line, which goes
    before the file.
    """
    monkeypatch.setattr(
        train.launchers, "launched", lambda: launcher.Launched("srun", 0, 2, 0, 2, False)
    )
    path = config(f'ranks = 4\nrun-dir = "{tmp_path / "other"}"\nseed = 7\n')
    if attempt:
        monkeypatch.setenv(runs.ATTEMPT, attempt)
    done = odyssey_command("train", "--config", path)
    assert done.code == (0 if attempt else 64), done.err
    if attempt:
        assert fake.calls["trainer"]["seed"] == 7 and runs.RUN_DIR not in os.environ
    else:
        assert "--ranks 4 is given, but the ranks were started already" in done.err


@pytest.mark.parametrize(("key", "option"), [("ranks = 4", "-n"), ("run-dir = 'r'", "--run-dir")])
@pytest.mark.parametrize("form", ["--config {}", "--config={}"])
def test_a_launcher_refuses_what_the_file_of_ranks_says_too_late(
    odyssey_command, config, key, option, form
):
    path = config(f"seed = 7\n{key}\n")
    done = odyssey_command("launch", "-n", 2, "train", "--seed", 1, *form.format(path).split())
    assert done.code == 64 and done.err.count("\n") == 1
    assert (
        f"has {key.split()[0]}, which is too late" in done.err
        and f"`odyssey launch {option}`" in done.err
    )


@pytest.mark.parametrize("words", [[], ["--config"], ["--seed", "7"]])
def test_a_launcher_starts_what_has_no_such_file(odyssey_command, monkeypatch, words):
    started = []
    monkeypatch.setattr(
        "odyssey.launch.DistributedLauncher.launch", lambda self, *given: started.append(given) or 0
    )
    assert odyssey_command("launch", "-n", 2, "train", *words).code == 0
    assert started == [("train", *words)]


def test_missing_config(odyssey_command, tmp_path):
    done = odyssey_command("train", "--config", tmp_path / "none.toml")
    assert done.code == 65
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("train --ranks 4 --lr 0.1", "train --lr 0.1"),
        ("--lr=0.1 --ranks=4 --steps 3 --run-dir a", "--lr=0.1 --steps 3"),
        ("--run-dir=a", ""),
        ("--ranks-per-node 2", "--ranks-per-node 2"),
    ],
)
def test_what_ranks_are_started_with(words, left):
    assert train.without(words.split(), {"--ranks": 1, "--run-dir": 1}) == left.split()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trian", "No such command 'trian'; did you mean train"),
        ("zzz", "No such command 'zzz'; choose from train, launch"),
        ("train --lrr 1", "Did you mean"),
        ("launch --elastik 1:2 x.py", "Did you mean"),
        ("train -q -v", "--quiet and --verbose are both given"),
        (
            "train --batch-size 8 --global-batch-size 8",
            "--batch-size and --global-batch-size are both given",
        ),
        (
            "train -n 2 --batch-size 64",
            "on 2 workers is not clear; give --global-batch-size 128 (64 samples on each) or "
            "--global-batch-size 64",
        ),
        ("train --ranks 4 --batch-size 32", "--global-batch-size 128"),
        ("train --nproc_per_node 4", "No such option '--nproc_per_node'. Did you mean '-n'?"),
        ("launch --nproc_per_node=4 x.py", "Did you mean '-n'?"),
        ("launch --num_processes 4 x.py", "Did you mean '-n'?"),
    ],
)
def test_what_is_not_clear_names_what_may_have_been_meant(odyssey_command, fake, words, says):
    done = odyssey_command(*words.split())
    assert done.code == 64 and says in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("x.py -n 3", "-n 3 behind the script is the script's; for the launcher, write: odyssey"),
        ("x.py --a --nproc_per_node=3", "odyssey launch -n 3 x.py"),
        ("x.py --hosts h1", "odyssey launch --hosts h1 x.py"),
        ("-n 2 x.py -n 3", None),
        ("-n 2 x.py --nproc_per_node 3", None),
        ("x.py -- -n 3", None),
        ("x.py --name 3", None),
        ("train --epochs 3", None),
    ],
)
def test_options_of_the_launcher_behind_the_script_get_a_hint(
    odyssey_command, monkeypatch, words, hint
):
    from odyssey import launch

    monkeypatch.setattr(launch.DistributedLauncher, "launch", lambda *_: 0)
    done = odyssey_command("launch", *words.split())
    assert done.code == 0 and (done.err == "" if hint is None else hint in done.err)
    assert done.err.count("\n") == (hint is not None)


@pytest.mark.parametrize("words", [["-n", "3"], ["-n3"], ["--ranks=3"], ["--ranks", "3"]])
def test_train_takes_ranks_as_launch_does(odyssey_command, fake, monkeypatch, words):
    from odyssey import launch

    started = []

    def note(launcher, *command):
        started.append((launcher.config.ranks, command))
        return 0

    monkeypatch.setattr(launch.DistributedLauncher, "launch", note)
    monkeypatch.setattr(sys, "argv", ["odyssey", "train", *words, "--epochs", "2"])
    assert odyssey_command("train", *words, "--epochs", "2").code == 0
    assert started == [(3, ("train", "--epochs", "2"))]


def test_batch_size_of_one_worker_is_the_global_one(odyssey_command, fake, tmp_path):
    for option in ("--batch-size", "--global-batch-size"):
        done = odyssey_command("train", "--quiet", option, "256", "--json", tmp_path / "out.json")
        assert (done.code, done.err) == (0, "")
        assert json.loads((tmp_path / "out.json").read_text())["global_batch_size"] == 256


def test_verbose_says_the_settings(odyssey_command, fake):
    done = odyssey_command("train", "-v", "--seed", "7")
    assert "odyssey: seed = 7\n" in done.err and "odyssey: ranks 1, mesh" in done.err
    assert "seed = 7" not in odyssey_command("train", "--seed", "7").err


def test_version(odyssey_command):
    assert odyssey_command("-V").out == odyssey_command("--version").out != ""
