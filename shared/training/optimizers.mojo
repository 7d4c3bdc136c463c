"""Optimizers: settings and state around the kernels of kernels/optimizer.mojo, as in python/odyssey/optim.py.

An optimizer is made without parameters; a trainer binds it to the arena of its model. `apply` takes gradients summed
over samples and what they are divided by. It changes nothing and returns False if one of them is not finite.
"""

from std.memory import unsafe_memcpy

from kernels.lanes import Ptr
from kernels.optimizer import adam, sgd
from kernels.reduce import is_finite

from .arena import aligned_zeros
from .json import Json, JsonList, json
from .schedules import libm_pow


struct _State(Movable):
    """State arrays of the arena's layout, by name."""

    var names: List[String]
    var arrays: List[Ptr]
    var size: Int  # floats of each

    def __init__(out self, var names: List[String]):
        """The arrays that an optimizer keeps; they have no memory before it is bound.

        Args:
            names: What they are called.
        """
        self.names = names^
        self.arrays = List[Ptr]()
        self.size = 0

    def allocate(mut self, size: Int) raises:
        """Zeros for an arena of so many floats.

        Raises:
            Error: The optimizer updates another model already.

        Args:
            size: Floats of the arena.
        """
        if len(self.arrays):
            raise Error(
                "[optimizer] it already updates another model; make a second"
                " one"
            )
        self.size = size
        for _ in range(len(self.names)):
            self.arrays.append(aligned_zeros(size))

    def __deinit__(deinit self):
        """Frees its memory."""
        for a in self.arrays:
            a.unsafe_free()


def _divides(divisor: Float32) -> Bool:
    """Whether 1 / divisor is finite: not for the 0 samples of an empty batch.
    """
    var share = 1 / divisor
    return share - share == 0


trait Optimizer(Deinitable, Movable):
    """An update rule with its settings and state."""

    def bind(mut self, size: Int) raises:
        """Starts with a state of zeros for an arena of `size` floats.

        Args:
            size: Floats of the arena.

        Raises:
            Error: It is not allowed.
        """
        ...

    def apply(
        mut self,
        params: Ptr,
        grads: Ptr,
        size: Int,
        divisor: Float32,
        rate: Float64,
    ) -> Bool:
        """Updates the parameters if all gradients and 1 / divisor are finite; returns whether they were.

        Args:
            params: Of the arena.
            grads: Summed over samples, of the same layout.
            size: Floats of the arena.
            divisor: What gradients are divided by.
            rate: The learning rate of this step.

        Returns:
            The output.
        """
        ...

    def rate(self) -> Float64:
        """The learning rate that it was made with.

        Returns:
            The rate.
        """
        ...

    def set_rate(mut self, lr: Float64):
        """Takes a learning rate from a checkpoint.

        Args:
            lr: The rate.
        """
        ...

    def steps(self) -> Int:
        """Steps taken so far.

        Returns:
            Their number.
        """
        ...

    def set_steps(mut self, steps: Int):
        """Takes their number from a checkpoint.

        Args:
            steps: Their number.
        """
        ...

    def kind(self) -> String:
        """Its name, "SGD" say, as in a checkpoint.

        Returns:
            The name.
        """
        ...

    def description(self) -> Json:
        """Its name and settings, as a checkpoint compares them.

        Returns:
            The list of both.
        """
        ...

    def state_names(self) -> List[String]:
        """What its state arrays are called.

        Returns:
            The names.
        """
        ...

    def state_array(self, i: Int) -> Ptr:
        """State array i, of the arena's layout; once it is bound.

        Args:
            i: The number of the array.

        Returns:
            Its floats.
        """
        ...


def _check(
    owner: String, name: String, value: Float64, high: Float64, above: Bool
) raises:
    """Raises an Error unless value is from 0 (or above 0) to below `high`."""
    var low = value > 0 if above else value >= 0
    if not (low and value < high):
        raise Error(
            "[",
            owner,
            "] ",
            name,
            " is ",
            value,
            "; it must be ",
            "above" if above else "at least",
            " 0 and ",
            "finite" if high > 2 else "below 1",
        )


def _pair(name: String, value: Json) -> Json:
    var both = JsonList()
    both.append(json(name))
    both.append(value)
    return both.json()


