"""Losses, optimizers and learning-rate schedules: names and settings for those of the Python package."""

from std.python import Python, PythonObject

from .bridge import call, part


trait Loss:
    """What a training minimizes: a loss of odyssey.nn."""

    @staticmethod
    def build() raises -> PythonObject:
        """Makes the Python object: called as loss(output, labels)."""
        ...


struct CrossEntropyLoss(Loss):
    """Cross-entropy of logits and labels."""

    @staticmethod
    def build() raises -> PythonObject:
        """Makes nn.CrossEntropyLoss."""
        return part("nn").CrossEntropyLoss()


struct NLLLoss(Loss):
    """Negative log-likelihood of log-probabilities and labels."""

    @staticmethod
    def build() raises -> PythonObject:
        """Makes nn.NLLLoss."""
        return part("nn").NLLLoss()


# --- optimizers ---------------------------------------------------------------------------------------------


trait Optimizer(Deinitable, Movable):
    """A rule for updates, made without parameters; a trainer or an Engine binds it to those of its model."""

    def value(self) -> PythonObject:
        """The Python optimizer."""
        ...


struct SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay, in PyTorch's form."""

    var _py: PythonObject

    def __init__(
        out self,
        lr: Float64 = 0.01,
        momentum: Float64 = 0,
        weight_decay: Float64 = 0,
        nesterov: Bool = False,
    ) raises:
        """Checks the settings."""
        var settings = Python.dict()
        settings["momentum"] = momentum
        settings["nesterov"] = nesterov
        self._py = _made["SGD"](lr, weight_decay, settings)

    def value(self) -> PythonObject:
        """The Python optimizer."""
        return self._py


struct Adaptive[name: StaticString](Optimizer):
    """Adam and AdamW are of this type."""

    var _py: PythonObject

    def __init__(
        out self,
        lr: Float64 = 1e-3,
        beta1: Float64 = 0.9,
        beta2: Float64 = 0.999,
        eps: Float64 = 1e-8,
        weight_decay: Float64 = 0.01 if Self.name == "AdamW" else 0.0,
        *,
        decay_vectors: Bool = True,
    ) raises:
        """Checks the settings; without `decay_vectors` norms and biases keep their size."""
        var settings = Python.dict()
        settings["betas"] = Python.tuple(beta1, beta2)
        settings["eps"] = eps
        self._py = _made[Self.name](lr, weight_decay, settings)
        if not decay_vectors:
            self._py.undecayed = part("optim").vectors

    def value(self) -> PythonObject:
        """The Python optimizer."""
        return self._py


comptime Adam = Adaptive["Adam"]
"""Adam (Kingma and Ba 2015); weight decay is added to the gradient."""
comptime AdamW = Adaptive["AdamW"]
"""Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""


def _made[name: StaticString](lr: Float64, decay: Float64, settings: PythonObject) raises -> PythonObject:
    settings["lr"] = lr
    settings["weight_decay"] = decay
    return call(part("optim"), name, settings=settings)


# --- schedules ----------------------------------------------------------------------------------------------


@fieldwise_init
struct Schedule(ImplicitlyCopyable, Movable):
    """A factor on the learning rate as a function of the step, from 0; made by the functions below."""

    var py: PythonObject
    """The Python function; any other will do as well."""

    def __call__(self, step: Int) raises -> Float64:
        """The factor of a step."""
        return Float64(py=self.py(step))


def constant() raises -> Schedule:
    """Always 1."""
    return Schedule(call(part("optim"), "constant"))


def step_decay(every: Int, gamma: Float64 = 0.1) raises -> Schedule:
    """The factor gamma to the power of (step // every)."""
    return Schedule(call(part("optim"), "step_decay", every, gamma))


def cosine(total_steps: Int, floor: Float64 = 0) raises -> Schedule:
    """Half a cosine from 1 to `floor` over total_steps (Loshchilov and Hutter 2017, without restarts)."""
    return Schedule(call(part("optim"), "cosine", total_steps, floor))


def linear_warmup(steps: Int, after: Optional[Schedule] = None) raises -> Schedule:
    """A straight line from 1 / steps to 1, then `after` (default 1), counted from the end of the warm-up."""
    var then = after.value() if after else constant()
    return Schedule(call(part("optim"), "linear_warmup", steps, then.py))


def schedule(name: String, total_steps: Int, warmup_steps: Int = 0) raises -> Schedule:
    """A schedule by name, after `warmup_steps` of warm-up: "constant", "step", "cosine" or "linear-warmup"."""
    return Schedule(call(part("optim"), "schedule", name, total_steps, warmup_steps))
