"""Runs the shards of a batch: a traced program, a plan, a reduction. The counterpart of python/odyssey/engine.py.

An engine has a model, its arena and what batch sizes need. It says nothing about epochs, rates or checkpoints; the
trainer does. Loops of one's own use it directly (examples/mojo/manual_multi_device.mojo).
"""

from std.math import ceildiv

from kernels.lanes import LANES, Ptr
from kernels.layout import LongPtr
from kernels.random import uniform

from .arena import aligned_zeros
from .backward import backward
from .communicator import Communicator, Solo
from .compile import compiled
from .data import Batch, Dataset
from .executor import Step, run_step
from .losses import CrossEntropyLoss, Loss
from .module import Module
from .ops import code
from .record import Context, STATS
from .optimizers import Optimizer
from .parameter import Parameters
from .runner import (
    Layout,
    Runner,
    Staged,
    Sums,
    Traced,
    effective_shard_size,
)
from .sha256 import sha256
from .stages import Pass, places
from .tape import Tape
from .value import TapePtr, Value

comptime _RUNNERS = 8  # batch sizes that are kept prepared


def shape_text(channels: Int, height: Int, width: Int, device: Int) -> String:
    """The shape and place of samples, for messages.

    Args:
        channels: Of a sample.
        height: Of a sample.
        width: Of a sample.
        device: The place.

    Returns:
        The text.
    """
    return String(channels, " x ", height, " x ", width, " on device ", device)


