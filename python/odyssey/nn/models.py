"""The models that `odyssey train --model` knows.

Each has `loss`, its training loss; samples are (C, H, W). `target_scale` are the arguments of a
`TargetScale`, the last layer of a network that learns numbers; None: the network learns classes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..core import functional as F
from ..core.tensor import Tensor
from ..errors import ConfigError
from .gpt import GPT, gpt, gpt_mini
from .layers import AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Dropout, Identity, Linear, MaxPool2d
from .losses import CrossEntropyLoss, NLLLoss
from .module import Module, Sequential, manual_seed
from .targets import TargetScale

Shape = tuple[int, int, int]
Scale = Sequence[Any]


class LeNet5(Module):
    """LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling; 61,706 parameters on 28 x 28 grey
    images.

    A 28 x 28 image is padded to 32 x 32; larger ones are taken as they are.
    """

    def __init__(
        self,
        sample_shape: Shape = (1, 28, 28),
        classes: int = 10,
        target_scale: Scale | None = None,
    ) -> None:
        super().__init__()
        c, h, w = sample_shape
        padding = 2 if min(h, w) < 32 else 0
        self.conv1 = Conv2d(c, 6, 5, padding=padding)
        self.conv2 = Conv2d(6, 16, 5)
        p, q = (((size + 2 * padding - 4) // 2 - 4) // 2 for size in (h, w))
        self.fc1 = Linear(16 * p * q, 120)
        self.fc2 = Linear(120, 84)
        self.fc3 = Linear(84, classes)
        self.loss = CrossEntropyLoss()
        self.target_scale = _scale_layer(target_scale)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(F.flatten(x)))
        return self.target_scale(self.fc3(F.relu(self.fc2(x))))


class MLP(Module):
    """784-512-10 with ReLU; the input size follows the samples, images or rows of numbers (F,).

    targets: mean and standard deviation of numbers that are learnt; outputs begin with the one and
    vary by the other. `odyssey train` uses `target_scale` instead.
    """

    def __init__(
        self,
        sample_shape: tuple[int, ...] = (1, 28, 28),
        classes: int = 10,
        hidden: int = 512,
        targets: tuple[float, float] | None = None,
        target_scale: Scale | None = None,
    ) -> None:
        super().__init__()
        self.targets = targets
        self.fc1 = Linear(math.prod(sample_shape), hidden)
        self.fc2 = Linear(hidden, classes)
        if targets is not None:
            self.fc2.bias.data[...] = targets[0] / targets[1]
        self.loss = CrossEntropyLoss()
        self.target_scale = _scale_layer(target_scale)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc2(F.relu(self.fc1(F.flatten(x))))
        return self.target_scale(y if self.targets is None else y * self.targets[1])


class ConvNet(Module):
    """Conv 32 and 64 of 3 x 3, max-pool, dropout, 128, dropout, log-softmax; trained with
    NLLLoss.
    """

    def __init__(
        self,
        sample_shape: Shape = (1, 28, 28),
        classes: int = 10,
        target_scale: Scale | None = None,
    ) -> None:
        super().__init__()
        c, h, w = sample_shape
        self.conv1 = Conv2d(c, 32, 3)
        self.conv2 = Conv2d(32, 64, 3)
        self.dropout1 = Dropout(0.25)
        self.fc1 = Linear(64 * ((h - 4) // 2) * ((w - 4) // 2), 128)
        self.dropout2 = Dropout(0.5)
        self.fc2 = Linear(128, classes)
        self.loss = NLLLoss()
        self.target_scale = _scale_layer(target_scale)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = F.flatten(self.dropout1(F.max_pool2d(x, 2)))
        x = self.dropout2(F.relu(self.fc1(x)))
        y = self.fc2(x)
        if isinstance(self.target_scale, TargetScale):
            return self.target_scale(y)
        return F.log_softmax(y)


class BasicBlock(Module):
    """Two convolutions of 3 x 3, each with batch norm; the input is added to the result (He et
    al. 2016).
    """

    def __init__(self, channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = Conv2d(channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = BatchNorm2d(out_channels)
        self.conv2 = Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = BatchNorm2d(out_channels)
        self.downsample = None
        if stride != 1 or channels != out_channels:
            conv = Conv2d(channels, out_channels, 1, stride, bias=False)
            self.downsample = Sequential(conv, BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet18(Module):
    """ResNet-18 (He et al. 2016) with torchvision's names.

    Images of at least 64 x 64 begin with a 7 x 7 convolution of stride 2 and a max-pool, as
    ImageNet's; smaller ones with a 3 x 3 convolution of stride 1, as is usual for CIFAR-10.
    """

    def __init__(
        self,
        sample_shape: Shape = (3, 32, 32),
        classes: int = 10,
        target_scale: Scale | None = None,
    ) -> None:
        super().__init__()
        channels = sample_shape[0]
        large = min(sample_shape[1:]) >= 64
        stem = (
            {"kernel_size": 7, "stride": 2, "padding": 3}
            if large
            else {"kernel_size": 3, "padding": 1}
        )
        self.conv1 = Conv2d(channels, 64, **stem, bias=False)
        self.bn1 = BatchNorm2d(64)
        self.maxpool = MaxPool2d(3, 2, padding=1) if large else Identity()
        self.layer1 = Sequential(BasicBlock(64, 64), BasicBlock(64, 64))
        self.layer2 = Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128))
        self.layer3 = Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256))
        self.layer4 = Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512))
        self.avgpool = AdaptiveAvgPool2d(1)
        self.fc = Linear(512, classes)
        self.loss = CrossEntropyLoss()
        self.target_scale = _scale_layer(target_scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.target_scale(self.fc(F.flatten(self.avgpool(x))))


def _scale_layer(target_scale: Scale | None) -> Module:
    """Returns the last layer of a network for the arguments of a `TargetScale`."""
    return Identity() if target_scale is None else TargetScale(*target_scale)


MODELS: dict[str, Callable[..., Module]] = {
    "lenet5": LeNet5,
    "mlp": MLP,
    "convnet": ConvNet,
    "resnet18": ResNet18,
    "gpt": gpt,
    "gpt-mini": gpt_mini,
}


def build(name: str, *shape: Any, seed: int = 0, **settings: Any) -> Module:
    """A model by name, with initial weights that depend on the seed alone.

    shape, settings: what the model's class takes: of images sample_shape and classes, else see GPT.

    Raises ConfigError: the name is unknown, samples that the model does not take, or a setting is
    none of the model's.
    """
    if name not in MODELS:
        raise ConfigError(f"[model] {name!r} is unknown; choose from {', '.join(MODELS)}")
    sample_shape = settings.get("sample_shape", (*shape, (1, 28, 28))[0])
    least = {"lenet5": 12, "convnet": 6, "resnet18": 1}.get(name)
    if least and (len(sample_shape) != 3 or min(sample_shape[1:]) < least):
        raise ConfigError(
            f"[model] {name} takes images (C, H, W) of at least {least} x {least}; the samples are "
            f"{sample_shape}; choose mlp"
        )
    manual_seed(seed)
    try:
        inspect.signature(GPT if name.startswith("gpt") else MODELS[name]).bind_partial(
            *shape, **settings
        )
    except TypeError as problem:
        raise ConfigError(f"[model] {name}: {problem}") from None
    return MODELS[name](*shape, **settings)
