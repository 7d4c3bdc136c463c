"""Engine: sums and gradients of a batch, and steps, for loops of one's own (examples/mojo/manual_multi_device.mojo)."""

from std.python import PythonObject

from .bridge import call, odyssey
from .composition import Module, Traced
from .data import Batch, Dataset
from .optim import CrossEntropyLoss, Loss, Optimizer


@fieldwise_init
struct Sums(ImplicitlyCopyable, Movable):
    """Sums over the samples of a batch."""

    var loss: Float64
    """Sum of the losses."""
    var correct: Float64
    """Samples that the model names right."""
    var samples: Float64
    """Number of samples."""
    var grads: Int
    """Address of the summed gradients of an Engine, in the layout of its parameters; 0: they are a trainer's."""


@fieldwise_init
struct Parameters(Copyable, Movable):
    """The parameters of an Engine."""

    var names: List[String]
    """In order."""
    var size: Int
    """Numbers of all of them, with the padding between them."""


struct Engine[M: Module, L: Loss = CrossEntropyLoss](Movable):
    """A model with its parameters, and sums over batches that this process computes alone."""

    var py: PythonObject
    """The Python side (mojo.Loop)."""
    var parameters: Parameters
    """Names and size of its parameters."""
    var device: Int
    """The place this copy of the model is on."""
    var _model: Traced[Self.M]

    def __init__(out self, var model: Self.M, *, seed: UInt64 = 0) raises:
        """Lays the parameters out and gives them their initial numbers, a function of the seed."""
        var loss = Self.L.build()
        self._model = Traced(model^, loss, seed)
        self.py = call(odyssey(), "Loop", self._model.py, seed)
        var names = List[String]()
        for name in self.py.names:
            names.append(String(py=name))
        self.parameters = Parameters(names^, Int(py=self.py.size))
        self.device = 0

    def to(mut self, *, device: Int):
        """Places this copy of the model; batches that it computes must be there."""
        self.device = device

    def run(mut self, batch: Batch, data: Dataset, step: Int = 0) raises -> Sums:
        """The sums and gradients over a batch of `data`; `step` is what dropout is a function of."""
        if batch.device != self.device:
            var both = String("the batch is on device ", batch.device, ", the model on device ", self.device)
            raise Error("[model] ", both, "; move the batch with .to(device=", self.device, ")")
        var s = call(self.py, "run", batch.py, step)
        return Sums(Float64(py=s[0]), Float64(py=s[1]), Float64(py=s[2]), Int(py=s[3]))

    def gradients(self, sums: Sums) -> Span[Float32, MutUntrackedOrigin]:
        """The gradients of a run, in the layout of the parameters; valid until the next run, and may be changed."""
        return Span(
            unsafe_ptr=Pointer[Float32, MutUntrackedOrigin](unsafe_from_address=sums.grads), length=self.parameters.size
        )

    def update[
        O: Optimizer
    ](
        mut self, mut optimizer: O, grads: Span[Float32, MutUntrackedOrigin], divisor: Float32, rate: Float64
    ) raises -> Bool:
        """Takes a step with grads / divisor, if all are finite; returns whether they were."""
        return Bool(py=call(self.py, "update", optimizer.value(), Int(grads.unsafe_ptr()), Float64(divisor), rate))

    def weights_sha256(self) raises -> String:
        """SHA-256 over the bytes of the parameters."""
        return String(py=call(self.py.trainer, "weights_sha256"))
