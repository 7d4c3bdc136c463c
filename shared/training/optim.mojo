"""Losses, optimizers and learning-rate schedules: those of the Python package, which has their settings and checks
them.
"""

from std.python import ConvertibleToPython, PythonObject

from .bridge import call, odyssey, part


trait Loss:
    """Loss that a training minimizes: one of odyssey.nn."""

    @staticmethod
    def build() raises -> PythonObject:
        """Makes the Python object: called as loss(output, labels)."""
        ...


struct NamedLoss[name: StaticString](Loss):
    """CrossEntropyLoss and NLLLoss are of this type."""

    @staticmethod
    def build() raises -> PythonObject:
        return call(part("nn"), Self.name)


comptime CrossEntropyLoss = NamedLoss["CrossEntropyLoss"]
"""Cross-entropy of logits and labels."""
comptime NLLLoss = NamedLoss["NLLLoss"]
"""Negative log-likelihood of log-probabilities and labels."""


trait Optimizer(Deinitable, Movable):
    """A rule for updates, made without parameters; a trainer or an Engine binds it to those of its model."""

    def value(self) -> PythonObject:
        """The Python optimizer."""
        ...


struct NamedOptimizer[name: StaticString](ImplicitlyCopyable, Optimizer):
    """SGD, Adam, AdamW and RMSprop are of this type."""

    var _py: PythonObject

    def __init__(out self, *numbers: PythonObject, var **settings: PythonObject) raises:
        """Takes the settings of the class of odyssey.optim, such as SGD(lr=0.1, momentum=0.9), in its order or by name.

        Args:
            numbers: The first settings, from `lr` on.
            settings: The others. `betas` are `beta1` and `beta2`; with decay_vectors=False norms and biases keep their
                size.

        Raises:
            Error: A setting is unknown or not allowed.
        """
        settings["name"] = Self.name
        self._py = call(odyssey(), "optimizer", *numbers, **settings^)

    def value(self) -> PythonObject:
        return self._py


comptime SGD = NamedOptimizer["SGD"]
"""Stochastic gradient descent with momentum, Nesterov momentum and weight decay, in PyTorch's form."""
comptime Adam = NamedOptimizer["Adam"]
"""Adam (Kingma and Ba 2015); weight decay is added to the gradient."""
comptime AdamW = NamedOptimizer["AdamW"]
"""Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""
comptime RMSprop = NamedOptimizer["RMSprop"]
"""Gradients divided by the root of a running mean of their squares (Tieleman, Hinton 2012)."""


@fieldwise_init
struct Schedule(ConvertibleToPython, ImplicitlyCopyable, Movable):
    """A factor on the learning rate as a function of the step, from 0; made by the functions below."""

    var py: PythonObject
    """The Python function; any other will do as well."""

    def __call__(self, step: Int) raises -> Float64:
        """The factor of a step."""
        return Float64(py=self.py(step))

    def to_python_object(var self) raises -> PythonObject:
        """The Python function."""
        return self.py


def named_schedule[function: StaticString](*numbers: PythonObject, var **settings: PythonObject) raises -> Schedule:
    """A schedule of odyssey.optim, by the arguments that it has there."""
    return Schedule(call(part("optim"), function, *numbers, **settings^))


comptime constant = named_schedule["constant"]
"""Always 1."""
comptime step_decay = named_schedule["step_decay"]
"""The factor gamma to the power of (step // every): step_decay(every, gamma=0.1)."""
comptime cosine = named_schedule["cosine"]
"""Half a cosine from 1 to `floor` (Loshchilov and Hutter 2017, without restarts): cosine(total_steps, floor=0)."""
comptime schedule = named_schedule["schedule"]
"""By name, after a warm-up: schedule("cosine", total_steps, warmup_steps=0); also "constant", "step",
"linear-warmup".
"""


def linear_warmup(steps: Int, after: Optional[Schedule] = None) raises -> Schedule:
    """A straight line from 1 / steps to 1, then `after` (default 1), counted from the end of the warm-up."""
    return named_schedule["linear_warmup"](steps, after.value() if after else constant())
