"""DistributedTrainer: that of the Python package, over a model that is a Mojo struct.

Python records forward() of the struct once for each batch size that is met (composition.mojo); steps run what was
recorded, natively. So it has what Python's has - backends, reductions, ZeRO, GPUs, checkpoints, the watcher - and the
same bits.
"""

from std.python import Python, PythonObject
from std.utils.numerics import nan

from .bridge import call, odyssey, part
from .composition import Module, Traced
from .data import Batch, DataLoader
from .engine import Sums
from .history import Evaluation, History, number_of
from .optim import CrossEntropyLoss, Loss, Optimizer, Schedule
from .world import World


struct DistributedTrainer[M: Module, O: Optimizer, L: Loss = CrossEntropyLoss](Movable):
    """Trains a model on all workers of all ranks, with the same bits whatever their number."""

    var py: PythonObject
    """The Python trainer: what has no method here is a method of it."""
    var comm: World
    """The ranks."""
    var _model: Traced[Self.M]
    var _optimizer: Self.O

    def __init__(
        out self,
        var model: Self.M,
        var optimizer: Self.O,
        num_gpus: Optional[Int] = None,
        backend: String = "auto",
        *,
        schedule: Optional[Schedule] = None,
        seed: UInt64 = 0,
        threads: Int = 0,
        clip_norm: Optional[Float64] = None,
        verbose: Bool = False,
        var **settings: PythonObject,
    ) raises:
        """Connects the ranks, lays the model's parameters out and gives them their initial numbers.

        Args:
            model: Any Module.
            optimizer: SGD(lr=0.01), Adam(), ...
            num_gpus: Workers of this process, one per GPU; on a machine without a GPU they are CPU workers.
            backend: "auto", "mpi", "shm", "nccl", "gloo" or "local".
            schedule: Factor on the learning rate.
            seed: Of initial weights and of dropout, from 0 to 2^63 - 1.
            threads: Of this process; with 0 its cores divided by the ranks on this machine.
            clip_norm: Gradients are scaled down to this global norm if theirs is larger.
            verbose: Whether rank 0 shows progress.
            settings: Every other keyword of Python's DistributedTrainer, such as reduction="ring", zero=2,
                precision="bf16", device="gpu", shard_size=16, accumulation_steps=4, mesh=mesh(dp=2, tp=2).

        Raises:
            Error: A setting is unknown or not allowed, or the ranks differ.
        """
        var given = Python.dict()
        for e in settings.items():
            given[e.key] = e.value
        given["num_gpus"] = num_gpus.value() if num_gpus else PythonObject(None)
        given["backend"] = backend
        given["seed"] = Python.int(String(seed))
        if schedule:
            given["schedule"] = schedule.value().py
        if threads:
            given["threads"] = threads
        if clip_norm:
            given["clip_norm"] = clip_norm.value()
        given["verbose"] = verbose
        self._model = Traced(model^, Self.L.build(), seed)
        self._optimizer = optimizer^
        self.py = call(
            odyssey(),
            "trainer",
            self._model.py,
            self._optimizer.value(),
            given,
        )
        self.comm = World(self.py.comm)

    def train(
        mut self,
        loader: DataLoader,
        epochs: Int = 1,
        steps: Optional[Int] = None,
        *,
        checkpoint_dir: String = "",
        checkpoint_every: Int = 0,
        var **settings: PythonObject,
    ) raises -> History:
        """Trains for `epochs` epochs, or until `steps` optimizer steps have been taken.

        With checkpoints it goes on where the newest valid one is, whatever made it, Python or Mojo, on any number of
        ranks, with the bits of a training that was never stopped.

        Args:
            loader: Its batch_size is the global batch.
            epochs: At least 1.
            steps: Ends the training early.
            checkpoint_dir: Where checkpoints go; "": none, or those of the run that `odyssey launch` started.
            checkpoint_every: Steps from one to the next; 0: at the ends of epochs. There is always one at the end.
            settings: Every other keyword of Python's fit(): keep=, checkpoint_epochs=, resume=.

        Returns:
            What it did, since it began.

        Raises:
            Error: A setting is not allowed, a number is not finite, or a checkpoint is of another training.
        """
        var given = Python.dict()
        for e in settings.items():
            given[e.key] = e.value
        given["checkpoint_dir"] = checkpoint_dir
        given["checkpoint_every"] = checkpoint_every
        return _fit(self.py, loader, epochs, steps, given)

    def train(
        mut self,
        loader: DataLoader,
        validation: DataLoader,
        epochs: Int = 1,
        steps: Optional[Int] = None,
        *,
        checkpoint_dir: String = "",
        checkpoint_every: Int = 0,
        var **settings: PythonObject,
    ) raises -> History:
        """The same, with an evaluation after each epoch."""
        var given = Python.dict()
        for e in settings.items():
            given[e.key] = e.value
        given["val_loader"] = validation.py
        given["checkpoint_dir"] = checkpoint_dir
        given["checkpoint_every"] = checkpoint_every
        return _fit(self.py, loader, epochs, steps, given)

    def train_step(mut self, batch: Batch, loader: DataLoader) raises -> Sums:
        """One optimizer step over a global batch, the same on all ranks, of which each computes its shards."""
        var both = call(self.py, "train_step", batch.py)
        return Sums(Float64(py=both[0]), Float64(py=both[1]), Float64(batch.samples), 0)

    def evaluate(mut self, loader: DataLoader) raises -> Evaluation:
        """Mean loss and accuracy over the batches of a loader, dropout off."""
        var e = call(self.py, "evaluate", loader.py)
        var right = number_of(e.accuracy).or_else(nan[DType.float64]())
        return Evaluation(Float64(py=e.loss), right, Int(py=e.samples))

    def rate(self, step: Int) raises -> Float64:
        """The learning rate of a step, from 0."""
        return Float64(py=call(self.py, "rate", step))

    def check_replicas(self) raises:
        """Compares the weights of all ranks; raises if they differ."""
        _ = call(self.py, "check_replicas")

    def weights_sha256(self) raises -> String:
        """SHA-256 over the bytes of the parameters: one value for one training, on any layout, in Mojo and in Python.

        After train() any rank may ask alone; elsewhere it is a collective call.
        """
        return String(py=call(odyssey(), "weights_sha256", self.py))

    def save_weights(self, path: String) raises:
        """Writes the parameters by name as safetensors; all ranks call."""
        _ = call(self.py, "save_weights", path)


def mesh(
    dp: Optional[Int] = None,
    pp: Optional[Int] = None,
    tp: Optional[Int] = None,
) raises -> PythonObject:
    """How many ranks replicate the model, form a pipeline and share layers: the trainer's setting `mesh`.

    What is left out follows from the number of ranks and the places of the model.
    """
    var sizes = Python.dict()
    if dp:
        sizes["dp"] = dp.value()
    if pp:
        sizes["pp"] = pp.value()
    if tp:
        sizes["tp"] = tp.value()
    return call(part("parallel.mesh"), "Mesh", settings=sizes)


def _fit(
    trainer: PythonObject,
    loader: DataLoader,
    epochs: Int,
    steps: Optional[Int],
    settings: PythonObject,
) raises -> History:
    settings["epochs"] = epochs
    settings["steps"] = steps.value() if steps else PythonObject(None)
    return History(call(odyssey(), "fit", trainer, loader.py, settings=settings))
