"""Programs for test_unusual_state.py. They keep state in unusual places, such as hooks."""

from __future__ import annotations

import collections
import functools
from typing import Any

import numpy as np
import torch
from pytorch.ordinary_programs import Net, Program
from torch import nn
from torch.nn import functional as F

from odyssey import callbacks


def halve(module: Any, inputs: Any, output: Any) -> Any:
    return output * 0.5


def sharpen(module: Any, inputs: Any, output: Any) -> Any:
    return output * 1.5


class AtSteps(callbacks.Callback):
    """Calls a function of (context, its own objects) after each step."""

    def __init__(self, call: Any, **held: Any) -> None:
        self._call = call
        self.__dict__.update(held)

    def on_step_end(self, context: callbacks.Context) -> None:
        self._call(context, self)


def hook_added(folder):
    net = Net()

    def add(context, held):
        if context.steps == 1:
            net.first.register_forward_hook(halve)

    return Program(net, callbacks=[AtSteps(add)])


def hook_taken_out(folder):
    net = Net()
    handle = net.first.register_forward_hook(halve)

    def take_out(context, held):
        if context.steps == 1:
            handle.remove()

    return Program(net, callbacks=[AtSteps(take_out)])


def hook_of_another_module(folder):
    """The function is a hook of one module already."""
    net = Net()
    net.last.register_forward_hook(halve)

    def add(context, held):
        if context.steps == 1:
            net.first.register_forward_hook(halve)

    return Program(net, callbacks=[AtSteps(add)])


def method_replaced(folder):
    net = Net()

    def forward(x):
        return net.last(F.relu(net.first(x)))

    def replace(context, held):
        if context.steps == 1:
            net.forward = forward

    return Program(net, callbacks=[AtSteps(replace)])


def method_of_a_callback_replaced(folder):
    class Noise(callbacks.Callback):
        def amount(self, step):
            return 1e-3 * step

        def on_step_end(self, context):
            with torch.no_grad():
                context.trainer.module.last.bias += self.amount(context.steps)
            if context.steps == 1:
                self.amount = functools.partial(pow, 1e-2)

    return Program(Net(), callbacks=[Noise()])


def hook_of_an_epoch(folder):
    """A hook that is there in every second epoch."""

    class Halve(callbacks.Callback):
        def on_epoch_start(self, context):
            self.handle = None
            if context.epoch % 2 == 0:
                self.handle = context.trainer.module.first.register_forward_hook(halve)

        def on_epoch_end(self, context):
            if self.handle is not None:
                self.handle.remove()

    return Program(Net(), callbacks=[Halve()])


def hook_of_a_step(folder):
    """A hook that is there while a step runs."""

    class Halve(callbacks.Callback):
        def on_fit_start(self, context):
            self.module = context.trainer.module

        def on_step_end(self, context):
            handle = self.module.first.register_forward_hook(halve)
            self.module(torch.ones(1, 6))
            handle.remove()

    return Program(Net(), callbacks=[Halve()])


def spawned_generators(folder):
    def nudge(context, held):
        (child,) = held.random.spawn(1)
        with torch.no_grad():
            context.trainer.module.last.bias += float(child.normal()) * 0.01

    return Program(Net(), callbacks=[AtSteps(nudge, random=np.random.default_rng(5))])


def spawned_seeds(folder):
    def nudge(context, held):
        (child,) = held.seeds.spawn(1)
        with torch.no_grad():
            context.trainer.module.last.bias += float(np.random.default_rng(child).normal()) * 0.01

    return Program(Net(), callbacks=[AtSteps(nudge, seeds=np.random.SeedSequence([1, 2]))])


class Counted:
    """Counts how often it was set."""

    def __init__(self) -> None:
        self.__dict__["sets"] = 0
        self.rate = 0.0

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        object.__setattr__(self, "sets", self.sets + 1)


class CountedSlots:
    __slots__ = ("rate", "sets")

    def __init__(self) -> None:
        object.__setattr__(self, "sets", 0)
        self.rate = 0.0

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        object.__setattr__(self, "sets", self.sets + 1)


def assignments_with_effects(folder):
    def nudge(context, held):
        for one in held.settings:
            one.rate = one.rate + 1e-3
        with torch.no_grad():
            for one in held.settings:
                context.trainer.module.last.bias += one.rate * one.sets

    return Program(Net(), callbacks=[AtSteps(nudge, settings=[Counted(), CountedSlots()])])


