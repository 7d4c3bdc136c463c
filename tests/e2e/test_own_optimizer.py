"""`--optimizer FILE.py:CLASS`: a rule of the user's own on the command line, on any ranks,
resumed, verified.
"""

from __future__ import annotations

import pytest

LION = """
from odyssey import functional as F
from odyssey import nn, optim


class Lion(optim.Optimizer):
    states = ("m",)

    def __init__(self, params=None, lr=2e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)

    def rule(self, p, g, m):
        c = self.betas[0] * m + (1 - self.betas[0]) * g
        return p - self.lr * (F.sign(c) + self.weight_decay * p), self.betas[1] * m + (1 - self.betas[1]) * g


class Needs(Lion):
    def __init__(self, scale, lr=0.1):
        super().__init__(lr=lr)


class Without(optim.Optimizer):
    pass


class Heavy(optim.Optimizer):
    states = ("v",)

    def rule(self, p, g, v):
        v = self.momentum * v + g
        return p - self.lr * v, v


number = 3
"""
OF_MODEL = ("--model", "mlp", "--steps", 6, "--global-batch-size", 48)
WORDS = (*OF_MODEL, "--no-eval", "--quiet", "--schedule", "linear-warmup")


@pytest.fixture
def own(launch):
    (launch.folder / "lion.py").write_text(LION)
    return launch


def test_a_rule_of_ones_own_trains_on_any_ranks_and_goes_on_on_others(own):
    words = (*WORDS, "--optimizer", "lion.py:Lion", "--weight-decay", 0.1, "--clip-norm", 0.5)
    one = own.result(*words)
    built_in = own.result(*words[:-6], "--optimizer", "lion", "--lr", 2e-4, *words[-4:])
    assert one["weights_sha256"] == built_in["weights_sha256"]
    assert own.result(*words, "--zero", 2, ranks=3)["weights_sha256"] == one["weights_sha256"]
    whole = own.result(
        *words, "--checkpoint-dir", "kept", "--checkpoint-every", 3, "--keep", 9, ranks=3
    )
    assert whole["weights_sha256"] == one["weights_sha256"]
    resumed = own.result(
        *words, "--checkpoint-dir", "on", "--resume", "kept/step_00000003", "--zero", 1, ranks=2
    )
    assert resumed["weights_sha256"] == one["weights_sha256"]
    for more, said in (
        (("--weight-decay", 0.2), "weight_decay"),
        (("--optimizer", "lion"), "lr"),
        (("--optimizer", "lion.py:Heavy"), "optimizer"),
    ):
        other = own.train(
            *words, *more, "--checkpoint-dir", "on", "--resume", "kept/step_00000003", ranks=2
        )
        assert (
            other.returncode == 64 and said in other.stderr and "Traceback" not in other.stderr
        ), other.stderr


def test_a_rule_of_ones_own_in_a_configuration_file_is_verified(own):
    (own.folder / "c.toml").write_text(
        'model = "mlp"\noptimizer = "lion.py:Heavy"\nmomentum = 0.5\nlr = 0.01\n'
    )
    words = ("--steps", 2, "--layouts", "dp=3,zero=2", "dp=2,pp=2", "--", "--config", "c.toml")
    done = own.python("-m", "odyssey", "verify", *words)
    assert done.returncode == 0 and "2 of 2 layouts give the bits" in done.stdout, (
        done.stdout + done.stderr
    )


@pytest.mark.parametrize(
    ("place", "more", "said"),
    [
        ("lion.py", (), "write FILE.py:NAME, as in lion.py:Lion"),
        ("none.py:Lion", (), "there is no file none.py"),
        ("lion.py:Loin", (), "lion.py has no class Loin, but Lion, Needs, Without, Heavy"),
        ("lion.py:number", (), "lion.py has no class number"),
        ("lion.py:Needs", (), "missing 1 required positional argument: 'scale'"),
        ("lion.py:Lion", ("--momentum", 0.5), "unexpected keyword argument 'momentum'"),
        ("lion.py:Lion", ("--lr", -1), "--lr is -1.0"),
        ("lion.py:Without", (), "[Without] has no rule"),
        ("lion.py:nn", (), "has no class nn"),
        ("lion.py:F", (), "has no class F"),
    ],
)
def test_what_is_no_optimizer_is_refused_by_name(own, place, more, said):
    done = own.train(*WORDS, "--optimizer", place, *more, ranks=2)
    assert done.returncode == 64 and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) == 1, (
        done.stderr
    )


def test_a_class_that_is_no_optimizer(own):
    (own.folder / "net.py").write_text(
        "class Net:\n    def __init__(self, **settings):\n        pass\n"
    )
    done = own.train(*WORDS, "--optimizer", "net.py:Net")
    assert (
        done.returncode == 64
        and "gives a Net; a subclass of odyssey.optim.Optimizer is needed" in done.stderr
    )
    unknown = own.train(*WORDS, "--optimizer", "lino")
    assert unknown.returncode == 64 and "FILE.py:CLASS" in unknown.stderr, unknown.stderr