comptime _HUGE = Float64.MAX_FINITE


struct SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov momentum and weight decay.
    """

    var lr: Float64
    """Learning rate."""
    var momentum: Float64
    """Share of the last update that is repeated."""
    var weight_decay: Float64
    """Times the weights, added to the gradient."""
    var nesterov: Bool
    """Whether the gradient is taken where the momentum leads."""
    var _steps: Int
    var _state: _State

    def __init__(
        out self,
        lr: Float64 = 0.01,
        momentum: Float64 = 0,
        weight_decay: Float64 = 0,
        nesterov: Bool = False,
    ) raises:
        """Checks the settings.

        Args:
            lr: Learning rate, above 0.
            momentum: At least 0 and below 1.
            weight_decay: At least 0.
            nesterov: Needs a momentum.

        Raises:
            Error: One of them is not allowed.
        """
        _check("SGD", "lr", lr, _HUGE, True)
        _check("SGD", "momentum", momentum, 1, False)
        _check("SGD", "weight_decay", weight_decay, _HUGE, False)
        if nesterov and momentum == 0:
            raise Error("[SGD] nesterov needs a momentum above 0")
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.nesterov = nesterov
        self._steps = 0
        self._state = _State(["momentum"])

    def bind(mut self, size: Int) raises:
        """Starts with a state of zeros for an arena of `size` floats.

        Args:
            size: Floats of the arena.

        Raises:
            Error: It is not allowed.
        """
        self._state.allocate(size)

    def apply(
        mut self,
        params: Ptr,
        grads: Ptr,
        size: Int,
        divisor: Float32,
        rate: Float64,
    ) -> Bool:
        """Updates the parameters if all gradients and 1 / divisor are finite; returns whether they were.

        Args:
            params: Of the arena.
            grads: Sums over samples.
            size: Floats of the arena.
            divisor: What gradients are divided by.
            rate: The learning rate of this step.

        Returns:
            The output.
        """
        if not _divides(divisor) or not is_finite(grads, size):
            return False
        self._steps += 1
        sgd(
            params,
            self._state.arrays[0],
            grads,
            size,
            1 / divisor,
            Float32(rate),
            Float32(self.momentum),
            Float32(self.weight_decay),
            self.nesterov,
        )
        return True

    def rate(self) -> Float64:
        """The learning rate that it was made with.

        Returns:
            The rate.
        """
        return self.lr

    def set_rate(mut self, lr: Float64):
        """Takes a learning rate from a checkpoint.

        Args:
            lr: The rate.
        """
        self.lr = lr

    def steps(self) -> Int:
        """Steps taken so far.

        Returns:
            Their number.
        """
        return self._steps

    def set_steps(mut self, steps: Int):
        """Takes their number from a checkpoint.

        Args:
            steps: Their number.
        """
        self._steps = steps

    def kind(self) -> String:
        """Its name.

        Returns:
            The name.
        """
        return "SGD"

    def description(self) -> Json:
        """Its name and settings, as a checkpoint compares them.

        Returns:
            The list of both.
        """
        var settings = JsonList()
        settings.append(_pair("lr", json(self.lr)))
        settings.append(_pair("momentum", json(self.momentum)))
        settings.append(_pair("nesterov", json(self.nesterov)))
        settings.append(_pair("weight_decay", json(self.weight_decay)))
        return _pair(self.kind(), settings.json())

    def state_names(self) -> List[String]:
        """What its state arrays are called.

        Returns:
            The names.
        """
        return self._state.names.copy()

    def state_array(self, i: Int) -> Ptr:
        """State array i, of the arena's layout; once it is bound.

        Args:
            i: The number of the array.

        Returns:
            Its floats.
        """
        return self._state.arrays[i]


struct Adam[decoupled: Bool = False](Optimizer):
    """Adam (Kingma and Ba 2015); weight decay is added to the gradient, or taken off the weights if `decoupled`.

    Parameters:
        decoupled: AdamW.
    """

    var lr: Float64
    """Learning rate."""
    var beta1: Float64
    """Of the mean of gradients."""
    var beta2: Float64
    """Of the mean of their squares."""
    var eps: Float64
    """Added to the root."""
    var weight_decay: Float64
    """Times the weights."""
    var _steps: Int
    var _state: _State

    def __init__(
        out self,
        lr: Float64 = 1e-3,
        beta1: Float64 = 0.9,
        beta2: Float64 = 0.999,
        eps: Float64 = 1e-8,
        weight_decay: Float64 = 0.01 if Self.decoupled else 0.0,
    ) raises:
        """Checks the settings.

        Args:
            lr: Learning rate, above 0.
            beta1: At least 0 and below 1.
            beta2: At least 0 and below 1.
            eps: Above 0.
            weight_decay: At least 0.

        Raises:
            Error: One of them is not allowed.
        """
        comptime owner = "AdamW" if Self.decoupled else "Adam"
        _check(owner, "lr", lr, _HUGE, True)
        _check(owner, "beta1", beta1, 1, False)
        _check(owner, "beta2", beta2, 1, False)
        _check(owner, "eps", eps, _HUGE, True)
        _check(owner, "weight_decay", weight_decay, _HUGE, False)
        self.lr = lr
        self.beta1 = beta1
        self.beta2 = beta2
        self.eps = eps
        self.weight_decay = weight_decay
        self._steps = 0
        self._state = _State(["m", "v"])

    def bind(mut self, size: Int) raises:
        """Starts with a state of zeros for an arena of `size` floats.

        Args:
            size: Floats of the arena.

        Raises:
            Error: It is not allowed.
        """
        self._state.allocate(size)

    def apply(
        mut self,
        params: Ptr,
        grads: Ptr,
        size: Int,
        divisor: Float32,
        rate: Float64,
    ) -> Bool:
        """Updates the parameters if all gradients and 1 / divisor are finite; returns whether they were.

        Args:
            params: Of the arena.
            grads: Sums over samples.
            size: Floats of the arena.
            divisor: What gradients are divided by.
            rate: The learning rate of this step.

        Returns:
            The output.
        """
        if not _divides(divisor) or not is_finite(grads, size):
            return False
        self._steps += 1
        var n = Float64(self._steps)
        adam(
            params,
            self._state.arrays[0],
            self._state.arrays[1],
            grads,
            size,
            1 / divisor,
            Float32(rate),
            Float32(self.beta1),
            Float32(self.beta2),
            Float32(self.eps),
            Float32(self.weight_decay),
            Self.decoupled,
            Float32(1 - libm_pow(self.beta1, n)),
            Float32(1 - libm_pow(self.beta2, n)),
        )
        return True

    def rate(self) -> Float64:
        """The learning rate that it was made with.

        Returns:
            The rate.
        """
        return self.lr

    def set_rate(mut self, lr: Float64):
        """Takes a learning rate from a checkpoint.

        Args:
            lr: The rate.
        """
        self.lr = lr

    def steps(self) -> Int:
        """Steps taken so far.

        Returns:
            Their number.
        """
        return self._steps

    def set_steps(mut self, steps: Int):
        """Takes their number from a checkpoint.

        Args:
            steps: Their number.
        """
        self._steps = steps

    def kind(self) -> String:
        """Its name.

        Returns:
            The name.
        """
        return "AdamW" if Self.decoupled else "Adam"

    def description(self) -> Json:
        """Its name and settings, as a checkpoint compares them.

        Returns:
            The list of both.
        """
        var settings = JsonList()
        var betas = JsonList()
        betas.append(json(self.beta1))
        betas.append(json(self.beta2))
        settings.append(_pair("betas", betas.json()))
        settings.append(_pair("eps", json(self.eps)))
        settings.append(_pair("lr", json(self.lr)))
        settings.append(_pair("weight_decay", json(self.weight_decay)))
        return _pair(self.kind(), settings.json())

    def state_names(self) -> List[String]:
        """What its state arrays are called.

        Returns:
            The names.
        """
        return self._state.names.copy()

    def state_array(self, i: Int) -> Ptr:
        """State array i, of the arena's layout; once it is bound.

        Args:
            i: The number of the array.

        Returns:
            Its floats.
        """
        return self._state.arrays[i]


comptime AdamW = Adam[decoupled=True]
"""Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""
