"""A setting is declared once: what comes from the declaration."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import click
import pytest

from odyssey import DistributedTrainer, data, nn, optim
from odyssey.cli.commands.train import _build_option
from odyssey.cli.configfile import parse_config
from odyssey.distributed.config import DistributedConfig
from odyssey.errors import ConfigError
from odyssey.settings.declarations import (
    ELSEWHERE,
    OF_FIT,
    RANKS,
    SECTIONS,
    Settings,
    Training,
    check,
    declared,
    keywords,
    make_settings,
    option,
    setting,
)
from odyssey.settings.recipes import OWN_CLASS

ROOT = Path(__file__).parents[2]


def test_what_others_take_is_theirs():
    takes = {
        "fit()": [DistributedTrainer.fit],
        "data.DataLoader": [data.DataLoader],
        "the optimizer": [optim.SGD, optim.Adam],
        "optim.schedule()": [optim.schedule],
    }
    own = {
        *declared(Training),
        *inspect.signature(DistributedTrainer).parameters,
        "self",
        "params",
        "name",
    }
    for who, functions in takes.items():
        names = {name for f in functions for name in inspect.signature(f).parameters} - own
        assert names == {*ELSEWHERE[who].split(), *(OF_FIT if who == "fit()" else ())} - own, who
    assert set(takes) == set(ELSEWHERE)


@dataclasses.dataclass(frozen=True)
class More(Training):
    """A training with one setting more: CONTRIBUTING.md."""

    tensor_fusion: int | None = setting(
        RANKS,
        None,
        "tensors that are sent as one",
        "all",
        low=1,
        high=8,
        only=("reduction", "ring"),
    )


def test_one_declaration_is_an_option_a_key_a_keyword_and_its_checks():
    found = _build_option(declared(More)["tensor_fusion"])
    assert (found.name, found.opts, found.type) == ("tensor_fusion", ["--tensor-fusion"], click.INT)
    assert found.help == "Tensors that are sent as one. (only with --reduction ring; default: all)"
    assert parse_config(b"tensor-fusion = 2\n", "run.toml", [found]) == {"tensor_fusion": 2}

    @keywords(More)
    def take(model, num_gpus=None, **settings):
        """As a trainer is made."""

    parameter = inspect.signature(take).parameters["tensor_fusion"]
    assert (parameter.default, parameter.kind) == (None, parameter.KEYWORD_ONLY)
    assert make_settings(More, {"tensor_fusion": 2, "reduction": "ring"}).tensor_fusion == 2
    for given, spell, says in (
        ({"tensor_fusion": 9}, option, r"--tensor-fusion is 9; it must be an integer from 1 to 8$"),
        (
            {"tensor_fusion": 2},
            option,
            "--tensor-fusion applies only to --reduction ring, not tree; remove it",
        ),
        ({"reduction": "mpi", "tensor_fusion": 2}, option, "ring, not mpi; remove it"),
    ):
        with pytest.raises(ConfigError, match=says):
            check(More, given, spell)


def test_every_setting_has_a_section_and_a_default_that_is_allowed():
    for name, s in declared(Settings).items():
        assert s.section in SECTIONS and s.help and s.default_text, name
        assert s.check(s.default, name) == s.default
        owner = declared(Settings)[s.only[0]] if s.only else None
        assert owner is None or set(s.only[1:]) <= {*owner.choices, *[OWN_CLASS] * owner.own}, name


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"acumulation_steps": 2},
            "unknown setting 'acumulation_steps'; did you mean 'accumulation_steps'?",
        ),
        ({"model_name": "mlp"}, "unknown setting 'model_name'"),
        ({"checkpoint_dir": "kept"}, "unknown setting 'checkpoint_dir'; give it to fit()"),
        ({"batch_size": 128}, "unknown setting 'batch_size'; give it to data.DataLoader"),
        ({"verbose": False}, "unknown setting 'verbose'; give it to fit()"),
        ({"lr": 0.1}, "unknown setting 'lr'; give it to the optimizer"),
        ({"threads": 0}, "threads is 0; it must be an integer of at least 1"),
        ({"num_gpus": True}, "num_gpus is True; it must be an integer"),
        ({"zero": 4}, "zero is 4; it must be an integer from 0 to 3"),
        ({"seed": 2**63}, "seed is 9223372036854775808; it must be"),
        ({"clip_norm": float("nan")}, "clip_norm is nan; it must be a number above 0 and finite"),
        ({"overlap": "no"}, "overlap is 'no'; it must be True or False"),
        ({"overlap": 2}, "overlap is 2; it must be True or False"),
        ({"device": "tpu"}, "device is 'tpu'; choose from auto, cpu, gpu"),
        ({"backend": "tcp"}, "backend is 'tcp'; choose from auto, mpi"),
        ({"execution": "lazy"}, "execution is 'lazy'; choose from replay, eager"),
        ({"nonfinite": "ignore"}, "nonfinite is 'ignore'; choose from stop, skip, rollback"),
        ({"precision": "fp8"}, "precision is 'fp8'; choose from fp32"),
        (
            {"local_steps": 2},
            "local_steps applies only to reduction='local_sgd', not tree; remove it",
        ),
        (
            {"lr_scaling": "linear"},
            "lr_scaling='linear' needs the batch size that the rate is for; give base_batch_size",
        ),
        (
            {"base_batch_size": 32},
            "base_batch_size applies only to lr_scaling='sqrt' or 'linear', not none; remove it",
        ),
    ],
)
def test_a_trainer_refuses(given, says):
    with pytest.raises(ConfigError) as error:
        DistributedTrainer(nn.Linear(4, 2), optim.SGD(), **given)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_trainer_has_all_keywords_in_its_signature_and_documentation():
    parameters = inspect.signature(DistributedTrainer).parameters
    for name, s in declared(Training).items():
        assert (
            parameters[name].default == s.default
            and f"\n        {name}: " in DistributedTrainer.__doc__
        )
    assert list(parameters)[:4] == ["model", "optimizer", "num_gpus", "backend"]
    assert "settings" not in parameters


def test_one_call_serves_every_precision():
    trainer = DistributedTrainer(nn.Linear(4, 2), optim.SGD(), scaler_init_scale=1024.0, threads=1)
    assert trainer.scaler.value == 1.0 and trainer.settings.device == "cpu"


def test_a_checkpoint_names_what_is_declared_for_it():
    trainer = DistributedTrainer(nn.Linear(4, 2), optim.SGD(), clip_norm=1, seed=3, threads=1)
    assert {
        "seed": 3,
        "clip norm": 1.0,
        "learning-rate scaling": ["none", None],
    }.items() <= trainer.configuration().items()


def test_other_platforms_keys_are_declared_with_the_settings():
    config = DistributedConfig(
        zero_stage=1, gradient_clipping=2.0, scaler_init_scale=1024.0, mixed_precision=True
    )
    options = config.trainer_options(2)
    assert (options["zero"], options["clip_norm"], options["scaler_init_scale"]) == (1, 2.0, 1024.0)
    assert set(options) <= set(declared(Training)) and config.fit_options()["epochs"] == 1
    with pytest.raises(ConfigError, match="epochs is None"):
        DistributedConfig(epochs=None)


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom odyssey import cli\ntry:\n    cli.main(['train', '--help'])\nexcept "
        "SystemExit: pass\n"
        "print([m for m in ('numpy', 'mpi4py', 'odyssey.engine.engine', 'odyssey.comm') if m in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_the_documentation_is_what_is_declared():
    command = [sys.executable, ROOT / "scripts" / "settings-table", "--check"]
    assert subprocess.run(command).returncode == 0, "run scripts/settings-table"
