"""Hyperparameters: trials of a training side by side, each on a group of ranks, by Optuna; needs
the extra `[tune]`.

The study is Optuna's and so are its storage, samplers and pruners. What is added: the ranks of a
trial share what it is given and what is decided, a trial is claimed once, and trials that a killed
job left are run again. docs/tune.md.
"""

from __future__ import annotations

import inspect
import math
import os
import shutil
import sys
import tempfile
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import comm as communication
from ..base import expand_path, install_extra
from ..callbacks import Callback, Context, Monitor
from ..comm import base
from ..errors import ConfigError, NumericsError, check_integer, counted, printable
from ..metrics import direction_of
from ..train import by_first

try:
    import optuna
    from optuna.distributions import (
        BaseDistribution,
        CategoricalDistribution,
        FloatDistribution,
        IntDistribution,
    )
    from optuna.trial import TrialState
except ImportError as e:
    raise ConfigError(f"[tune] odyssey.tune needs Optuna ({e}); {install_extra('tune')}") from e

SAMPLERS = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
DIRECTIONS = ("maximize", "minimize")
JOB = "odyssey_job"  # attribute of a study: who works on it
REASON = "odyssey_reason"  # attribute of a trial that failed: why
POLL_S = 0.5  # between two looks of ranks that have no trial, while others have


def uniform(low: float, high: float) -> FloatDistribution:
    """A number from low to high."""
    return FloatDistribution(low, high)


def loguniform(low: float, high: float) -> FloatDistribution:
    """A number from low to high, each order of magnitude alike."""
    return FloatDistribution(low, high, log=True)


def randint(low: int, high: int) -> IntDistribution:
    """An integer from low to high - 1."""
    return IntDistribution(low, high - 1)


def choice(values: Sequence[Any]) -> CategoricalDistribution:
    """One of the values: None, bool, int, float or str."""
    return CategoricalDistribution(tuple(values))


class Trial:
    """One trial, on each rank of its group: number, params.

    pruned: whether it was decided that it ends early.
    """

    def __init__(
        self,
        comm: base.Communicator,
        trial: optuna.Trial | None,
        number: int,
        params: dict[str, Any],
    ) -> None:
        self.comm = comm
        self.number = number
        self.params = params
        self.pruned = False
        self._trial = trial  # of the group's first rank

    def report(self, value: float, step: int) -> None:
        """An intermediate value, for the pruner and the storage: that of the group's first rank
        counts. What a trial that is run again reports a second time is not kept twice.
        """
        if self._trial is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._trial.report(float(value), step)

    def should_prune(self) -> bool:
        """Returns whether the pruner gives this trial up, agreed by the group's ranks: all of
        them call it.
        """
        local_decision = self._trial is not None and self._trial.should_prune()
        self.pruned = bool(self.comm.broadcast(np.array([local_decision], np.uint8))[0])
        return self.pruned

    def pruning(self, monitor: str) -> Callback:
        """A callback for fit(): reports a figure of each epoch, and finishes the training if the
        trial is pruned.
        """
        return Pruning(self, monitor)


class Pruning(Monitor):
    def __init__(self, trial: Trial, monitor: str) -> None:
        super().__init__(monitor, mode="min")  # the study compares, so the mode has no effect
        self.trial = trial

    def on_epoch_end(self, context: Context) -> None:
        value = self.value(context)
        if value is not None:
            self.trial.report(value, context.epoch)
        if self.trial.should_prune():
            context.finish("the trial is pruned")