def property_computed_late(folder):
    class Scaled:
        def __init__(self, net):
            self.net = net

        @functools.cached_property
        def scale(self):
            return float(self.net.first.weight.detach().abs().mean())

    net = Net()

    def nudge(context, held):
        if context.steps >= 2:
            with torch.no_grad():
                net.last.bias += held.scaled.scale * 1e-2

    return Program(net, callbacks=[AtSteps(nudge, scaled=Scaled(net))])


class Smoothed:
    """An exponential moving average of the values that it receives."""

    def __init__(self) -> None:
        self.value = 0.0
        self.count = 0

    def update(self, value: float) -> None:
        self.value += (value - self.value) * 0.3
        self.count += 1


def items_created_late(folder):
    """As torchvision's reference programs keep their meters."""

    def nudge(context, held):
        held.meters["loss"].update(context.trainer.last.loss)
        held.meters[f"step {context.steps % 4}"].update(context.steps)
        held.meters[context.steps % 3].update(context.steps)
        mean = sum(meter.value * meter.count for meter in held.meters.values())
        with torch.no_grad():
            context.trainer.module.last.bias += 1e-4 * mean

    meters = collections.defaultdict(Smoothed)
    nested = collections.defaultdict(lambda: collections.defaultdict(Smoothed))

    def nudge_nested(context, held):
        held.meters["test"][str(context.steps % 5)].update(context.trainer.last.loss)
        mean = sum(meter.count for meter in held.meters["test"].values())
        with torch.no_grad():
            context.trainer.module.last.bias -= 1e-3 * mean

    class Second(AtSteps):
        pass

    return Program(
        Net(), callbacks=[AtSteps(nudge, meters=meters), Second(nudge_nested, meters=nested)]
    )


def objects_of_an_epoch(folder):
    """Meters that on_epoch_start creates, and that steps read."""

    class Meters(callbacks.Callback):
        def on_epoch_start(self, context):
            self.meters = {name: Smoothed() for name in ("loss", "steps")}

        def on_step_end(self, context):
            self.meters["loss"].update(context.trainer.last.loss)
            self.meters["steps"].update(context.steps)
            with torch.no_grad():
                context.trainer.module.last.bias += 1e-3 * self.meters["loss"].value

    return Program(Net(), callbacks=[Meters()])


def a_second_net_that_the_loss_asks(folder):
    """The loss calls a discriminator, and a callback trains the discriminator."""
    critic = nn.Linear(3, 1)
    with torch.no_grad():
        critic.weight.copy_(torch.linspace(-1, 1, 3).reshape(1, 3))
        critic.bias.zero_()

    def loss(output, target):
        return F.cross_entropy(output, target) - 0.1 * critic(output).mean()

    class TrainCritic(callbacks.Callback):
        def __init__(self):
            self.critic = critic
            self.optimizer = torch.optim.Adam(critic.parameters(), 0.1)

        def on_step_end(self, context):
            self.optimizer.zero_grad()
            probe = torch.linspace(-1, 1, 6).reshape(2, 3) * context.steps
            self.critic(probe).square().mean().backward()
            self.optimizer.step()

    return Program(Net(), loss, callbacks=[TrainCritic()])


RIGHT = (
    a_second_net_that_the_loss_asks,
    objects_of_an_epoch,
    items_created_late,
    hook_of_an_epoch,
    hook_of_a_step,
    spawned_generators,
    spawned_seeds,
    assignments_with_effects,
    property_computed_late,
)


def object_of_the_first_step(folder):
    """An object that is there when the second epoch starts."""

    class Late(callbacks.Callback):
        def on_step_end(self, context):
            if context.steps == 2:
                self.meter = Smoothed()
            if context.steps >= 2:
                self.meter.update(context.steps)

    return Program(Net(), callbacks=[Late()])


def object_of_the_first_epoch(folder):
    class Late(callbacks.Callback):
        def on_epoch_start(self, context):
            if context.epoch == 1:
                self.meter = Smoothed()

        def on_step_end(self, context):
            self.meter.update(context.steps)

    return Program(Net(), callbacks=[Late()])


# What a resumed run can't do again, and is refused by name.
REFUSED = {
    hook_added: r"model\.first\._forward_hooks\[0\] was set to .*halve since",
    hook_taken_out: r"model\.first\._forward_hooks\[0\] \(.*halve\) was taken out since",
    hook_of_another_module: r"model\.first\._forward_hooks\[0\] was set to .*halve since",
    method_replaced: r"model\.forward was set to .*forward since",
    object_of_the_first_step: r"callbacks\.Late\.meter is a .*Smoothed that was created in a step",
    object_of_the_first_epoch: r"callbacks\.Late\.meter is a .*Smoothed that was created",
    method_of_a_callback_replaced: r"callbacks\.Noise\.amount was set to .*pow since",
}
