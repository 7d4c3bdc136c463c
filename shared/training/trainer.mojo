"""DistributedTrainer: epochs over batches, a step that all ranks take or none, evaluation, history.

The Mojo counterpart of python/odyssey/trainer.py: with the same settings it has the same weights, to the last bit, on
any number of ranks and threads. It knows nothing about where shards are computed (engine.mojo) or how sums travel
(reduction.mojo); a world of one is the ordinary case.
"""

from std.math import ceildiv
from std.runtime import parallelism_level
from std.sys import stderr
from std.time import perf_counter_ns

from kernels.fingerprint import fingerprint

from .checkpoint import Store
from .communicator import ReduceOp
from .data import Batch, DataLoader
from .engine import Engine
from .history import EpochRecord, Evaluation, History
from .json import JsonObject, parse_json
from .losses import CrossEntropyLoss, Loss
from .module import Module
from .norm import global_norm
from .optimizers import Optimizer
from .resume import (
    Cursor,
    Tally,
    capture,
    configuration,
    progress_of,
    restore,
)
from .runner import Layout, Sums
from .schedules import Schedule, constant
from .session import Session
from .snapshot import step_name
from .world import World, connect

comptime _CHECK_EVERY = 100  # steps from one comparison of the ranks' weights to the next


struct DistributedTrainer[M: Module, O: Optimizer, L: Loss = CrossEntropyLoss](
    Movable
):
    """Trains a model on all workers of all ranks, with the same bits whatever their number.

    Parameters:
        M: The model.
        O: The optimizer.
        L: The loss.
    """

    var engine: Engine[Self.M, Self.L]
    """The model and its parameters."""
    var optimizer: Self.O
    """The optimizer and its state."""
    var comm: World
    """The ranks."""
    var schedule: Schedule
    """Factor on the learning rate as a function of the step."""
    var accumulation_steps: Int
    """Batches of the loader that make one optimizer step."""
    var clip_norm: Optional[Float64]
    """Gradients are scaled down to this global norm."""
    var steps: Int
    """Optimizer steps so far."""
    var verbose: Bool
    """Whether rank 0 prints a line per epoch."""
    var _workers: Int

    def __init__(
        out self,
        var model: Self.M,
        var optimizer: Self.O,
        num_gpus: Optional[Int] = None,
        backend: String = "auto",
        *,
        shard_size: Optional[Int] = None,
        threads: Int = 0,
        schedule: Schedule = constant(),
        seed: UInt64 = 0,
        accumulation_steps: Int = 1,
        clip_norm: Optional[Float64] = None,
        verbose: Bool = False,
    ) raises:
        """Connects the ranks, lays the model's parameters out and gives them their initial numbers.

        Args:
            model: Any Module.
            optimizer: SGD(lr=0.01), Adam(), ...; it is bound to the model here.
            num_gpus: Workers of this process, 1 unless given. They are CPU workers; a line says so.
            backend: "auto", "mpi" or "local" (world.connect).
            shard_size: Samples per shard, 32 unless given, or the model's micro-batch. It is part of what is computed;
                the number of workers is not.
            threads: Of this process; by default, and with 0, its cores divided by the ranks on this machine.
            schedule: Factor on the learning rate.
            seed: Of initial weights and of dropout.
            accumulation_steps: Batches of the loader that make one optimizer step.
            clip_norm: Gradients are scaled down to this global norm if theirs is larger.
            verbose: Whether rank 0 prints a line per epoch.

        Raises:
            Error: A setting is not allowed, the ranks differ, or MPI cannot be used.
        """
        var micro = Self.M.micro_batch()
        _at_least_one("shard_size", shard_size.or_else(1))
        if micro > 0 and shard_size.or_else(micro) != micro:
            raise Error(
                "[train] shard_size is ",
                shard_size.value(),
                " and the model's micro-batch ",
                micro,
                "; a micro-batch is a shard: give one of them",
            )
        _at_least_one("accumulation_steps", accumulation_steps)
        _at_least_one("num_gpus", num_gpus.or_else(1))
        if threads < 0:
            _at_least_one("threads", threads)
        if clip_norm and not (
            clip_norm.value() > 0 and clip_norm.value() <= Float64.MAX_FINITE
        ):
            raise Error(
                "[train] clip_norm is ",
                clip_norm.value(),
                "; it must be above 0 and finite",
            )
        if seed >= UInt64(1) << 63:
            raise Error("[train] seed is ", seed, "; 0 to 2^63 - 1 are allowed")
        self.comm = connect(backend)
        self._workers = num_gpus.or_else(1)
        var lanes = max(1, parallelism_level() // self.comm.local_size())
        self.engine = Engine[Self.M, Self.L](
            model^,
            seed=seed,
            layout=Layout(
                self.comm.rank(),
                self.comm.size(),
                self._workers,
                threads if threads else lanes,
                shard_size.or_else(micro if micro > 0 else 32),
            ),
        )
        self.optimizer = optimizer^
        self.optimizer.bind(self.engine.parameters.size)
        self.schedule = schedule
        self.accumulation_steps = accumulation_steps
        self.clip_norm = clip_norm
        self.steps = 0
        self.verbose = verbose
        if num_gpus and self.comm.rank() == 0:
            print(
                "odyssey: Mojo programs compute on the CPU in this version: ",
                self._workers,
                " CPU worker is used" if self._workers
                == 1 else " CPU workers are used",
                sep="",
                file=stderr,
            )
        if self.comm.size() > 1:
            self._choose_places()
        self._same_everywhere()

    def _choose_places(mut self) raises:
        """Whether ranks are the places of the model, or have all of it; a line says which if it has several.
        """
        var found = self.engine.places()
        self.engine.staged = found == self.comm.size()
        if self.engine.staged and self._workers > 1:
            raise Error(
                "[train] num_gpus is ",
                self._workers,
                (
                    ", but each rank has one place of the model and is one"
                    " worker; leave num_gpus out"
                ),
            )
        if found > 1 and self.comm.rank() == 0:
            var how = String(
                "each has all ",
                found,
                " places of the model and a share of the samples",
            )
            if self.engine.staged:
                how = "each has one place of the model"
            print(
                "odyssey: ",
                self.comm.size(),
                " ranks, ",
                how,
                sep="",
                file=stderr,
            )

    def _same_everywhere(self) raises:
        """Compares settings with those of the other ranks, then gives all rank 0's parameters.
        """
        if self.comm.size() == 1:
            return
        ref e = self.engine
        var layout = String()
        for i in range(len(e.parameters)):
            layout += e.parameters.names[i]
            for s in e.parameters.shapes[i]:
                layout += String(" ", s)
        var rule = self.optimizer.description().text
        var plan = String()
        for step in range(0, 2000, 100):
            plan += String(self.schedule(step), " ")
        var clip = self.clip_norm.or_else(0)
        self._compare("model", layout)
        self._compare("number of workers", String(self._workers))
        self._compare("shard size", String(e.layout.shard_size))
        self._compare(
            "accumulation and clipping",
            String(self.accumulation_steps, " ", clip),
        )
        self._compare("seed", String(e.seed))
        self._compare("optimizer", rule)
        self._compare("schedule", plan)
        self.comm.broadcast_floats(e.arena, e.parameters.size)

    def _compare(self, name: String, value: String) raises:
        """Raises on all ranks if a rank's setting is another; a collective call.
        """
        if self.comm.size() == 1:
            return
        var h = Int64(hash(value) & 0x7FFF_FFFF_FFFF_FFFF)
        var both: List[Int64] = [h, -h]
        self.comm.all_reduce(both, ReduceOp.MAX)
        if both[0] != -both[1]:
            raise Error(
                "[train] the ",
                name,
                " of one rank differs from that of another; start all ranks",
                " alike",
            )

    def rate(self, step: Int) -> Float64:
        """The learning rate of a step.

        Args:
            step: From 0.

        Returns:
            The rate.
        """
        return self.optimizer.rate() * self.schedule(step)

    def train_step(
        mut self, batch: Batch, ref loader: DataLoader
    ) raises -> Sums:
        """One optimizer step over a global batch, of which each rank computes its shards.

        Args:
            batch: The same on all ranks.
            loader: That it came from.

        Returns:
            Sums of the losses and of correct predictions over its samples.

        Raises:
            Error: The loss or a gradient is not finite; nothing was changed, on no rank.
        """
        var sums = self.engine.run(
            self.comm, batch, loader.dataset, self.steps, True
        )
        var rate = self.rate(self.steps)
        var divisor = Float32(sums.samples)
        var size = self.engine.parameters.size
        if self.clip_norm:
            var d = sums.samples
            var norm = global_norm(sums.grads, size) / d
            if norm - norm == 0 and norm > self.clip_norm.value():
                d *= norm / self.clip_norm.value()
            divisor = Float32(d)
        var finite = sums.loss - sums.loss == 0
        if not finite or not self.optimizer.apply(
            self.engine.arena, sums.grads, size, divisor, rate
        ):
            raise Error(
                "[train] the ",
                "gradient" if finite else "loss",
                " is not finite at step ",
                self.steps + 1,
                " (epoch ",
                batch.epoch + 1,
                ", batch ",
                batch.index + 1,
                ", rate ",
                rate,
                "); the step was not taken. Lower the rate, or warm up",
            )
        self.steps += 1
        if self.steps % _CHECK_EVERY == 0:
            self.check_replicas()
        return sums

    def check_replicas(self) raises:
        """Compares the weights of all ranks; a collective call.

        Raises:
            Error: They differ, as after a flipped bit in one rank's memory.
        """
        if self.comm.size() == 1:
            return
        ref e = self.engine
        var print_ = fingerprint(e.arena, e.parameters.size, 0) >> 1
        var both: List[Int64] = [Int64(print_), -Int64(print_)]
        self.comm.all_reduce(both, ReduceOp.MAX)
        if both[0] != -both[1]:
            raise Error(
                "[check] step ",
                self.steps,
                ": the weights of the ranks differ; they must be equal: a",
                " memory or hardware error, or a write into parameters",
                " outside the optimizer",
            )

    def evaluate(mut self, mut loader: DataLoader) raises -> Evaluation:
        """Mean loss and accuracy over the batches of a loader, dropout off.

        Args:
            loader: Its first epoch is taken.

        Returns:
            The means.

        Raises:
            Error: Samples do not fit the model.
        """
        var loss = Float64(0)
        var correct = Float64(0)
        var count = Float64(0)
        for i in range(len(loader)):
            var batch = loader.batch(0, i, loader.batch_size)
            var sums = self.engine.run(
                self.comm, batch, loader.dataset, 0, False
            )
            loss += sums.loss
            correct += sums.correct
            count += sums.samples
        return Evaluation(loss / count, correct / count, Int(count))

    def train(
        mut self,
        mut loader: DataLoader,
        epochs: Int = 1,
        steps: Optional[Int] = None,
        *,
        checkpoint_dir: String = "",
        checkpoint_every: Int = 0,
        keep: Int = 3,
    ) raises -> History:
        """Trains for `epochs` epochs, or until `steps` optimizer steps have been taken.

        With checkpoints it goes on where the newest valid one is, whatever made it, Python or Mojo, on any number of
        ranks, with the bits of a training that was never stopped.

        Args:
            loader: Its batch_size is the global batch.
            epochs: At least 1.
            steps: Ends the training early.
            checkpoint_dir: Where checkpoints go; "" for none.
            checkpoint_every: Steps from one to the next; 0: at the ends of epochs. There is always one at the end.
            keep: The newest so many stay, at least 2.

        Returns:
            What it did, since it began.

        Raises:
            Error: A setting is not allowed, a number is not finite, or a checkpoint is of another training.
        """
        var s = self._begin(
            loader, epochs, steps, checkpoint_dir, checkpoint_every, keep
        )
        while not s.finished():
            self._epoch(loader, s)
            self._ended(s)
        return self._end(loader, s)

    def train(
        mut self,
        mut loader: DataLoader,
        mut validation: DataLoader,
        epochs: Int = 1,
        steps: Optional[Int] = None,
        *,
        checkpoint_dir: String = "",
        checkpoint_every: Int = 0,
        keep: Int = 3,
    ) raises -> History:
        """The same, with an evaluation after each epoch.

        Args:
            loader: Its batch_size is the global batch.
            validation: What to evaluate on.
            epochs: At least 1.
            steps: Ends the training early.
            checkpoint_dir: Where checkpoints go; "" for none.
            checkpoint_every: Steps from one to the next; 0: at the ends of epochs. There is always one at the end.
            keep: The newest so many stay, at least 2.

        Returns:
            What it did, since it began.

        Raises:
            Error: A setting is not allowed, a number is not finite, or a checkpoint is of another training.
        """
        var s = self._begin(
            loader, epochs, steps, checkpoint_dir, checkpoint_every, keep
        )
        while not s.finished():
            self._epoch(loader, s)
            var last = len(s.progress.history.records) - 1
            s.progress.history.records[last].test = self.evaluate(validation)
            self._ended(s)
        return self._end(loader, s)

    def _begin(
        mut self,
        mut loader: DataLoader,
        epochs: Int,
        steps: Optional[Int],
        folder: String,
        every: Int,
        keep: Int,
    ) raises -> Session:
        """Checks what the training is to do, and goes to its newest checkpoint; a collective call.
        """
        _at_least_one("epochs", epochs)
        _at_least_one("steps", steps.or_else(1))
        if every < 0 or (every > 0 and folder == ""):
            raise Error(
                "[checkpoint] checkpoint_every is ",
                every,
                "; it must be 0 or more, with a checkpoint_dir",
            )
        var size = loader.batch_size * self.accumulation_steps
        var n = min(size, len(loader.dataset))
        var shard = self.engine.layout.shard_size
        var workers = self._workers * self.comm.size()
        if self.engine.staged:
            workers = 1  # ranks share every shard
        if workers > ceildiv(n, shard):
            raise Error(
                "[train] ",
                workers,
                " workers but ",
                ceildiv(n, shard),
                " shards (global batch ",
                n,
                " / shard size ",
                shard,
                "); use fewer workers, or smaller shards, or a larger batch",
            )
        self._compare("batch size", String(size))
        self._compare("data set", String(len(loader.dataset)))
        self._compare("data order", String(loader.seed, " ", loader.shuffle))
        self._compare("length", String(epochs, " ", steps.or_else(0)))
        self._compare("checkpoints", String(folder != "", " ", every))
        var s = Session(loader.next_epoch, epochs, steps, every)
        if folder != "":
            s.configuration = configuration(
                self.engine,
                self.optimizer,
                self.schedule,
                self.clip_norm,
                self.accumulation_steps,
                loader,
            ).json()
            self._resume(s, folder, keep)
        return s^

    def _resume(mut self, mut s: Session, folder: String, keep: Int) raises:
        """Rank 0 opens the directory and reads; all ranks go to the newest checkpoint, if there is one.
        """
        var found = JsonObject()
        s.saves = True
        if self.comm.rank() == 0:
            s.store = Store(folder, keep)
            var newest = s.store.value().newest()
            for line in newest.refused:
                print("odyssey: ", line, sep="", file=stderr)
            if newest.snapshot:
                ref snapshot = newest.snapshot.value()
                var name = step_name(snapshot.step)
                restore(
                    self.engine,
                    self.optimizer,
                    snapshot,
                    s.configuration,
                    name,
                )
                found.set("step", snapshot.step)
                found.set("values", snapshot.values)
        var text = self.comm.broadcast_text(found.json().text)
        var there = parse_json(text.as_bytes(), "the checkpoint")
        if not there.has("step"):
            return
        self.steps = there.get("step").integer()
        var name = step_name(self.steps)
        var values = there.get("values")
        var size = self.engine.parameters.size
        self.comm.broadcast_floats(self.engine.arena, size)
        for i in range(len(self.optimizer.state_names())):
            self.comm.broadcast_floats(self.optimizer.state_array(i), size)
        s.progress = progress_of(self.optimizer, values, name)
        s.saved = self.steps
        if self.comm.rank() == 0 and self.verbose:
            print(
                "resumed from ",
                name,
                ", epoch ",
                s.progress.cursor.epoch + 1,
                sep="",
            )

    def _epoch(mut self, mut loader: DataLoader, mut s: Session) raises:
        """Takes what is left of an epoch and makes its record."""
        var size = loader.batch_size * self.accumulation_steps
        var length = ceildiv(len(loader), self.accumulation_steps)
        var epoch = s.progress.cursor.loader_epoch
        var before = s.progress.seconds
        var started = perf_counter_ns()
        while s.progress.cursor.step < length and not s.at_limit():
            var batch = loader.batch(epoch, s.progress.cursor.step, size)
            var sums = self.train_step(batch, loader)
            s.progress.tally.loss += sums.loss
            s.progress.tally.correct += sums.correct
            s.progress.tally.samples += batch.samples
            s.progress.tally.steps += 1
            s.progress.cursor.step += 1
            s.progress.cursor.samples += batch.samples
            s.progress.seconds = (
                before + Float64(perf_counter_ns() - started) * 1e-9
            )
            if s.every and self.steps % s.every == 0:
                self._save(s)
        s.complete = s.at_limit() and s.progress.cursor.step != length
        if s.complete:  # with a higher limit training goes on within this epoch
            self._save(s)
        var tally = s.progress.tally
        var n = Float64(tally.samples)
        s.progress.history.steps += tally.steps
        s.progress.history.samples += tally.samples
        s.progress.history.seconds += s.progress.seconds
        s.progress.history.records.append(
            EpochRecord(
                s.progress.cursor.epoch + 1,
                tally.loss / n,
                tally.correct / n,
                s.progress.seconds,
                n / s.progress.seconds,
                None,
            )
        )

    def _ended(mut self, mut s: Session) raises:
        """After an epoch and its evaluation."""
        self._show(s.progress.history)
        if s.complete:
            return
        ref at = s.progress.cursor
        s.progress.cursor = Cursor(
            at.epoch + 1, 0, at.loader_epoch + 1, at.samples
        )
        s.progress.tally = Tally(0, 0, 0, 0)
        s.progress.seconds = 0
        if not s.every:
            self._save(s)

    def _end(
        mut self, mut loader: DataLoader, mut s: Session
    ) raises -> History:
        """The last checkpoint, and what was done."""
        self._save(s)
        self.comm.barrier()  # nobody ends before it is there
        loader.next_epoch = s.progress.cursor.loader_epoch + Int(s.complete)
        var history = History()
        swap(history, s.progress.history)
        return history^

    def _save(mut self, mut s: Session) raises:
        """A checkpoint of this moment, if there is none of it; rank 0 writes.
        """
        if not s.saves or s.saved == self.steps:
            return
        s.saved = self.steps
        if s.store:
            s.store.value().save(
                capture(
                    self.engine,
                    self.optimizer,
                    s.configuration,
                    s.progress,
                    self.steps,
                    s.epochs,
                )
            )

    def _show(self, history: History):
        """One line about the last epoch, from rank 0."""
        if not self.verbose or self.comm.rank() != 0:
            return
        print(history.records[len(history.records) - 1].line())

    def weights_sha256(self) -> String:
        """SHA-256 over the bytes of the parameters: one value for one training, on any layout, in Mojo and in Python.

        Returns:
            64 hexadecimal digits.
        """
        return self.engine.weights_sha256()


def _at_least_one(name: String, value: Int) raises:
    if value < 1:
        raise Error("[train] ", name, " is ", value, "; it must be at least 1")