class DistributedTuner:
    """Looks for the values of `search_space` with which `train_fn` does best.

    Args:
        train_fn: train_fn(config) or train_fn(config, trial), called on all ranks of a trial:
            comm.world() is this group there, so trainers and loaders take it. config: {name:
            value}. It returns the figure to judge by: a number, a dict that has it, or the history
            that fit() returns; None, or optuna.TrialPruned: it is pruned.
        search_space: {name: uniform(..), loguniform(..), randint(..), choice(..), an Optuna
            distribution, or a list of values}.
        num_gpus, trials_per_gpu: no more than num_gpus * trials_per_gpu ranks work at a time. None:
            all there are.
        metric: name of the figure in what train_fn returns; not needed for a number, or a dict of
            one.
        direction: "maximize" or "minimize". None: what the metric's name says
            (`odyssey.metrics.direction_of`), or maximize if `metric` is None.
        storage: where the study is kept: a file (*.db: SQLite, else Optuna's journal), or a URL as
            Optuna has them. None: in memory, or in a temporary file. A study that is there goes on.
        study_name: several studies may share a storage.
        sampler: "tpe" (Optuna's default), "random", a class or function that takes seed=, or a
            sampler.
        pruner: an Optuna pruner. None: Optuna's default, MedianPruner.
        ranks_per_trial: a trial's ranks. Trials run side by side on as many groups as there are
            ranks for.
        seed: a trial's sampler is made with a seed that is a function of this and of its number. So
            "random" draws the same on any number of groups and over restarts, and so does "tpe"
            where one trial runs after the other; side by side it knows the trials that have ended,
            and these are a matter of time.
        catch: exceptions of train_fn, raised on all ranks of a trial, that end the trial only, in
            addition to NumericsError. So a trial that diverges fails, and the search continues.
        verbose: rank 0 prints a line for each trial that has ended.

    Raises ConfigError: an argument is not allowed, `direction` is None and the metric's name is
    unknown, or there are fewer ranks than a trial needs.
    """

    def __init__(
        self,
        train_fn: Callable[..., Any],
        search_space: Mapping[str, Any],
        num_gpus: int | None = None,
        trials_per_gpu: int = 1,
        *,
        metric: str | None = None,
        direction: str | None = None,
        storage: str | Path | None = None,
        study_name: str = "odyssey",
        sampler: Any = "tpe",
        pruner: optuna.pruners.BasePruner | None = None,
        ranks_per_trial: int = 1,
        seed: int = 0,
        catch: tuple[type[Exception], ...] = (),
        verbose: bool = True,
        comm: base.Communicator | None = None,
    ) -> None:
        if not callable(train_fn):
            raise ConfigError(f"[tune] train_fn is {train_fn!r}; give a function of a config")
        if not isinstance(search_space, Mapping) or not search_space:
            raise ConfigError(
                f"[tune] search_space is {search_space!r}; give {{name: tune.loguniform(1e-4, "
                f"1e-1), ..}}"
            )
        if direction not in (None, *DIRECTIONS):
            raise ConfigError(
                f"[tune] direction is {direction!r}; choose from {', '.join(DIRECTIONS)}"
            )
        if isinstance(sampler, str) and sampler not in SAMPLERS:
            raise ConfigError(
                f"[tune] sampler is {sampler!r}; choose from {', '.join(SAMPLERS)}, or give "
                "Optuna's"
            )
        self.train_fn = train_fn
        self.metric = metric
        self.catch = (NumericsError, *catch)
        self.verbose = verbose
        self.space = {name: _distribution(name, domain) for name, domain in search_space.items()}
        self.direction = direction or _direction(metric)
        self.comm = world = communication.world() if comm is None else comm
        self.seed = check_integer("[tune] seed", seed, 0)
        self.ranks_per_trial = size = check_integer("[tune] ranks_per_trial", ranks_per_trial, 1)
        if size > world.size:
            raise ConfigError(
                f"[tune] ranks_per_trial is {size}, and the job has {counted(world.size)}; start "
                f"it with mpirun -n {size}"
            )
        groups = limit = world.size // size
        if num_gpus is not None:
            gpus = check_integer("[tune] num_gpus", num_gpus, 1)
            groups = max(
                1, gpus * check_integer("[tune] trials_per_gpu", trials_per_gpu, 1) // size
            )
        self.groups = min(groups, limit)
        if groups > limit and world.rank == 0 and verbose:
            _say(
                f"{groups} trials at a time are asked for, {limit} run: mpirun -n {groups * size} "
                "is needed for all"
            )
        self._place = None if storage is None else _expand_place(os.fspath(storage))
        self._name = study_name
        self._sampler = sampler
        self._pruner = pruner
        self._storage: optuna.storages.BaseStorage | None = None
        # of this group's first rank: the one it has claimed
        self._trial: optuna.Trial | None = None
        self._reported_trials: set[int] = set()
        self.best_params: dict[str, Any] = {}
        self.best_value: float | None = None
        # on the first rank of each group, once tune() was called
        self.study: optuna.Study | None = None

    def tune(self, num_samples: int) -> dict[str, Any]:
        """Runs trials until the study has `num_samples` that have ended; the best one's params,
        on all ranks.

        A study in a storage goes on: trials that have ended count, those that were under way are
        run again with their params. All ranks call it; one job at a time works on a study.

        If the search ends early, by an error or a request to stop, rank 0 prints the best of the
        trials that have ended, and `best_params` and `best_value` are theirs.

        Raises ConfigError: num_samples is not allowed, the storage cannot be used, train_fn
        returned no figure, or all trials failed.
        """
        check_integer("[tune] num_samples", num_samples, 1)
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # rank 0 speaks, in _tell
        size = self.ranks_per_trial
        world = self.comm
        # ranks that are left over are a group that only waits
        number = min(world.rank // size, self.groups)
        group = world.split(number)
        assert group is not None
        # threads and GPUs of a machine are shared by all groups on it
        group.local_rank = world.local_rank
        group.local_size = world.local_size
        job, place = _shared(world, lambda: self._begin(num_samples))
        if group.rank == 0 and self.study is None:
            self.study = self._open(place)
        try:
            self._run_trials(group, job, works=number < self.groups)
        except BaseException:
            if world.rank == 0:
                self._keep_best()
            raise
        group.close()
        self.best_value, self.best_params = _shared(world, self._best)
        return self.best_params

    def _run_trials(self, group: base.Communicator, job: str, works: bool) -> None:
        """Claims trials and runs them, until all have ended. Collective over the group.

        works: False for the group of ranks that are left over, which only waits.
        """
        outside = getattr(base.here, "world", None)
        while (claimed := _shared(group, lambda: self._claim(job, works))) is not None:
            if claimed:
                trial = Trial(group, self._trial, *claimed)
                base.here.world = group
                try:
                    outcome = self._play(trial)
                finally:
                    base.here.world = outside
                if group.rank == 0:
                    self._check_job(job)
                    if outcome.reason:
                        self._trial.set_user_attr(REASON, outcome.reason)
                    # SQLite locks no rows: two groups may have claimed this trial, and both have
                    # the same result
                    self.study.tell(
                        self._trial, outcome.value, outcome.state, skip_if_finished=True
                    )
            if self.comm.rank == 0 and self.verbose:
                self._tell()

    # --- the study: on the first rank of each group ---

    def _begin(self, num_samples: int) -> tuple[str, str]:
        """Opens the study for this job alone, with all its trials; who the job is, and where the
        study is kept.
        """
        if self._place is None:
            self._place = ""
            if self.comm.size > self.ranks_per_trial:
                folder = tempfile.mkdtemp(prefix="odyssey-tune-")
                weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
                self._place = f"{folder}/journal.log"
        job = uuid.uuid4().hex
        if self.study is None:
            self.study = self._open(self._place, make=True)
        if self.study.direction.name.lower() != self.direction:
            raise ConfigError(
                f"[tune] the study {self._name!r} is to {self.study.direction.name.lower()} its "
                f"figure, this tuner to {self.direction}; give direction=, or another study_name="
            )
        trials = self.study.get_trials(deepcopy=False)
        for name, d in (
            (name, d)
            for trial in trials
            for name, d in trial.distributions.items()
            if name in self.space
        ):
            try:
                optuna.distributions.check_distribution_compatibility(d, self.space[name])
            except ValueError:
                raise ConfigError(
                    f"[tune] the study {self._name!r} draws {name!r} from {d}, this tuner from "
                    f"{self.space[name]}; a "
                    "study keeps choices and scales: give these, or another study_name= or storage"
                ) from None
        self.study.set_user_attr(JOB, job)
        for trial in trials:
            if trial.state == TrialState.RUNNING:  # of a job that is gone
                self._storage.set_trial_state_values(self._id(trial.number), TrialState.WAITING)
        for _ in range(num_samples - len(trials)):
            self.study.enqueue_trial({})  # claimed by its number; its params are drawn then
        return job, self._place

    def _open(self, place: str, make: bool = False) -> optuna.Study:
        try:
            self._storage = _storage(place)
            if make:
                options = {
                    "direction": self.direction,
                    "pruner": self._pruner,
                    "load_if_exists": True,
                }
                return optuna.create_study(storage=self._storage, study_name=self._name, **options)
            return optuna.load_study(
                storage=self._storage, study_name=self._name, pruner=self._pruner
            )
        except Exception as e:
            storage_errors = (
                OSError,
                ImportError,
                KeyError,
                ValueError,
                optuna.exceptions.StorageInternalError,
            )
            # which is not imported for other storages
            database = type(e).__module__.startswith("sqlalchemy")
            if isinstance(e, ConfigError) or not (isinstance(e, storage_errors) or database):
                raise
            raise ConfigError(
                f"[tune] the storage {place!r} cannot be used: {printable(str(e), limit=200)}"
            ) from e

    def _id(self, number: int) -> int:
        storage = self._storage
        return storage.get_trial_id_from_study_id_trial_number(
            storage.get_study_id_from_name(self._name), number
        )

    def _check_job(self, job: str) -> None:
        if self.study.user_attrs.get(JOB) != job:
            raise ConfigError(
                f"[tune] another job works on the study {self._name!r} now; give another "
                "study_name="
            )

    def _claim(self, job: str, works: bool) -> tuple[int, dict[str, Any]] | tuple[()] | None:
        """A trial's number and params; () if there may be something later, None if all have
        ended.
        """
        self._check_job(job)
        if works:
            for waiting in self.study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
                trial = self._id(waiting.number)
                try:
                    # True for one who asks
                    claimed = self._storage.set_trial_state_values(trial, TrialState.RUNNING)
                except optuna.exceptions.UpdateFinishedTrialError:  # another group was quick
                    claimed = False
                if claimed:
                    self.study.sampler = self._sampler_of(waiting.number)
                    self._trial = optuna.trial.Trial(self.study, trial)
                    return waiting.number, {
                        name: _draw(self._trial, name, d) for name, d in self.space.items()
                    }
        if not self.study.get_trials(
            deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING)
        ):
            return None
        time.sleep(POLL_S)
        return ()

    def _sampler_of(self, number: int) -> optuna.samplers.BaseSampler:
        if isinstance(self._sampler, optuna.samplers.BaseSampler):
            return self._sampler
        seed = int(np.random.SeedSequence([self.seed, number]).generate_state(1)[0])
        return SAMPLERS.get(self._sampler, self._sampler)(seed=seed)

    def _best(self) -> tuple[float, dict[str, Any]]:
        if not self._completed():
            failed = self.study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
            cause = ""
            if failed:
                reason = failed[-1].user_attrs.get(REASON, "failed")
                cause = f" (trial {failed[-1].number}: {printable(reason, limit=200)})"
            raise ConfigError(
                f"[tune] no trial was completed, so there is no best one{cause}; search among "
                "other values"
            )
        return self.study.best_value, self.study.best_params

    def _completed(self) -> list[optuna.trial.FrozenTrial]:
        """Returns the trials that have a figure."""
        return self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))

    def _keep_best(self) -> None:
        """Prints and keeps the best of the trials that have ended, for a search that ends early."""
        if self.verbose:
            self._tell()
        completed = self._completed()
        if not completed:
            return
        self.best_value = self.study.best_value
        self.best_params = self.study.best_params
        if self.verbose:
            trials = "1 trial" if len(completed) == 1 else f"{len(completed)} trials"
            _say(
                f"the search ends early, after {trials}: the best is trial "
                f"{self.study.best_trial.number}, {self.metric or 'value'} {self.best_value:.6g}  "
                f"{_spell(self.best_params)}"
            )

    def _tell(self) -> None:
        """A line for each trial that has ended since it was asked for the last time."""
        for trial in self.study.get_trials(deepcopy=False):
            if not trial.state.is_finished() or trial.number in self._reported_trials:
                continue
            self._reported_trials.add(trial.number)
            if trial.state == TrialState.FAIL:
                figure = "failed"
            elif trial.value is None:
                figure = trial.state.name.lower()
            else:
                figure = f"{self.metric or 'value'} {trial.value:.6g}"
            reason = trial.user_attrs.get(REASON)
            cause = f"  ({printable(reason, limit=400)})" if reason else ""
            _say(f"trial {trial.number}: {figure}  {_spell(trial.params)}{cause}")

    # --- a trial ---

    def _play(self, trial: Trial) -> _Outcome:
        """Calls train_fn, and returns how the trial ended."""
        try:
            takes = inspect.signature(self.train_fn).parameters
            arguments = (trial.params, trial) if len(takes) > 1 else (trial.params,)
            result = self.train_fn(*arguments)
        except optuna.TrialPruned:
            return _Outcome(TrialState.PRUNED)
        except self.catch as problem:
            return _Outcome(TrialState.FAIL, reason=f"{type(problem).__name__}: {problem}")
        if trial.pruned or result is None:
            return _Outcome(TrialState.PRUNED)
        value = self._figure(result)
        if not math.isfinite(value):
            return _Outcome(TrialState.FAIL, reason=f"{self.metric or 'the value'} is {value}")
        return _Outcome(TrialState.COMPLETE, value)

    def _figure(self, result: Any) -> float:
        """The number to judge by in what train_fn returned."""
        if hasattr(result, "records"):  # a History
            result = result.records[-1] if result.records else {}
        if isinstance(result, Mapping):
            name = self.metric or (next(iter(result)) if len(result) == 1 else None)
            if (
                name is None
                or name not in result
                or (self.metric is None and direction_of(name) not in (None, self.direction))
            ):
                names = ", ".join(map(repr, result)) or "nothing"
                raise ConfigError(
                    f"[tune] train_fn returned {names}; say with metric= which of them is to "
                    "judge by"
                )
            result = result[name]
            if result is None:
                raise ConfigError(
                    f"[tune] train_fn has no {name!r}: it did not evaluate; let it, or give "
                    "another metric"
                )
        try:
            return float(result)
        except (TypeError, ValueError):
            raise ConfigError(
                f"[tune] train_fn returned a {type(result).__name__}; return a number, a dict of "
                "them, or a history"
            ) from None


