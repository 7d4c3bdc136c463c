"""DistributedTrainer: that of the Python package, over a model that is a Mojo struct.

Python records forward() of the struct once for each batch size that is met (composition.mojo); steps run what was
recorded, natively. So it has what Python's has - backends, reductions, ZeRO, GPUs, checkpoints, the watcher - and the
same bits.
"""

from std.python import PythonObject

from .bridge import call, odyssey
from .composition import Module, Traced
from .data import Batch, DataLoader, Dataset
from .engine import Sums
from .history import Evaluation, History
from .optim import CrossEntropyLoss, Loss, Optimizer
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
        seed: UInt64 = 0,
        var **settings: PythonObject,
    ) raises:
        """Connects the ranks, lays the model's parameters out and gives them their initial numbers.

        Args:
            model: Any Module.
            optimizer: SGD(lr=0.01), Adam(), ...
            num_gpus: Workers of this process, one per GPU; on a machine without a GPU they are CPU workers.
            backend: "auto", "mpi", "shm", "nccl", "gloo" or "local".
            seed: Of initial weights and of dropout, from 0 to 2^63 - 1.
            settings: Every other keyword of Python's DistributedTrainer, such as schedule=cosine(1000), threads=2,
                clip_norm=1.0, reduction="ring", zero=2, precision="bf16", device="gpu", shard_size=16,
                accumulation_steps=4, mesh=mesh(dp=2, tp=2); and verbose=True, with which rank 0 prints its progress.

        Raises:
            Error: A setting is unknown or not allowed, or the ranks differ.
        """
        self._model = Traced(model^, Self.L.build(), seed)
        self._optimizer = optimizer^
        if num_gpus:
            settings["num_gpus"] = num_gpus.value()
        settings["backend"] = backend
        settings["seed"] = seed
        self.py = call(odyssey(), "trainer", self._model.py, self._optimizer.value(), **settings^)
        self.comm = World(self.py.comm)

    def train(
        mut self, loader: DataLoader, epochs: Int = 1, steps: Optional[Int] = None, var **settings: PythonObject
    ) raises -> History:
        """Trains for `epochs` epochs, or until `steps` optimizer steps have been taken.

        With checkpoints it goes on where the newest valid one is, whatever made it, Python or Mojo, on any number of
        ranks, with the bits of a training that was never stopped.

        Args:
            loader: Its batch_size is the global batch.
            epochs: At least 1.
            steps: Ends the training early.
            settings: Every other keyword of Python's fit(), such as checkpoint_dir="checkpoints", checkpoint_every=100,
                keep=3, resume="never"; without a directory checkpoints go to the run that `odyssey launch` started.

        Returns:
            Its history, since it began.

        Raises:
            Error: A setting is not allowed, a number is not finite, or a checkpoint is of another training.
        """
        settings["epochs"] = epochs
        if steps:
            settings["steps"] = steps.value()
        return History(call(odyssey(), "fit", self.py, loader.py, **settings^))

    def train(
        mut self,
        loader: DataLoader,
        validation: DataLoader,
        epochs: Int = 1,
        steps: Optional[Int] = None,
        var **settings: PythonObject,
    ) raises -> History:
        """The same, with an evaluation after each epoch."""
        settings["val_loader"] = validation.py
        return self.train(loader, epochs, steps, **settings^)

    def train(
        mut self,
        loader: DataLoader,
        validation: Dataset,
        epochs: Int = 1,
        steps: Optional[Int] = None,
        var **settings: PythonObject,
    ) raises -> History:
        """The same, with an evaluation of a whole data set after each epoch."""
        settings["val_loader"] = validation.py
        return self.train(loader, epochs, steps, **settings^)

    def train_step(mut self, batch: Batch, loader: DataLoader) raises -> Sums:
        """One optimizer step over a global batch, the same on all ranks, of which each computes its shards."""
        var both = call(self.py, "train_step", batch.py)
        return Sums(Float64(py=both[0]), Float64(py=both[1]), Float64(batch.samples), 0)

    def evaluate(mut self, loader: DataLoader) raises -> Evaluation:
        """Mean loss and accuracy over the batches of a loader, dropout off."""
        return Evaluation(call(self.py, "evaluate", loader.py))

    def evaluate(mut self, dataset: Dataset) raises -> Evaluation:
        """Mean loss and accuracy over a whole data set, dropout off."""
        return Evaluation(call(self.py, "evaluate", dataset.py))

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
        _ = call(odyssey().package, "export", self.py, path)


def mesh(*sizes: PythonObject, var **named: PythonObject) raises -> PythonObject:
    """Returns a mesh of ranks, the trainer's setting: replicas (dp), stages (pp) and sharers of layers (tp).

    What is left out follows from the number of ranks and the places of the model.
    """
    return call(odyssey().package, "Mesh", *sizes, **named^)
