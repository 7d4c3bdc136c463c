"""Programs for test_unusual_state.py. They keep state in unusual places, such as hooks."""

from __future__ import annotations

import collections
import functools
import random
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


def attributes_of_parameters(folder):
    net = Net()
    net.register_buffer("mean", torch.zeros(3))
    net.first.weight.fisher = torch.zeros(())
    net.last.bias.group = "slow"

    def nudge(context, held):
        first, last = net.first.weight, net.last.bias
        first.fisher += first.detach().square().sum()
        last.visits = getattr(last, "visits", 0) + context.steps
        if context.steps == 3:
            last.group = "fast"
            net.mean.mask = [1, 0, 2]
        if context.steps > 4:
            net.mean.mask[1] += 1
        rate = {"slow": 1e-3, "fast": 2e-3}[last.group]
        with torch.no_grad():
            last += rate * (last.visits + float(first.fisher) % 1)
            last += torch.tensor(getattr(net.mean, "mask", [0, 0, 0])) * 1e-2

    return Program(net, callbacks=[AtSteps(nudge)])


def attributes_of_other_tensors(folder):
    def nudge(context, held):
        held.mask.age = getattr(held.mask, "age", 0) + context.steps
        held.mask += 1e-3 * held.mask.age
        with torch.no_grad():
            context.trainer.module.last.bias += held.mask

    return Program(Net(), callbacks=[AtSteps(nudge, mask=torch.zeros(3))])


def parameters_held_elsewhere(folder):
    net = Net()

    def nudge(context, held):
        held.target = held.all[context.steps % len(held.all)]
        if context.steps == 4:
            held.all.pop(1)
        with torch.no_grad():
            held.previous += 1e-2 * context.steps
        held.previous = held.target

    every = list(net.parameters())
    return Program(net, callbacks=[AtSteps(nudge, all=every, target=every[0], previous=every[1])])


def slices_of_tensors(folder):
    """A row of a table, memory of a parameter, and a tensor in a list."""
    net = Net()
    kept = []

    def nudge(context, held):
        if context.steps in (1, 6):
            held.row = held.table[context.steps % 4]
            held.bias = net.last.bias.detach()
        if context.steps == 2:
            held.kept.append(held.table)
            held.kept.append(held.row)
        held.table.mul_(1.01)
        held.bias.add_(held.row, alpha=1e-2)
        for one in held.kept:
            one.sub_(1e-2)

    table = torch.arange(12.0).reshape(4, 3)
    return Program(net, callbacks=[AtSteps(nudge, table=table, row=None, bias=None, kept=kept)])


def gradients_of_a_callback(folder):
    """Gradients that are added up over steps."""
    shift = nn.Parameter(torch.zeros(3))

    def nudge(context, held):
        (held.shift - context.trainer.module.last.bias.detach()).square().sum().backward()
        if context.steps % 3 == 0:
            held.optimizer.step()
            held.optimizer.zero_grad()
        with torch.no_grad():
            context.trainer.module.last.bias += 1e-2 * held.shift

    optimizer = torch.optim.SGD([shift], 0.1)
    return Program(Net(), callbacks=[AtSteps(nudge, shift=shift, optimizer=optimizer)])