class _Outcome(NamedTuple):
    """How a trial ended: its state, its figure if it was completed, and why it failed."""

    state: TrialState
    value: float | None = None
    reason: str = ""


class Analysis(NamedTuple):
    best_config: dict[str, Any]
    best_result: float


def run(
    train_fn: Callable[..., Any],
    config: Mapping[str, Any],
    num_samples: int = 1,
    resources_per_trial: Any = None,
    **options: Any,
) -> Analysis:
    """Ray Tune's spelling: DistributedTuner(train_fn, config, **options).tune(num_samples).
    resources_per_trial: {"cpu" or "gpu": ranks of a trial}.
    """
    ranks = max(map(int, (resources_per_trial or {}).values()), default=1)
    tuner = DistributedTuner(train_fn, config, **{"ranks_per_trial": max(1, ranks), **options})
    return Analysis(tuner.tune(num_samples), tuner.best_value)


def _direction(metric: str | None) -> str:
    """Returns the direction of a search by the name of its metric.

    Raises ConfigError if the name doesn't say whether less or more is better.
    """
    if metric is None:
        return "maximize"
    direction = direction_of(metric)
    if direction is None:
        raise ConfigError(
            f"[tune] less or more of {metric!r} may be better; give direction='minimize' or "
            "'maximize' (--direction)"
        )
    return direction


