"""The models of odyssey.nn.models once more: in PyTorch, and as a count of operations.

The PyTorch modules have the parameter names and shapes of odyssey's, so weights go from one to the
other by load_state_dict. PyTorch is imported inside the functions that need it.
"""

from __future__ import annotations

from typing import Any

MODELS = ("lenet5", "mlp", "convnet")

# Output pixels of the convolutions on a 28 x 28 image; a linear layer has one position.
POSITIONS = {
    "lenet5": {"conv1": 28 * 28, "conv2": 10 * 10},
    "mlp": {},
    "convnet": {"conv1": 26 * 26, "conv2": 24 * 24},
}


def flops(name: str, model: Any) -> int:
    """Float operations of one sample, forward and backward, in convolutions and linear layers
    alone.

    A multiply-add is two. Every layer has as many for its weights' gradient as for its output, and
    again as many for the gradient of its input, which the first layer does not compute.
    """
    weights = [
        (key[: -len(".weight")], p.size)
        for key, p in model.named_parameters()
        if key.endswith(".weight")
    ]
    forward = [2 * size * POSITIONS[name].get(layer, 1) for layer, size in weights]
    return 3 * sum(forward) - forward[0]


def torch_model(name: str) -> Any:
    """The same architecture in PyTorch, on images of (1, 28, 28); ResNet-18 on small ones of (3,
    H, W).
    """
    from torch import nn

    if name == "resnet18":
        return torch_resnet18()
    if name not in MODELS:
        raise ValueError(f"{name!r} is none of {', '.join(MODELS)}")

    class LeNet5(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
            self.fc1, self.fc2, self.fc3 = (
                nn.Linear(400, 120),
                nn.Linear(120, 84),
                nn.Linear(84, 10),
            )
            self.loss = nn.CrossEntropyLoss()

        def forward(self, x: Any) -> Any:
            x = nn.functional.max_pool2d(self.conv1(x).relu(), 2)
            x = nn.functional.max_pool2d(self.conv2(x).relu(), 2)
            return self.fc3(self.fc2(self.fc1(x.flatten(1)).relu()).relu())

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(784, 512), nn.Linear(512, 10)
            self.loss = nn.CrossEntropyLoss()

        def forward(self, x: Any) -> Any:
            return self.fc2(self.fc1(x.flatten(1)).relu())

    class ConvNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
            self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
            self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)
            self.loss = nn.NLLLoss()

        def forward(self, x: Any) -> Any:
            x = self.conv2(self.conv1(x).relu()).relu()
            x = self.dropout1(nn.functional.max_pool2d(x, 2)).flatten(1)
            return self.fc2(self.dropout2(self.fc1(x).relu())).log_softmax(1)

    return {"lenet5": LeNet5, "mlp": MLP, "convnet": ConvNet}[name]()


def torch_resnet18(channels: int = 3, classes: int = 10) -> Any:
    """odyssey's ResNet-18 for small images, with torchvision's names."""
    from torch import nn

    def conv(i: int, o: int, size: int = 3, stride: int = 1) -> Any:
        return nn.Conv2d(i, o, size, stride, padding=size // 2, bias=False)

    class Block(nn.Module):
        def __init__(self, i: int, o: int, stride: int = 1) -> None:
            super().__init__()
            self.conv1, self.bn1, self.conv2, self.bn2 = (
                conv(i, o, 3, stride),
                norm(o),
                conv(o, o),
                norm(o),
            )
            self.downsample = (
                None if stride == 1 and i == o else nn.Sequential(conv(i, o, 1, stride), norm(o))
            )

        def forward(self, x: Any) -> Any:
            y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu_()))
            return (y + (x if self.downsample is None else self.downsample(x))).relu_()

    class ResNet18(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1, self.fc = conv(channels, 64), norm(64), nn.Linear(512, classes)
            widths = (64, 64, 128, 256, 512)
            for i, (a, b) in enumerate(zip(widths, widths[1:], strict=False), 1):
                setattr(self, f"layer{i}", nn.Sequential(Block(a, b, 1 + (i > 1)), Block(b, b)))

        def forward(self, x: Any) -> Any:
            x = self.bn1(self.conv1(x)).relu_()
            for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
                x = layer(x)
            return self.fc(x.mean((2, 3)))

    norm = nn.BatchNorm2d
    return ResNet18()


def torch_gpt(
    vocab_size: int,
    context: int,
    layers: int = 6,
    heads: int = 6,
    width: int = 384,
    dropout: float = 0.0,
) -> Any:
    """odyssey's GPT in PyTorch, as one writes it there: ids (N, T) to logits; the attention
    kernel is PyTorch's.
    """
    from torch import arange, nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
            self.attn, self.mlp = nn.Module(), nn.Module()
            self.attn.c_attn, self.attn.c_proj = linear(width, 3 * width), linear(width, width)
            self.mlp.c_fc, self.mlp.c_proj = linear(width, 4 * width), linear(4 * width, width)
            self.drop = nn.Dropout(dropout)

        def forward(self, x: Any) -> Any:
            n, t, f = x.shape
            parts = self.attn.c_attn(self.ln_1(x)).split(f, dim=2)
            q, k, v = (part.view(n, t, heads, f // heads).transpose(1, 2) for part in parts)
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.drop(self.attn.c_proj(y.transpose(1, 2).reshape(n, t, f)))
            return x + self.drop(self.mlp.c_proj(nn.functional.gelu(self.mlp.c_fc(self.ln_2(x)))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = nn.ModuleDict({"wte": nn.Embedding(vocab_size, width)})
            self.transformer.update(
                {"wpe": nn.Embedding(context, width), "drop": nn.Dropout(dropout)}
            )
            self.transformer.update({"h": nn.ModuleList(Block() for _ in range(layers))})
            self.transformer.update({"ln_f": nn.LayerNorm(width, bias=False)})
            self.lm_head = linear(width, vocab_size)
            self.lm_head.weight = self.transformer.wte.weight

        def forward(self, ids: Any) -> Any:
            x = self.transformer.wte(ids) + self.transformer.wpe(
                arange(ids.shape[1], device=ids.device)
            )
            x = self.transformer.drop(x)
            for block in self.transformer.h:
                x = block(x)
            return self.lm_head(self.transformer.ln_f(x))

    def linear(i: int, o: int) -> Any:
        return nn.Linear(i, o, bias=False)

    return GPT()
