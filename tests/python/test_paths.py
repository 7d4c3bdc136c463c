"""Everywhere a user names a path, `~` and variables are expanded, and the same way.

PLACES is the list of Python arguments and environment variables that take a path, OPTIONS the list
of options that take one in another form than a plain path.
"""

from __future__ import annotations

import os
import pwd
import random
from pathlib import Path

import click
import numpy as np
import pytest

import odyssey
from odyssey import callbacks, data, loggers, nn, optim, steplog
from odyssey import distributed as dist
from odyssey.base import expand_path
from odyssey.base.paths import variables_in
from odyssey.cli import group
from odyssey.cli.commands import COMMANDS, DataSet, FilePath
from odyssey.cli.commands.train import command as train_command
from odyssey.cli.commands.train import settings_of
from odyssey.cli.configfile import parse_config
from odyssey.distributed import DistributedConfig
from odyssey.errors import ConfigError, OdysseyError

USER = pwd.getpwuid(os.geteuid())


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home directory, a working directory beside it, and one variable that is set."""
    folder = tmp_path / "home"
    folder.mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("PLACE", str(folder))
    monkeypatch.delenv("NOT_SET", raising=False)
    return folder


SPELLINGS = ("~/{}", "$HOME/{}", "${{PLACE}}/{}", "$PLACE/../home/{}")


def test_what_is_expanded(home, monkeypatch):
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("TILDE", "~/x")
    for given, expected in {
        "~": home,
        "~/a": home / "a",
        "$HOME/a": home / "a",
        "${PLACE}a/$EMPTY": f"{home}a",
        "$TILDE/a": home / "x/a",
        f"~{USER.pw_name}/a": f"{USER.pw_dir}/a",
        "a/~": "a/~",
        "a$": "a$",
        "$5/$(x)/$$/${}": "$5/$(x)/$$/${}",
        "a b/ü": "a b/ü",
        "-": "-",
    }.items():
        assert expand_path(given) == expand_path(Path(given)) == Path(expected), given
        assert expand_path(expand_path(given)) == Path(expected)
    literal_path = Path.cwd() / "~" / "a"
    assert expand_path("./~/a") == expand_path(expand_path("./~/a")) == literal_path
    assert expand_path(b"~/a") == home / "a"
    assert variables_in(["$HOME/x", "${PLACE}$HOME$NOT_SET", "$5"]) == ("HOME", "PLACE")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("$NOT_SET/a", r"\$NOT_SET/a: the variable NOT_SET isn't set; set it, or write"),
        ("a/${NOT_SET}b", r"the variable NOT_SET isn't set"),
        ("${HOME:-x}/a", r"the variable HOME:-x isn't set"),
        ("$NOT_SET\x1b[2J\0", r"the variable NOT_SET isn't set"),
        ("~nobody-here/a", r"there is no user nobody-here; write \./~nobody-here for a file of"),
        ("~a\0b", r"there is no user a\\x00b"),
        (3, r"3 is not a path; a string or a pathlib\.Path expected"),
        (None, r"None is not a path"),
    ],
)
def test_what_cannot_be_expanded_is_named(home, path, message):
    with pytest.raises(ConfigError, match=message) as caught:
        expand_path(path)
    assert str(caught.value).isprintable()


def test_an_unknown_home_is_named(monkeypatch):
    monkeypatch.setenv("HOME", "")
    with pytest.raises(ConfigError, match=r"~/runs: the home directory isn't known; set HOME"):
        expand_path("~/runs")


def test_literal_names_that_exist_stay(home):
    """A working directory or a file may have such a name."""
    Path("$NOT_SET").mkdir()
    Path("~nobody-here").write_text("x")
    absolute = Path("$NOT_SET").absolute()
    assert expand_path(absolute / "new" / "run") == absolute / "new" / "run"
    assert expand_path("$NOT_SET/a") == Path("$NOT_SET/a")
    assert expand_path("~nobody-here") == Path("~nobody-here").absolute()
    with pytest.raises(ConfigError, match="NOT_SET"):
        expand_path("$NOT_SET-2/a")


@pytest.mark.parametrize("seed", range(400))
def test_random_paths_are_expanded_as_by_a_shell(home, monkeypatch, seed):
    """Compared with os.path, as far as both expand."""
    rng = random.Random(seed)
    monkeypatch.setenv("A_1", "x/y")
    pieces = ["~", "/", "$HOME", "${PLACE}", "$A_1", "a", " ", "ü", "${A_1}", ".", "-", "$", "~/"]
    text = "".join(rng.choices(pieces, k=rng.randint(1, 8)))
    expected = os.path.expanduser(os.path.expandvars(text))
    try:
        path = expand_path(text)
        literal_folder = Path.cwd() if str(Path(expected)).startswith("~") else Path()
        assert path == expand_path(path) == literal_folder / expected
    except ConfigError as error:
        assert "there is no user" in str(error) or "isn't set" in str(error)
        assert text.startswith("~") or os.path.expandvars(text) == expected


# --- Python arguments and environment variables ---------------------------------------------------


def small_trainer():
    odyssey.manual_seed(0)
    return odyssey.DistributedTrainer(nn.Linear(4, 2), optim.SGD(lr=0.1))


def small_loader():
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    return data.DataLoader(data.arrays(x, np.arange(8) % 2, classes=2), 8)


def fitted(**options):
    trainer = small_trainer()
    trainer.fit(small_loader(), verbose=False, **options)
    return trainer


def loop_parts():
    net = nn.Linear(4, 2)
    optimizer = optim.SGD(net.parameters(), lr=0.1)
    return odyssey.DistributedDataParallel(net), optimizer


def load_loop(folder):
    dist.init_process_group()
    try:
        ddp, optimizer = loop_parts()
        ddp.save_checkpoint(folder, optimizer)
        ddp.load_checkpoint(folder, optimizer)
    finally:
        dist.destroy_process_group()


def save_and_load_model(path):
    odyssey.save_model(nn.Linear(4, 2), path)
    odyssey.load_model(path)


def save_and_load_checkpoint(path):
    trainer = small_trainer()
    trainer.save_checkpoint(path)
    trainer.load_checkpoint(path)


def save_average(path):
    average = callbacks.EMA(0.9)
    trainer = fitted(callbacks=[average])
    with average.applied(trainer):
        odyssey.export(trainer, path, format="safetensors")


def log_with(kind):
    return lambda folder: fitted(callbacks=[kind(folder, 1)])


def offloaded(folder):
    with odyssey.offload(folder):
        nn.Linear(256, 256)


def written(make, use):
    """Returns a place that reads: `make(path)` writes what `use(path)` reads."""

    def place(path):
        make(Path(os.path.expanduser(os.path.expandvars(path))))
        use(path)

    place.use = getattr(use, "use", use)
    return place


def environment(name, use):
    def place(path):
        old_value = os.environ.get(name)
        os.environ[name] = str(path)
        try:
            use()
        finally:
            os.environ.pop(name)
            if old_value is not None:
                os.environ[name] = old_value

    return place


def write_images(root):
    pil = pytest.importorskip("PIL.Image")
    (root / "a").mkdir(parents=True)
    pil.new("RGB", (4, 4)).save(root / "a" / "x.png")


def write_idx(path):
    path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 5, 6]))


def write_mnist(folder):
    folder.mkdir()
    shipped = Path(odyssey.__file__).parent / "data" / "mnist"
    for file in shipped.glob("t10k*"):
        (folder / file.name).symlink_to(file)


def write_key(path):
    path.write_bytes(b"k" * 32)
    path.chmod(0o600)


def write_tokens(path):
    np.arange(9, dtype=np.uint16).tofile(path)


def write_array(path):
    with path.open("wb") as file:
        np.save(file, np.ones((3, 2), np.float32))


def write_run_log(path):
    steplog.StepLog(path).close()


def expect_error(use, text):
    """Returns a use that must have looked at the file before it refuses it."""

    def place(path):
        with pytest.raises(OdysseyError, match=text):
            use(path)

    place.use = use
    return place


PLACES = {
    "fit(checkpoint_dir)": lambda p: fitted(checkpoint_dir=p),
    "fit(trace)": lambda p: fitted(trace=p),
    "fit(resume)": written(
        lambda p: fitted(checkpoint_dir=p),
        lambda p: fitted(resume=p, epochs=2, checkpoint_dir=f"resumed-{Path(p).name}"),
    ),
    "fit(resume='weights:')": written(
        lambda p: fitted(checkpoint_dir=p), lambda p: fitted(resume=f"weights:{p}")
    ),
    "save_checkpoint, load_checkpoint": save_and_load_checkpoint,
    "export of a trainer": lambda p: odyssey.export(small_trainer(), p, format="safetensors"),
    "DistributedConfig(checkpoint_dir)": lambda p: small_trainer().fit(
        small_loader(), verbose=False, **DistributedConfig(checkpoint_dir=str(p)).fit_options()
    ),
    "DistributedDataParallel": load_loop,
    "load": written(lambda p: fitted(checkpoint_dir=p), lambda p: odyssey.load(p, nn.Linear(4, 2))),
    "export": lambda p: odyssey.export(nn.Linear(4, 2), p, format="safetensors"),
    "save_model, load_model": save_and_load_model,
    "export of an average": save_average,
    "CSVLogger": log_with(loggers.CSVLogger),
    "JSONLLogger": log_with(loggers.JSONLLogger),
    "offload": offloaded,
    "DistributedTrainer(offload)": lambda p: odyssey.DistributedTrainer(
        nn.Linear(256, 256), optim.SGD(lr=0.1), offload=str(p)
    ),
    "steplog.load": written(write_run_log, steplog.load),
    "load_ops": written(lambda p: p.mkdir(), expect_error(odyssey.load_ops, "there is no file")),
    "data.load": written(write_mnist, lambda p: data.load("mnist", train=False, data_dir=p)),
    "data.ImageFolder": written(write_images, lambda p: data.ImageFolder(p)[0]),
    "data.opened": written(
        write_images,
        expect_error(lambda p: data.opened("image-folder", p, train=True), "1 of 1 samples"),
    ),
    "data.csv": written(lambda p: p.write_text("a,b\n1,2\n"), data.csv),
    "data.npz": written(
        lambda p: np.savez(p.open("wb"), x=np.ones((2, 2)), y=np.ones(2)), data.npz
    ),
    "data.npy": written(write_array, lambda p: data.npy(p, p)),
    "data.text": written(lambda p: p.write_text("abc" * 30), lambda p: data.text(p, length=4)),
    "data.text(tokenizer)": written(
        lambda p: p.write_text("{}"),
        expect_error(
            lambda p: data.text(odyssey.data.sources._SHAKESPEARE, tokenizer=p), "tokenizer"
        ),
    ),
    "data.tokens": written(
        write_tokens, lambda p: data.tokens(p, length=2, classes=9, dtype="u2")[0]
    ),
    "data.read_idx": written(write_idx, data.read_idx),
    "Vocabulary.of_checkpoint": written(
        lambda p: p.mkdir(), expect_error(data.Vocabulary.of_checkpoint, "no manifest")
    ),
    "ODYSSEY_CHECKPOINT_KEY_FILE": written(
        write_key,
        environment("ODYSSEY_CHECKPOINT_KEY_FILE", lambda: fitted(checkpoint_dir="signed")),
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_place_expands_its_path(home, name):
    place = PLACES[name]
    for number, spelling in enumerate(SPELLINGS):
        end = f"{number}.npy" if name == "data.npy" else f"{number}"
        path = spelling.format(end)
        place(Path(path) if number % 2 else path)
        assert (home / end).exists(), path
    assert not [entry.name for entry in Path().iterdir() if entry.name[0] in "~$"]
    with pytest.raises(ConfigError, match="the variable NOT_SET isn't set"):
        getattr(place, "use", place)("$NOT_SET/a.npy")
    assert not Path("$NOT_SET").exists()


def test_folders_of_compiled_kernels(home, monkeypatch):
    from odyssey.comm import nccl
    from odyssey.compile import library
    from odyssey.errors import BuildError

    monkeypatch.setenv("ODYSSEY_CACHE_DIR", "$PLACE/cache")
    assert library.cache_dir() == home / "cache"
    monkeypatch.setenv(nccl.LIBRARY, "~/nccl.so")
    assert nccl._candidates() == [str(home / "nccl.so")]
    monkeypatch.setenv("ODYSSEY_KERNELS", "~/kernels")
    with pytest.raises(BuildError, match=str(home / "kernels")):
        library.open_library()


def test_the_storage_of_a_study(home):
    pytest.importorskip("optuna")
    from odyssey.tune import tuner

    assert tuner._expand_place("~/study.db") == str(home / "study.db")
    assert tuner._expand_place("sqlite:///~/$NOT_SET") == "sqlite:///~/$NOT_SET"


# --- options --------------------------------------------------------------------------------------

#: Options and arguments whose value names a path among other things. The tests below, and those of
#: other files, show that they are expanded too.
OTHER_FORMS = {
    ("train", "dataset"),
    ("train", "model"),
    ("train", "optimizer"),
    ("train", "resume"),
    ("train", "offload"),
    ("evaluate", "dataset"),
    ("predict", "inputs"),
    ("predict", "own_model"),
    ("evaluate", "own_model"),
    ("export", "own_model"),
    ("plan", "program"),
    ("launch", "script"),
    ("launch", "launcher"),
    ("tune", "storage"),
    # A script for sbatch: its own odyssey, or the shell of the job, expands them.
    ("slurm", "script"),
    ("slurm", "scratch"),
    ("slurm", "cache"),
    ("slurm", "run_dir"),
    ("k8s", "script"),
}
PATH_WORDS = {"FILE", "DIR", "PATH", "RUN", "RUN2", "SCRIPT", "CHECKPOINT_DIR", "FILES"}


def parameters():
    context = click.Context(group)
    for name in COMMANDS:
        command = group.get_command(context, name)
        for parameter in command.params:
            yield name, command, parameter


def test_every_option_that_takes_a_path_expands_it(home):
    count = 0
    for name, command, parameter in parameters():
        context = click.Context(command, info_name=name)
        if isinstance(parameter.type, FilePath):
            count += 1
            assert parameter.type.convert("~/a", parameter, context) == home / "a"
            with pytest.raises(click.BadParameter, match="the variable NOT_SET isn't set"):
                parameter.type.convert("$NOT_SET/a", parameter, context)
            continue
        metavar = str(parameter.make_metavar(context)).replace(".", "|").replace("[", "|")
        if "OPTIONS OF" in metavar:
            continue
        words = set(metavar.replace("]", "|").replace(":", "|").replace(" ", "|").split("|"))
        if words & PATH_WORDS or isinstance(parameter.type, DataSet):
            assert (name, parameter.name) in OTHER_FORMS, (name, parameter.name, metavar)
    assert count > 30


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_path_of_a_configuration_file_is_expanded(home, spelling):
    keys = [
        option.opts[0].lstrip("-")
        for option in train_command.params
        if isinstance(option.type, FilePath) and option.name != "config"
    ]
    lines = [f'{key} = "{spelling.format(key)}"' for key in keys]
    lines.append(f'dataset = "csv:{spelling.format("table.csv")}"')
    lines.remove(f'data-dir = "{spelling.format("data-dir")}"')
    values = parse_config("\n".join(lines).encode(), "run.toml", train_command.params)
    context = train_command.make_context("train", [], default_map=values)
    settings = settings_of(context)
    for key in keys:
        expected = home / ("table.csv" if key == "data-dir" else key)
        assert os.path.normpath(getattr(settings, key.replace("-", "_"))) == str(expected)
    assert settings.dataset == "csv"


def test_own_code_in_a_home_directory(home):
    from odyssey.base.userfile import named

    (home / "own.py").write_text("class Net: pass\n")
    assert named("[x] --model", "~/own.py:Net", "x").__name__ == "Net"
    with pytest.raises(ConfigError, match="NOT_SET"):
        named("[x] --model", "$NOT_SET/own.py:Net", "x")


def test_a_launcher(home):
    from odyssey.launch.config import LaunchConfig

    assert LaunchConfig(launcher="~/bin/mpirun").launcher == str(home / "bin" / "mpirun")
    assert LaunchConfig(launcher="./mpirun").launcher == str(Path.cwd() / "mpirun")
    with pytest.raises(ConfigError, match="the variable NOT_SET isn't set"):
        LaunchConfig(launcher="$NOT_SET/mpirun")


def test_a_host_file(home):
    from odyssey.launch.hosts import parse_hostfile

    (home / "hosts").write_text("a:2\n")
    assert parse_hostfile("~/hosts") == parse_hostfile(Path("$PLACE/hosts"))
    with pytest.raises(ConfigError, match="the variable NOT_SET isn't set"):
        parse_hostfile("$NOT_SET/hosts")
