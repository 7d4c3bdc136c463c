"""Trainings whose ranks do not take every step together: local SGD, and a parameter server with
a staleness bound.

What they have in common: an engine of one rank (`alone`), and parameters that are the same on all
ranks only at times. The trainer asks its mode for the steps of an epoch, and a mode asks the
trainer of its rank; everything else (evaluation, history, files) is the trainer's.
docs/strategies.md says which bits each gives.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checkpoints.trainable import Mode, Tally
from ..comm import Communicator, Request
from ..comm.requests import deadline
from ..core import native
from ..data import Batch
from ..engine.layout import Layout
from ..errors import CollectiveError, NumericsError
from ..optim import Update
from ..parallel import plan as planning
from ..parallel.mesh import Groups, Mesh
from ..parallel.plan import ranges, share
from ..parallel.strategy import Strategy, make

if TYPE_CHECKING:
    from ..train.trainer import DistributedTrainer


def alone(layout: Layout, comm: Communicator) -> tuple[Layout, Groups]:
    """The layout and the groups of a rank that computes by itself."""
    one = Communicator(parent=comm)
    mesh = Mesh(1, 1, 1)
    return dataclasses.replace(layout, comm=one, mesh=mesh, reduction=Strategy()), Groups(one, mesh)


def added(comm: Communicator, *numbers: float) -> list[float]:
    """Numbers of all ranks, added in their order; a collective call."""
    rows = comm.all_gather(np.array(numbers, np.float64))
    return [math.fsum(column) for column in rows.T.tolist()]


def summed(trainer: DistributedTrainer, tally: Tally) -> Tally:
    names = trainer.stepper.metric_names
    local_sums = [tally.loss, tally.correct, *(tally.named.get(name, 0.0) for name in names)]
    loss, correct, *metrics = added(trainer.comm, *local_sums)
    return dataclasses.replace(tally).put(loss, correct, dict(zip(names, metrics, strict=True)))


class LocalSGD(Mode):
    """Every rank trains by itself on its own share of each batch; every `local_steps` steps all
    average (Stich 2019).

    Averaged are the parameters and the optimizer's state (momentum and the like), along the tree
    over ranks. A rank's step divides by its own samples, so with local_steps=1 and plain SGD the
    result is that of the synchronous training but for rounding and, where shares differ in size,
    the weight of a sample.
    """

    together = False

    def __init__(self, trainer: DistributedTrainer, every: int) -> None:
        super().__init__(trainer)
        self.every = every
        self._since = 0
        self._reduction: Any = None

    def part(self, batch: Batch) -> Batch | None:
        comm = self.trainer.comm
        lo, hi = share(len(batch.indices), comm.size, comm.rank)
        return (
            Batch(batch.dataset, batch.indices[lo:hi], batch.epoch, batch.index)
            if hi > lo
            else None
        )

    def shared_out(self, samples: int) -> tuple[int, list[int]]:
        size = self.trainer.comm.size
        return self.trainer.layout.workers, [
            hi - lo for lo, hi in (share(samples, size, r) for r in range(size))
        ]

    def stepped(self) -> None:
        self._since += 1
        if self._since == self.every:
            self.settle()

    @property
    def settled(self) -> bool:
        return not self._since

    def whole_tally(self, tally: Tally) -> Tally:
        return summed(self.trainer, tally)

    def settle(self) -> None:
        if not self._since:
            return
        self._since = 0
        trainer = self.trainer
        comm = self.trainer.comm
        arrays = [trainer.arena.params, *trainer.optimizer.state.values()]
        if self._reduction is None:
            plan = planning.make(comm.size, comm.rank, comm.size, 1, 1)
            self._reduction = make(Strategy(), comm, plan, sum(a.size for a in arrays), 1)
        r = self._reduction
        sent = r.bytes_sent
        np.concatenate(arrays, out=r.buffers[0])
        r.start()
        mean = r.finish() / np.float32(comm.size)
        for a, part in zip(
            arrays, np.split(mean, np.cumsum([a.size for a in arrays[:-1]])), strict=True
        ):
            a[:] = part
        trainer.stepper.count_bytes(r.bytes_sent - sent)

    def epoch(self, batches: Iterable[Batch], limit: int | None) -> Tally:
        """Likewise, and an average at the end."""
        tally = super().epoch(batches, limit)
        self.settle()
        return self.whole_tally(tally)


TAG = 1
PUSH = 0
DONE = 1
TAIL = 32  # floats behind the gradients or parameters of a message


class GradientMessage:
    """A range of gradients (to a server) or of parameters (back), and a few numbers.

    `numbers` int64: to a server: kind, steps this worker has taken, version that its gradients are
    of, samples; back: version, whether to stop. `floats` float32: divisor, sum of losses.
    """

    def __init__(self, floats: int) -> None:
        self.array = native.aligned(-(-floats // 16) * 16 + TAIL)
        self.body = self.array[:floats]
        self.numbers = self.array[-TAIL:-16].view(np.int64)
        self.floats = self.array[-16:]


class AsynchronousServer(Mode):
    """A parameter server that updates with each gradient as it comes, with a bound on staleness
    (Ho et al. 2013).

    Ranks 0 to servers - 1 each own a range of the parameters and compute nothing else, the others
    are workers: docs/strategies.md. A gradient is divided by the samples of its own batch, and the
    schedule goes by the number of updates. One that is t updates old is taken at 1 / (1 + t) of the
    rate (Zhang, Gupta, Lian and Liu 2016).
    """

    together = False
    own_loop = True

    def __init__(self, trainer: DistributedTrainer, staleness: int, servers: int) -> None:
        super().__init__(trainer)
        self.staleness = staleness
        self.servers = range(servers)
        self.workers = range(servers, self.comm.size)
        self.ranges = ranges(trainer.arena.size, servers)
        self._failed = False
        # of this server, over all epochs
        self._late = 0
        self._latest = 0
        self._lead = 0
        self._pushes = 0
        self._steps = dict.fromkeys(self.workers, 0)

    def shared_out(self, samples: int) -> tuple[int, list[int]]:
        return self.trainer.layout.workers, [samples]

    def epoch(self, batches: Iterable[Batch], limit: int | None) -> Tally:
        """Works or serves until all workers have had their batches, of which all together take
        at most `limit`.
        """
        trainer = self.trainer
        comm = self.comm
        tally = Tally()
        batches = iter(batches)
        first = list(itertools.islice(batches, 1))
        for batch in first:  # all ranks read it, and compare what they are given
            trainer.checks.compare_step(batch)
        batches = itertools.chain(first, batches)
        if comm.rank in self.servers:
            self._serve()
        else:
            self._work(batches, limit, tally)
        self._hand_out()
        failed, samples, steps = added(comm, self._failed, tally.samples, tally.steps)
        if failed:
            raise NumericsError(
                f"[async] a gradient or loss is not finite within {int(steps)} steps after step "
                f"{trainer.steps}; its "
                "step was not taken. Lower --lr, warm up, or lower --staleness"
            ).on_all_ranks()
        trainer.steps += int(steps)
        total = summed(trainer, tally)
        total.extra = self._figures()
        total.counted = samples
        total.samples = int(samples)
        total.steps = int(steps)
        return total

    def _work(self, batches: Iterable[Batch], limit: int | None, tally: Tally) -> None:
        trainer = self.trainer
        comm = self.comm
        params = self.trainer.arena.params
        out = [GradientMessage(b - a) for a, b in self.ranges]
        back = [GradientMessage(b - a) for a, b in self.ranges]
        versions = [trainer.steps] * len(out)
        worker_index = comm.rank - len(self.servers)
        stop = False
        for i, batch in enumerate(itertools.islice(batches, limit)):
            if i % len(self.workers) != worker_index:
                continue
            sums, gradients, divisor = trainer.stepper.gradients(batch, trainer.steps + i)
            requests: list[Request] = []
            tally.steps += 1
            for s, (a, b) in zip(self.servers, self.ranges, strict=True):
                message = out[s]
                message.body[:] = gradients[a:b]
                message.numbers[:4] = PUSH, tally.steps, versions[s], len(batch.indices)
                message.floats[:2] = divisor if math.isfinite(sums.loss) else math.nan, sums.loss
                requests.append(comm.recv(back[s].array, s, TAG, wait=False))
                requests.append(comm.send(message.array, s, TAG, wait=False))
                trainer.stepper.count_bytes(message.array.nbytes)
            tally.add(sums.loss, sums.correct, trainer.stepper.measured(sums), len(batch.indices))
            tally.samples += len(batch.indices)
            for request in requests:
                request.wait()
            for s, (a, b) in zip(self.servers, self.ranges, strict=True):
                params[a:b] = back[s].body
                stop = stop or bool(back[s].numbers[1])
                versions[s] = int(back[s].numbers[0])
            if stop:
                break
        for s in self.servers:
            out[s].numbers[:2] = DONE, tally.steps
            comm.send(out[s].array, s, TAG)

    def _serve(self) -> None:  # noqa: PLR0915
        comm = self.comm
        trainer = self.trainer
        a, b = self.ranges[comm.rank]
        inbox = {w: GradientMessage(b - a) for w in self.workers}
        outbox = {w: GradientMessage(b - a) for w in self.workers}
        steps = dict.fromkeys(self.workers, 0)  # of this epoch
        active = set(self.workers)
        held = set()
        receives = {w: comm.recv(inbox[w].array, w, TAG, wait=False) for w in self.workers}
        sends: dict[int, Request] = {}
        samples = 0
        updates = 0
        last_heard = time.monotonic()
        nap = 20e-6
        while active:
            came = [w for w, request in receives.items() if request.test()]
            for w in came:
                receives.pop(w).wait()
                message = inbox[w]
                kind, worker_steps, version, n = message.numbers[:4].tolist()
                if kind == DONE:
                    active.discard(w)
                    continue
                current_version = trainer.steps + updates
                steps[w] = worker_steps
                self._lead = max(self._lead, worker_steps - min(steps[v] for v in active))
                self._late = self._late + current_version - version
                self._latest = max(self._latest, current_version - version)
                self._pushes = self._pushes + 1
                self._steps[w] = self._steps[w] + 1
                if not self._failed and not self._update(
                    message, a, b - a, current_version, current_version - version
                ):
                    self._failed = True
                updates = updates + 1
                samples = samples + n
                held.add(w)
                if comm.rank == 0:
                    context = trainer.context
                    context.tally.steps = updates
                    context.tally.samples = samples
                    context.loss = float(message.floats[1]) / n
                    context.emit("on_server_update")
            slowest = min((steps[w] for w in active), default=0)
            for w in [w for w in held if self._failed or steps[w] - slowest <= self.staleness]:
                held.discard(w)
                if w in sends:
                    sends.pop(w).wait()
                outbox[w].body[:] = trainer.arena.params[a:b]
                outbox[w].numbers[:2] = trainer.steps + updates, int(self._failed)
                receives[w] = comm.recv(inbox[w].array, w, TAG, wait=False)
                sends[w] = comm.send(outbox[w].array, w, TAG, wait=False)
                trainer.stepper.count_bytes(outbox[w].array.nbytes)
            if came:
                last_heard = time.monotonic()
                nap = 20e-6
            elif time.monotonic() - last_heard > min(30.0, deadline()):
                self._listen(receives)
                last_heard = time.monotonic()
            else:
                for request in sends.values():
                    request.test()
                time.sleep(nap)
                nap = min(1.5 * nap, 1e-3)
        for request in sends.values():
            request.wait()

    def _listen(self, receives: dict[int, Request]) -> None:
        """Nobody came for long: waits for one of those that are at work, which says so if that
        rank has ended.
        """
        for w, request in receives.items():
            try:
                request.wait()
                return
            except CollectiveError as error:
                raise CollectiveError(
                    f"[async] no gradient from worker rank {w}: {error}"
                ) from error

    def _update(self, message: GradientMessage, offset: int, n: int, step: int, age: int) -> bool:
        """Takes one step with a gradient that is `age` updates old; False if it is not finite."""
        trainer = self.trainer
        if not math.isfinite(message.floats[0]):
            return False
        params = trainer.arena.address(native.PARAMS) + 4 * offset
        updates = [Update(params, message.body.ctypes.data, offset, n, offset)] if n else []
        return trainer.optimizer.apply(
            updates, message.floats.ctypes.data, trainer.rate(step) / (1 + age)
        )

    def _hand_out(self) -> None:
        """Gives all ranks what the servers have."""
        optimizer = self.trainer.optimizer
        comm = self.comm
        for s, (a, b) in zip(self.servers, self.ranges, strict=True):
            for array in (self.trainer.arena.params, *optimizer.state.values()):
                comm.broadcast(array[a:b], s)
        steps = np.array([optimizer.steps], np.int64)
        optimizer.steps = int(comm.broadcast(steps, 0)[0])

    def _figures(self) -> dict[str, Any]:
        """Returns the history of all epochs so far, as the first server saw them, on all ranks;
        a collective call.
        """
        numbers = [self._late, self._latest, self._lead, self._pushes, *self._steps.values()]
        late, latest, lead, pushes, *steps = self.comm.broadcast(
            np.array(numbers, np.int64), 0
        ).tolist()
        return {
            "steps_of_worker": {str(w): n for w, n in zip(self.workers, steps, strict=True)},
            "staleness_mean": late / max(pushes, 1),
            "staleness_largest": latest,
            "lead_largest": lead,
        }

    def summary(self, record: dict[str, Any]) -> str:
        steps = ", ".join(f"{n} of rank {w}" for w, n in record["steps_of_worker"].items())
        return (
            f"[async] steps: {steps}; a gradient was {record['staleness_mean']:.2f} updates old in "
            f"the mean, at most {record['staleness_largest']}; the fastest worker was at most "
            f"{record['lead_largest']} steps ahead (bound {self.staleness} before it waits)"
        )


def mode(trainer: DistributedTrainer, strategy: Strategy) -> Mode:
    """How the trainer's ranks take steps."""
    if strategy.reduction == "local_sgd":
        return LocalSGD(trainer, strategy.local_steps)
    return AsynchronousServer(trainer, strategy.staleness, strategy.servers)