struct Engine[M: Module, L: Loss = CrossEntropyLoss](Movable):
    """A model with its parameters, and sums over batches computed with it.

    Parameters:
        M: The model.
        L: Its loss.
    """

    var model: Self.M
    """The model."""
    var parameters: Parameters
    """Names, shapes and places of its parameters."""
    var arena: Ptr
    """The parameters themselves (parameters.size)."""
    var seed: UInt64
    """Of initial weights and of dropout."""
    var layout: Layout
    """Where shards are computed."""
    var device: Int
    """The place this copy of the model is on, for loops of one's own."""
    var staged: Bool
    """Whether rank r computes the r-th place of the model, and not its share of the shards."""
    var _programs: List[Traced]
    var _runners: List[Runner]
    var _passes: List[Staged]
    var _work: Ptr
    var _work_bytes: Int

    def __init__(
        out self,
        var model: Self.M,
        *,
        seed: UInt64 = 0,
        layout: Layout = Layout(0, 1, 1, 1, 32),
    ) raises:
        """Lays the parameters out and gives them their initial numbers, a function of the seed.

        Args:
            model: The model; the engine keeps it.
            seed: From 0 to 2^63 - 1.
            layout: Where shards are computed.

        Raises:
            Error: The model has no parameters.
        """
        self.model = model^
        self.parameters = Parameters()
        self.model.collect(self.parameters, "")
        if self.parameters.size == 0:
            raise Error(
                "[model] it has no parameters; give it at least one layer that"
                " has some, as a field"
            )
        self.arena = aligned_zeros(self.parameters.size)
        self.seed = seed
        self.layout = layout
        self.device = 0
        self._programs = List[Traced]()
        self._runners = List[Runner]()
        self._passes = List[Staged]()
        self.staged = False
        self._work = aligned_zeros(16)
        self._work_bytes = 64
        for i in range(len(self.parameters)):
            var bound = Float32(self.parameters.bounds[i])
            uniform(
                self.arena.unsafe_offset(self.parameters.offsets[i]),
                self.parameters.floats(i),
                seed,
                UInt32(i),
                -bound,
                bound,
            )

    def __deinit__(deinit self):
        """Frees its memory."""
        self.arena.unsafe_free()
        self._work.unsafe_free()

    def to(mut self, *, device: Int):
        """Places this copy of the model; batches that it computes must be there.

        Args:
            device: The place.
        """
        self.device = device

    def bytes_sent(self) -> Int:
        """Bytes that this rank has sent to sum gradients.

        Returns:
            Bytes.
        """
        var n = 0
        for r in self._runners:
            if r.reduction:
                n += r.reduction.value().sent
        for p in self._passes:
            n += p.pass_.sent
        return n

    def run[
        C: Communicator
    ](
        mut self,
        comm: C,
        batch: Batch,
        data: Dataset,
        step: Int,
        training: Bool,
    ) raises -> Sums:
        """The sums over all shards of all ranks.

        Args:
            comm: The ranks; all of them call.
            batch: Of `data`, the same on all ranks.
            data: The samples.
            step: Number of the optimizer step, for dropout.
            training: Whether to compute gradients, and with dropout.

        Returns:
            Sums; without gradients unless `training`.

        Raises:
            Error: Samples do not fit the model, or the model cannot be traced.

        Parameters:
            C: The communicator's type.
        """
        if batch.device != self.device:
            raise Error(
                "[model] the batch is on device ",
                batch.device,
                ", the model on device ",
                self.device,
                "; move the batch with .to(device=",
                self.device,
                ")",
            )
        self._check(data)
        if batch.samples < 1:
            raise Error(
                "[train] the batch has no samples: number ",
                batch.index,
                " of epoch ",
                batch.epoch,
                "; len(loader) says how many there are",
            )
        if self.staged:
            return self._run_staged(comm, batch, data, step, training)
        var i = self._prepare(batch.samples, data, training)
        ref r = self._runners[i]
        ref p = self._programs[r.program]
        self._check_outputs(data, p.outputs)
        var stopped = run_step(
            Step(
                program=p.program.address(),
                records=Int64(len(p.program)),
                threads=Int64(len(r.plan.threads)),
                actions=LongPtr(unsafe_from_address=Int(r.starts.unsafe_ptr())),
                counts=LongPtr(unsafe_from_address=Int(r.counts.unsafe_ptr())),
                params=Int64(Int(self.arena)),
                work=Int64(Int(self._work)),
                work_bytes=Int64(p.program.work_bytes),
                slots=0,
                base=0,
                zero=1,
                buffers=Int64(Int(r.buffers)),
                buffer_floats=Int64(r.floats),
                shard_size=Int64(r.shard_size),
                samples=Int64(batch.samples),
                rows=LongPtr(unsafe_from_address=batch.rows()),
                context=self._context(data, step),
            )
        )
        if stopped >= 0:
            raise Error("record ", stopped, " of the program failed")
        var result = r.result()
        if r.reduction:
            r.reduction.value().run(comm, r.buffers, result)
        var stats = r.floats - STATS
        return Sums(
            Float64(result[unsafe_offset=stats]),
            Float64(result[unsafe_offset=stats + 1]),
            Float64(result[unsafe_offset=stats + 2]),
            result,
        )

    def run(
        mut self, batch: Batch, data: Dataset, step: Int = 0
    ) raises -> Sums:
        """The sums and gradients over a batch that this process computes alone.

        Args:
            batch: Of `data`.
            data: The samples.
            step: Number of the optimizer step, for dropout.

        Returns:
            Sums, with gradients.

        Raises:
            Error: Samples do not fit the model, or the model cannot be traced.
        """
        return self.run(Solo(), batch, data, step, True)

    def _run_staged[
        C: Communicator
    ](
        mut self,
        comm: C,
        batch: Batch,
        data: Dataset,
        step: Int,
        training: Bool,
    ) raises -> Sums:
        """The same where each rank has a place of the model."""
        var channels = data.channels if data.height * data.width > 1 else 1
        var grads = self.parameters.size if training else 0
        var found = -1
        for i in range(len(self._passes)):
            ref p = self._passes[i]
            if (
                p.samples == batch.samples
                and p.training == training
                and p.channels == channels
            ):
                found = i
        if found < 0:
            if len(self._passes) == _RUNNERS:
                _ = self._passes.pop(0)
            var n = effective_shard_size(batch.samples, self.layout.shard_size)
            var tape = self.trace(n, channels, training)
            self._passes.append(
                Staged(
                    batch.samples,
                    channels,
                    training,
                    tape.outputs,
                    Pass(
                        tape,
                        comm.rank(),
                        ceildiv(batch.samples, n),
                        n,
                        grads,
                    ),
                )
            )
            found = len(self._passes) - 1
        self._check_outputs(data, self._passes[found].outputs)
        ref p = self._passes[found].pass_
        p.run(
            comm,
            self.arena,
            batch.samples,
            batch.rows(),
            self._context(data, step),
        )
        return Sums(
            Float64(p.buffers[unsafe_offset=grads]),
            Float64(p.buffers[unsafe_offset=grads + 1]),
            Float64(p.buffers[unsafe_offset=grads + 2]),
            p.buffers,
        )

    def _context(self, data: Dataset, step: Int) -> Context:
        """What a run needs besides addresses; shards set their own part."""
        return Context(
            seed=self.seed,
            step=Int64(step),
            first=0,
            valid=0,
            images=Int64(data.address()),
            bytes=Int64(1 if data.of_bytes() else 0),
            labels=Int64(Int(data.labels.unsafe_ptr())),
            rows=0,
            scale=Int64(Int(data.scale)),
            shift=Int64(Int(data.shift)),
            loss_scale=1,
        )

    def places(self) raises -> Int:
        """On how many places the model is.

        Returns:
            Their number.

        Raises:
            Error: What the model's forward() raises.
        """
        return len(places(self.trace(32, 1, False)))

    def gradients(self, sums: Sums) -> Span[Float32, MutUntrackedOrigin]:
        """The gradients of a run, in the layout of the arena; valid until the next run of this batch size.

        Args:
            sums: What run() returned.

        Returns:
            The numbers, that may be changed.
        """
        return Span(unsafe_ptr=sums.grads, length=self.parameters.size)

    def update[
        O: Optimizer
    ](
        mut self,
        mut optimizer: O,
        grads: Span[Float32, MutUntrackedOrigin],
        divisor: Float32,
        rate: Float64,
    ) -> Bool:
        """Takes a step, if all gradients are finite; returns whether they were.

        Parameters:
            O: The optimizer's type.

        Args:
            optimizer: Bound to as many floats as the arena has.
            grads: Sums over samples.
            divisor: What they are divided by: the samples.
            rate: The learning rate.

        Returns:
            Whether the step was taken.
        """
        return optimizer.apply(
            self.arena,
            grads.unsafe_ptr(),
            self.parameters.size,
            divisor,
            rate,
        )

    def weights_sha256(self) -> String:
        """SHA-256 over the bytes of the parameters: one value for one training, on any layout, in Mojo and in Python.

        Returns:
            64 hexadecimal digits.
        """
        return sha256(
            Span(
                unsafe_ptr=self.arena.unsafe_bitcast[UInt8](),
                length=4 * self.parameters.size,
            )
        )

    def _check(self, data: Dataset) raises:
        comptime I = Self.M.Input
        comptime features = I.CHANNELS * I.HEIGHT * I.WIDTH
        var images = data.height * data.width > 1
        comptime flat = I.HEIGHT * I.WIDTH == 1
        if data.channels * data.height * data.width != features or (
            images
            and not flat
            and not (data.channels == I.CHANNELS and data.height == I.HEIGHT)
        ):
            raise Error(
                "[train] the samples of ",
                data.name,
                " are ",
                data.channels,
                " x ",
                data.height,
                " x ",
                data.width,
                "; the model takes ",
                I.CHANNELS,
                " x ",
                I.HEIGHT,
                " x ",
                I.WIDTH,
            )

    def _check_outputs(self, data: Dataset, outputs: Int) raises:
        if data.classes > outputs:
            raise Error(
                "[train] the data set ",
                data.name,
                " has ",
                data.classes,
                " classes and the model ",
                outputs,
                " outputs; give the model an output for each class",
            )

    def _prepare(
        mut self, samples: Int, data: Dataset, training: Bool
    ) raises -> Int:
        """The number of the runner of a batch size."""
        var channels = data.channels if data.height * data.width > 1 else 1
        for i in range(len(self._runners)):
            ref r = self._runners[i]
            if (
                r.samples == samples
                and r.training == training
                and r.channels == channels
            ):
                return i
        var n = effective_shard_size(samples, self.layout.shard_size)
        var program = self._program(n, channels, training)
        if len(self._runners) == _RUNNERS:
            _ = self._runners.pop(0)
        self._runners.append(
            Runner(
                samples,
                channels,
                training,
                program,
                self.parameters.size if training else 0,
                self.layout,
            )
        )
        var last = len(self._runners) - 1
        var bytes = (
            len(self._runners[last].plan.threads)
            * self._programs[program].program.work_bytes
        )
        if bytes > self._work_bytes:  # one runner runs at a time
            self._work.unsafe_free()
            self._work = aligned_zeros(bytes // 4)
            self._work_bytes = bytes
        return last

    def _program(
        mut self, samples: Int, channels: Int, training: Bool
    ) raises -> Int:
        """The number of the program of one shard of so many samples."""
        for i in range(len(self._programs)):
            ref p = self._programs[i]
            if (
                p.samples == samples
                and p.training == training
                and p.channels == channels
            ):
                return i
        var tape = self.trace(samples, channels, training)
        self._programs.append(
            Traced(samples, channels, training, tape.outputs, compiled(tape))
        )
        return len(self._programs) - 1

    def trace(self, samples: Int, channels: Int, training: Bool) raises -> Tape:
        """Forward and, if `training`, backward of one shard of so many samples, through the model's forward().

        Args:
            samples: Of the shard.
            channels: Of images; 1 if samples are rows of features.
            training: Whether to go on with the backward pass, and with dropout.

        Returns:
            What was written down.

        Raises:
            Error: What the model's forward() raises.
        """
        comptime I = Self.M.Input
        comptime features = I.CHANNELS * I.HEIGHT * I.WIDTH
        var stats_at = self.parameters.size if training else 0
        var tape = Tape(samples, self.parameters.size, training)
        # an address, so that values need not say whose tape they are on; `tape` lives to the end of this function
        var at = TapePtr(unsafe_from_address=Int(Pointer(to=tape)))
        ref t = at[]
        var x = t.new(
            t.activation(features), I.CHANNELS, I.HEIGHT, I.WIDTH, I.DEVICE
        )
        t.device = I.DEVICE
        t.emit(
            comptime (code("input")),
            t.values[x].memory,
            t.groups,
            features,
            channels,
            rows=True,
        )
        var y = self.model.forward(Self.M.Input(Value(at, x))).value()
        comptime O = Self.M.Output
        var out = t.values[y.id].copy()
        if not (
            out.channels == O.CHANNELS
            and out.height == O.HEIGHT
            and out.width == O.WIDTH
            and out.device == O.DEVICE
        ):
            raise Error(
                "[model] forward() gives ",
                shape_text(out.channels, out.height, out.width, out.device),
                "; its Output is ",
                shape_text(O.CHANNELS, O.HEIGHT, O.WIDTH, O.DEVICE),
            )
        var labels = t.alloc(4 * t.groups * LANES)
        t.device = t.values[y.id].device
        t.emit(comptime (code("labels")), labels, t.groups, rows=True)
        var loss = Self.L.of(y, labels)
        var total = t.values[loss.id].memory
        t.emit(comptime (code("stats")), t.grad(stats_at), total, total)
        if training:
            backward(t, loss.id)
        return tape^