def _spell(params: Mapping[str, Any]) -> str:
    """Returns the params of a trial as a line shows them."""
    return "  ".join(
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in params.items()
    )


def _say(line: str) -> None:
    print(f"odyssey: {line}", file=sys.stderr, flush=True)


def _distribution(name: str, domain: Any) -> BaseDistribution:
    if isinstance(domain, BaseDistribution):
        return domain
    if isinstance(domain, (list, tuple)) and domain:
        return choice(domain)
    raise ConfigError(
        f"[tune] search_space[{name!r}] is {domain!r}; give tune.loguniform(1e-4, 1e-1), or a "
        "list of values"
    )


def _draw(trial: optuna.Trial, name: str, d: BaseDistribution) -> Any:
    if isinstance(d, CategoricalDistribution):
        return trial.suggest_categorical(name, d.choices)
    suggest = trial.suggest_int if isinstance(d, IntDistribution) else trial.suggest_float
    return suggest(name, d.low, d.high, step=d.step, log=d.log)


def _expand_place(place: str) -> str:
    """Returns a place of a study: a URL as it is, or the path of a file, expanded."""
    return place if "://" in place or not place else str(expand_path(place))


def _storage(place: str) -> optuna.storages.BaseStorage:
    """Where a study is kept: "" is memory."""
    if not place:
        return optuna.storages.InMemoryStorage()
    if "://" not in place and place.endswith((".db", ".sqlite", ".sqlite3")):
        place = f"sqlite:///{place}"
    if "://" not in place:
        os.makedirs(os.path.dirname(os.path.abspath(place)), exist_ok=True)
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(place))
    # groups write at the same time
    patient = {"connect_args": {"timeout": 60}} if place.startswith("sqlite") else {}
    return optuna.storages.RDBStorage(place, engine_kwargs=patient)


def _shared(comm: base.Communicator, read: Callable[[], Any]) -> Any:
    """Does what by_first() does; an error of a group is its own, and on all ranks only if they
    are in it.
    """
    try:
        return by_first(comm, read)
    except ConfigError as error:
        error.raised_on_all_ranks = comm.size == communication.world().size
        raise
