"""Ranks that compute different results from the same numbers, of odyssey's own kernels."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from odyssey import DistributedTrainer, data, nn, optim
from odyssey.base import variables
from odyssey.comm import mock
from odyssey.core import arithmetic as samples
from odyssey.errors import ConfigError
from odyssey.train import arithmetic, rank_checks

RNG = np.random.default_rng(3)
X = RNG.standard_normal((48, 1, 28, 28)).astype(np.float32)
Y = RNG.integers(0, 10, 48)


def trained(comm, *, options=None, fits=1, **settings):
    loader = data.DataLoader(data.arrays(X, Y), batch_size=24)
    trainer = DistributedTrainer(
        nn.models.build("lenet5", seed=1),
        optim.SGD(lr=0.01),
        comm=comm,
        device="cpu",
        threads=1,
        shard_size=8,
        **settings,
    )
    for _ in range(fits):
        trainer.fit(loader, verbose=False, **(options or {}))
    return trainer


def sha_of(comm, **settings):
    return trained(comm, **settings).weights_sha256()


@pytest.fixture
def prints(monkeypatch):
    """The fingerprints of the first shard, by rank."""
    found: dict[int, list[int]] = {}
    compute = rank_checks.print_first_shard

    def noted(engine, batch, step):
        result = compute(engine, batch, step)
        found.setdefault(engine.layout.comm.rank, []).append(result)
        return result

    monkeypatch.setattr(rank_checks, "print_first_shard", noted)
    return found


# --- variables ---


def test_variables_that_decide_bits_are_found_by_name():
    environment = {"MKL_CBWR": "AVX2", "HOME": "/h", "ONEDNN_MAX_CPU_ISA": "X", "MKLX": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = "/tmp/x"
    assert variables.deciding(environment) == {"MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "X"}
    assert not variables.is_named("AWS_SECRET_ACCESS_KEY", variables.DECIDE_BITS)


def test_causes_are_what_differs():
    here = {"variables": {"MKL_CBWR": "AVX2", "OMP_X": "1"}, "processor": "a", "libraries": {}}
    there = {"variables": {"OMP_X": "1"}, "processor": "b", "libraries": {"kernels": "6"}}
    text = arithmetic._find_causes(here, there, "on rank 2", "on rank 0")
    assert text == (
        "likely cause: MKL_CBWR is AVX2 on rank 2 and not set on rank 0, kernels is not set on "
        "rank 2 and 6 on rank 0, the processor is a on rank 2 and b on rank 0"
    )
    many = {"variables": {f"MKL_{i}": "1" for i in range(9)}}
    assert arithmetic._find_causes(many, {}, "now", "then").endswith(", and 5 more")
    assert "same variables" in arithmetic._find_causes(here, here, "now", "then")


def test_values_of_variables_are_shown_without_control_characters():
    here = {"variables": {"MKL_X": "a\x1b[2J\n"}}
    text = arithmetic._find_causes(here, {}, "on rank 1", "on rank 0")
    assert "\x1b" not in text and "\n" not in text


# --- samples ---


def test_samples_are_the_same_again():
    first = samples.sample()
    samples._sample.cache_clear()
    assert samples.sample() == first and len(set(first.values())) == len(first) == 7


def _sample_of_rank_1(monkeypatch, name):
    make = arithmetic.Arithmetic.__init__

    def changed(self, comm, sample, *arguments, **settings):
        own = {**sample(), name: "0" * 16} if comm.rank == 1 else sample()
        make(self, comm, lambda: own, *arguments, **settings)

    monkeypatch.setattr(arithmetic.Arithmetic, "__init__", changed)


def test_ranks_whose_samples_differ_are_refused_when_the_trainer_is_made(monkeypatch):
    _sample_of_rank_1(monkeypatch, "fp32 products")
    with pytest.raises(ConfigError) as found:
        mock.run(3, trained)
    message = str(found.value)
    assert "rank 1 and rank 0 compute different results from the same numbers (fp32 prod" in message
    assert found.value.exit_code == 64 and found.value.raised_on_all_ranks


def test_other_arithmetic_goes_on_and_is_noted(monkeypatch, tmp_path):
    _sample_of_rank_1(monkeypatch, "fp32 products")
    options = {"checkpoint_dir": tmp_path}

    def work(comm):
        return trained(comm, other_arithmetic=True, options=options).weights_sha256()

    first, second = mock.run(2, work)
    monkeypatch.undo()
    assert first == second == sha_of(None)
    (folder,) = tmp_path.glob("step_*")
    saved = json.loads((folder / "manifest.json").read_text())["values"]["arithmetic"]
    assert [note["step"] for note in saved["notes"]] == [0]


def test_a_resume_on_other_kernels_is_refused_or_noted(monkeypatch, tmp_path):
    options = {"checkpoint_dir": tmp_path, "epochs": 2}
    trained(None, options={**options, "steps": 2})
    changed = {**samples.sample(), "bf16 products": "0" * 16}
    monkeypatch.setattr(samples, "sample", lambda: changed)
    monkeypatch.setitem(os.environ, "ODYSSEY_TARGET_CPU", "x86-64-v3")
    with pytest.raises(ConfigError) as found:
        trained(None, options=options)
    assert "wrote step_00000002 (bf16 products)" in str(found.value)
    assert "ODYSSEY_TARGET_CPU is x86-64-v3 now and not set in step_0" in str(found.value)
    trainer = trained(None, other_arithmetic=True, options=options)
    (note,) = trainer.arithmetic.notes
    assert note["step"] == 2 and "bf16 products" in note["text"]


# --- the first shard ---


@pytest.mark.parametrize(
    "settings",
    [{}, {"zero": 1}, {"zero": 2}, {"precision": "bf16"}, {"execution": "eager"}],
    ids=str,
)
@pytest.mark.parametrize("ranks", [2, 4])  # 4: one has no shard
def test_the_first_shard_is_the_same_on_all_ranks_and_changes_nothing(ranks, settings, prints):
    alone = sha_of(None, precision=settings.get("precision", "fp32"))
    assert not prints
    assert set(mock.run(ranks, lambda comm: sha_of(comm, **settings))) == {alone}
    assert set(prints) == set(range(ranks))
    assert len({value for values in prints.values() for value in values}) == 1


def test_each_fit_compares_the_first_shard(prints):
    mock.run(2, lambda comm: trained(comm, fits=2))
    assert [len(values) for values in prints.values()] == [2, 2]


def test_a_shard_in_parts_is_not_compared(prints):
    mock.run(2, lambda comm: sha_of(comm, zero=3))
    assert not prints


def test_a_rank_whose_gradients_differ_is_refused_before_the_first_update(monkeypatch):
    compute = rank_checks.print_first_shard

    def changed(engine, batch, step):
        return compute(engine, batch, step) ^ (engine.layout.comm.rank == 1)

    monkeypatch.setattr(rank_checks, "print_first_shard", changed)
    with pytest.raises(ConfigError, match=r"rank 1 and rank 0 .*\(gradients of the first shard\)"):
        mock.run(2, trained)