class Trained(callbacks.Callback):
    """Tensors that optimizers train, in lists, tuples and dicts, and changes of these at random."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        draw = random.Random(seed)
        self.row = [self.tensor(draw), 2.0, [self.tensor(draw)]]
        self.pair = (self.tensor(draw), self.tensor(draw), 0.5)
        self.table = {"a": self.tensor(draw), "b": {"c": [self.tensor(draw)]}}
        self.alone = self.row[0]
        self.late = None
        hidden = self.tensor(draw)
        some = [*self.row[::2], *self.pair[:2], self.table["a"], *self.table["b"]["c"], hidden]
        self.all = [*some[:1], *some[1], *some[2:]]
        kind = draw.choice([torch.optim.SGD, torch.optim.Adam])
        optimizer = kind(self.all, lr=0.05)
        self.optimizers = {"first": optimizer, "second": torch.optim.SGD([hidden], lr=0.1)}
        if draw.random() < 0.5:
            del self.all  # only the optimizer has all of them

    def tensor(self, draw: random.Random) -> torch.Tensor:
        tensor = torch.zeros(3)
        return nn.Parameter(tensor) if draw.random() < 0.5 else tensor.requires_grad_()

    def on_step_end(self, context: callbacks.Context) -> None:
        draw = random.Random(f"{self.seed} {context.steps}")
        optimizer = self.optimizers["first"]
        trained = [one for one in optimizer.param_groups[0]["params"] if one.requires_grad]
        bias = context.trainer.module.last.bias
        for number, one in enumerate(trained):
            loss = (torch.tanh(one) - bias.detach() - number * context.loss).square().sum()
            loss.backward()  # raises an error if it is not trained any longer
        which = draw.randrange(6)
        if which == 0:
            self.table["a"].requires_grad_(not self.table["a"].requires_grad)
        elif which == 1:
            self.pair = (self.pair[1], self.tensor(draw), draw.random())
        elif which == 2:
            self.row.append(draw.choice([self.alone, self.table["a"], 1.5]))
        elif which == 3:
            self.late = draw.choice([[self.tensor(draw)], {"t": (self.tensor(draw), 1)}, None])
        elif which == 4:
            self.row[1] = draw.random()
        if context.steps % 2:
            optimizer.step()
            self.optimizers["second"].step()
            optimizer.zero_grad()
        with torch.no_grad():
            for one in self.held():
                bias += 1e-3 * torch.tanh(one) * (1 + one.requires_grad)

    def held(self) -> list[torch.Tensor]:
        """Returns all tensors by all ways that lead to them."""
        some: list[Any] = [self.row, self.pair, list(self.table.values()), self.late, self.alone]
        tensors = []
        while some:
            one = some.pop()
            if isinstance(one, (list, tuple)):
                some.extend(one)
            elif isinstance(one, dict):
                some.extend(one.values())
            elif isinstance(one, torch.Tensor):
                tensors.append(one)
        return tensors


def trained_in_containers(folder):
    return Program(Net(), callbacks=[Trained(0), Trained(1)])


def trained_in_other_containers(folder):
    return Program(Net(), callbacks=[Trained(2), Trained(3), Trained(4)])


def faster(x):
    return 2.0 * x


def slower(x):
    return 0.5 * x


def switched_functions(folder):
    """Functions of the program, and methods, that are switched."""

    class Switch(callbacks.Callback):
        def __init__(self):
            self.rule = faster
            self.phase = self.early

        def early(self):
            return 1e-3

        def late(self):
            return 3e-3

        def on_step_end(self, context):
            with torch.no_grad():
                context.trainer.module.last.bias += self.rule(self.phase())
            if context.steps in (2, 5):
                self.rule = slower if self.rule is faster else faster
            if context.steps == 3:
                self.phase = self.late

        def on_epoch_end(self, context):
            self.rule = faster

    return Program(Net(), callbacks=[Switch()])


RIGHT = (
    attributes_of_parameters,
    attributes_of_other_tensors,
    trained_in_containers,
    trained_in_other_containers,
    parameters_held_elsewhere,
    slices_of_tensors,
    gradients_of_a_callback,
    switched_functions,
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


def lambda_set_at_the_end_of_an_epoch(folder):
    """The next on_epoch_start does not set it, so a resumed run lacks it."""

    class Switch(callbacks.Callback):
        def __init__(self):
            self.rule = faster

        def on_epoch_end(self, context):
            self.rule = lambda x: 3 * x

    return Program(Net(), callbacks=[Switch()])


def nested_tensor(folder):
    def grow(context, held):
        held.rows = held.rows * 1.1

    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    return Program(Net(), callbacks=[AtSteps(grow, rows=rows)])


def object_of_an_earlier_epoch(folder):
    """In the second epoch, a resumed run has no meter of the first epoch."""

    class Shift(callbacks.Callback):
        def __init__(self):
            self.previous = None
            self.current = None

        def on_epoch_start(self, context):
            self.previous, self.current = self.current, Smoothed()

        def on_step_end(self, context):
            self.current.update(context.steps)

    return Program(Net(), callbacks=[Shift()])


# What a resumed run can't do again, and is refused by name.
REFUSED = {
    lambda_set_at_the_end_of_an_epoch: (
        r"callbacks\.Switch\.rule holds .*<lambda> where .*faster was when fit\(\) began"
    ),
    nested_tensor: r"AtSteps\.rows was a torch\.Tensor \(nested\) when .* \(nested\) now",
    object_of_an_earlier_epoch: r"callbacks\.Shift\.previous is a .*Smoothed that was created in",
    hook_added: r"model\.first\._forward_hooks\[0\] was set to .*halve since",
    hook_taken_out: r"model\.first\._forward_hooks\[0\] \(.*halve\) was taken out since",
    hook_of_another_module: r"model\.first\._forward_hooks\[0\] was set to .*halve since",
    method_replaced: r"model\.forward was set to .*forward of line \d+ since",
    object_of_the_first_step: r"callbacks\.Late\.meter is a .*Smoothed that was created in a step",
    object_of_the_first_epoch: r"callbacks\.Late\.meter is a .*Smoothed that was created",
    method_of_a_callback_replaced: r"callbacks\.Noise\.amount was set to .*pow since",
}
