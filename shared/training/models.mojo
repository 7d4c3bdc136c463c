"""The models that come with odyssey, as python/odyssey/nn/models.py has them: the same parameters, the same bits."""

from .composition import Module
from .layers import Conv2d, Linear
from .tensor import Tensor, flatten, max_pool2d, relu


struct LeNet5(ImplicitlyCopyable, Module):
    """LeNet-5 (LeCun et al. 1998) with ReLU and max-pooling, on 28 x 28 grey images; 61,706 parameters."""

    comptime Input = Tensor[1, 28, 28]
    """Images."""
    comptime Output = Tensor[10]
    """Logits of ten classes."""

    var conv1: Conv2d[1, 6, 5, padding=2]
    """On images in a frame of zeros, 32 x 32."""
    var conv2: Conv2d[6, 16, 5]
    """On 14 x 14."""
    var fc1: Linear[400, 120]
    """On 16 channels of 5 x 5."""
    var fc2: Linear[120, 84]
    """Hidden."""
    var fc3: Linear[84, 10]
    """The classes."""

    def __init__(out self):
        """Its parameters get their numbers from the trainer."""
        self.conv1 = {}
        self.conv2 = {}
        self.fc1 = {}
        self.fc2 = {}
        self.fc3 = {}

    def forward(self, x: Self.Input) raises -> Self.Output:
        var a = max_pool2d[2](relu(self.conv1.forward(x)))
        var b = max_pool2d[2](relu(self.conv2.forward(a)))
        var c = relu(self.fc1.forward(flatten(b)))
        return self.fc3.forward(relu(self.fc2.forward(c)))


struct MLP[hidden: Int = 512](ImplicitlyCopyable, Module):
    """784-hidden-10 with ReLU."""

    comptime Input = Tensor[1, 28, 28]
    """Images."""
    comptime Output = Tensor[10]
    """Logits of ten classes."""

    var fc1: Linear[784, Self.hidden]
    """On the pixels."""
    var fc2: Linear[Self.hidden, 10]
    """The classes."""

    def __init__(out self):
        """Its parameters get their numbers from the trainer."""
        self.fc1 = {}
        self.fc2 = {}

    def forward(self, x: Self.Input) raises -> Self.Output:
        return self.fc2.forward(relu(self.fc1.forward(flatten(x))))
