"""Learning-rate schedules: a factor on the learning rate as a function of the step, as in python/odyssey/optim.py.

Numbers come from the C library's cos and pow, as Python's do, so the rates have the same bits.
"""

from std.ffi import external_call
from std.math import pi

comptime _CONSTANT = 0
comptime _STEP = 1
comptime _COSINE = 2


@fieldwise_init
struct Schedule(ImplicitlyCopyable, Movable):
    """A factor as a function of the step, counted from 0. Made by the functions below.
    """

    var kind: Int
    """Which of them."""
    var warmup: Int
    """Steps of a straight line from 1 / warmup to 1 before it."""
    var steps: Int
    """Of the whole cosine, or from one decay to the next."""
    var number: Float64
    """Floor of the cosine, or the factor of a decay."""

    def __call__(self, step: Int) -> Float64:
        """The factor of a step.

        Args:
            step: From 0.

        Returns:
            The factor.
        """
        if step < self.warmup:
            return Float64(step + 1) / Float64(self.warmup)
        var s = step - self.warmup
        if self.kind == _STEP:
            return libm_pow(self.number, Float64(s // self.steps))
        elif self.kind == _COSINE:
            var way = min(Float64(s) / Float64(max(self.steps, 1)), 1.0)
            var c = external_call["cos", Float64](pi * way)
            return self.number + _product((1 - self.number) * 0.5, 1 + c)
        return 1


@no_inline
def _product(a: Float64, b: Float64) -> Float64:
    """A product, rounded before it is added to something: no fused multiply-add, as in Python.
    """
    return a * b


def libm_pow(x: Float64, y: Float64) -> Float64:
    """The C library's x to the power of y, which Python uses.

    Args:
        x: The base.
        y: The exponent.

    Returns:
        The power.
    """
    return external_call["pow", Float64](x, y)


def constant() -> Schedule:
    """Always 1.

    Returns:
        The schedule.
    """
    return Schedule(_CONSTANT, 0, 1, 0)


def step_decay(every: Int, gamma: Float64 = 0.1) raises -> Schedule:
    """The factor gamma to the power of (step // every).

    Args:
        every: Steps from one to the next.
        gamma: The factor.

    Returns:
        The schedule.

    Raises:
        Error: `every` is below 1.
    """
    if every < 1:
        raise Error(
            "[schedule] step_decay every ",
            every,
            " steps; at least 1 is allowed",
        )
    return Schedule(_STEP, 0, every, gamma)


def cosine(total_steps: Int, floor: Float64 = 0) -> Schedule:
    """Half a cosine from 1 to `floor` over total_steps (Loshchilov and Hutter 2017, without restarts).

    Args:
        total_steps: Of the whole half wave.
        floor: Where it ends.

    Returns:
        The schedule.
    """
    return Schedule(_COSINE, 0, total_steps, floor)


def linear_warmup(steps: Int, after: Schedule = constant()) raises -> Schedule:
    """A straight line from 1 / steps to 1, then `after`, counted from the end of the warm-up.

    Args:
        steps: Their number.
        after: What follows; a warm-up of its own is left out.

    Returns:
        The schedule.

    Raises:
        Error: `steps` is negative.
    """
    if steps < 0:
        raise Error(
            "[schedule] a warm-up of ", steps, " steps; 0 or more are allowed"
        )
    return Schedule(after.kind, steps, after.steps, after.number)


def schedule(
    name: String, total_steps: Int, warmup_steps: Int = 0
) raises -> Schedule:
    """A schedule by name, after `warmup_steps` of warm-up: "constant", "step", "cosine" or "linear-warmup".

    "step" divides by 10 at one and two thirds of the way; "linear-warmup" is a constant after its warm-up (a tenth of
    the way unless given).

    Args:
        name: One of them.
        total_steps: Of the whole half wave.
        warmup_steps: Steps of warm-up.

    Returns:
        The schedule.

    Raises:
        Error: There is no such schedule, or the warm-up is negative.
    """
    if name == "linear-warmup":
        return linear_warmup(
            warmup_steps if warmup_steps else max(total_steps // 10, 1)
        )
    var rest = max(total_steps - warmup_steps, 1)
    var body: Schedule
    if name == "constant":
        body = constant()
    elif name == "step":
        body = step_decay(max((rest + 2) // 3, 1))
    elif name == "cosine":
        body = cosine(rest)
    else:
        raise Error(
            "[schedule] '",
            name,
            "' is unknown; choose from constant, step, cosine, linear-warmup",
        )
    return linear_warmup(warmup_steps, body)
