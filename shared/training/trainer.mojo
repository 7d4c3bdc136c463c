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
from kernels.lanes import Ptr

from .communicator import ReduceOp
from .data import Batch, DataLoader
from .engine import Engine, Layout, Sums
from .history import EpochRecord, Evaluation, History
from .losses import CrossEntropyLoss, Loss
from .module import Module
from .norm import global_norm
from .optimizers import Optimizer
from .schedules import Schedule, constant
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
                " CPU workers are used",
                sep="",
                file=stderr,
            )
        self._same_everywhere()

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
        var rule = String(self.optimizer.kind(), " ", self.optimizer.rate())
        for s in self.optimizer.settings():
            rule += String(" ", s[0], " ", s[1])
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
    ) raises -> History:
        """Trains for `epochs` epochs, or until `steps` optimizer steps have been taken.

        Args:
            loader: Its batch_size is the global batch.
            epochs: At least 1.
            steps: Ends the training early.

        Returns:
            What it did.

        Raises:
            Error: A setting is not allowed, or a number is not finite.
        """
        var history = History()
        self._begin(loader, epochs, steps)
        for epoch in range(epochs):
            if steps and self.steps >= steps.value():
                break
            self._epoch(loader, epoch, steps, history)
            self._show(history)
        return history^

    def train(
        mut self,
        mut loader: DataLoader,
        mut validation: DataLoader,
        epochs: Int = 1,
        steps: Optional[Int] = None,
    ) raises -> History:
        """The same, with an evaluation after each epoch.

        Args:
            loader: Its batch_size is the global batch.
            validation: What to evaluate on.
            epochs: At least 1.
            steps: Ends the training early.

        Returns:
            What it did.

        Raises:
            Error: A setting is not allowed, or a number is not finite.
        """
        var history = History()
        self._begin(loader, epochs, steps)
        for epoch in range(epochs):
            if steps and self.steps >= steps.value():
                break
            self._epoch(loader, epoch, steps, history)
            var last = len(history.records) - 1
            history.records[last].test = self.evaluate(validation)
            self._show(history)
        return history^

    def _begin(
        mut self, loader: DataLoader, epochs: Int, steps: Optional[Int]
    ) raises:
        """Checks what the training is to do; a collective call."""
        _at_least_one("epochs", epochs)
        _at_least_one("steps", steps.or_else(1))
        var size = loader.batch_size * self.accumulation_steps
        var n = min(size, len(loader.dataset))
        var shard = self.engine.layout.shard_size
        var workers = self._workers * self.comm.size()
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

    def _epoch(
        mut self,
        mut loader: DataLoader,
        epoch: Int,
        steps: Optional[Int],
        mut history: History,
    ) raises:
        """Takes the steps of one epoch and makes its record."""
        var size = loader.batch_size * self.accumulation_steps
        var loss = Float64(0)
        var correct = Float64(0)
        var samples = 0
        var started = perf_counter_ns()
        for i in range(ceildiv(len(loader), self.accumulation_steps)):
            if steps and self.steps >= steps.value():
                break
            var sums = self.train_step(loader.batch(epoch, i, size), loader)
            loss += sums.loss
            correct += sums.correct
            samples += Int(sums.samples)
            history.steps += 1
        var seconds = Float64(perf_counter_ns() - started) * 1e-9
        var n = Float64(samples)
        history.samples += samples
        history.seconds += seconds
        history.records.append(
            EpochRecord(
                epoch + 1, loss / n, correct / n, seconds, n / seconds, None
            )
        )

    def _show(self, history: History):
        """One line about the last epoch, from rank 0."""
        if not self.verbose or self.comm.rank() != 0:
            return
        ref r = history.records[len(history.records) - 1]
        var line = String(
            "epoch ", r.epoch, ": train loss ", fixed(r.train_loss, 4)
        )
        if r.test:
            line += String(
                ", test accuracy ",
                fixed(100 * r.test.value().accuracy, 2),
                " %",
            )
        print(line, ", ", Int(r.samples_per_second), " samples/s", sep="")

    def weights_sha256(self) -> String:
        """SHA-256 over the bytes of the parameters: one value for one training, on any layout, in Mojo and in Python.

        Returns:
            64 hexadecimal digits.
        """
        return self.engine.weights_sha256()


def _at_least_one(name: String, value: Int) raises:
    if value < 1:
        raise Error("[train] ", name, " is ", value, "; it must be at least 1")


def fixed(x: Float64, places: Int) -> String:
    """A number with so many places behind the point.

    Args:
        x: The number.
        places: How many.

    Returns:
        The text.
    """
    if not (x - x == 0):
        return String(x)
    var unit = 1
    for _ in range(places):
        unit *= 10
    var n = Int(abs(x) * Float64(unit) + 0.5)
    var rest = String(n % unit)
    while rest.byte_length() < places:
        rest = "0" + rest
    return String("-" if x < 0 and n else "", n // unit, ".", rest)
