"""The models that steps are timed on, with inputs; each in plain PyTorch and in what Opacus can train.

"head" is a linear model on the scattering features of a picture of 28 x 28 (docs/concepts.md#fixed-features).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Task:
    """One network with its data.

    model    (is_opacus, wider) -> the network, with hidden layers `wider` times as wide
    batch    (n) -> n records
    records  of one step
    """

    model: Callable[[bool, int], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    records: int
    physical_batch: int
    is_image: bool = False


def mnist(wider: int = 1) -> nn.Module:
    """Opacus' MNIST example with tanh, the paper's network."""
    return nn.Sequential(
        nn.Conv2d(1, 16 * wider, 8, 2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16 * wider, 32 * wider, 4, 2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512 * wider, 32 * wider), nn.Tanh(), nn.Linear(32 * wider, 10),
    )  # fmt: skip


def cifar(wider: int = 1) -> nn.Module:
    """Six convolutions with tanh (Papernot et al. 2021), the paper's network."""
    layers: list[nn.Module] = []
    widths = [3, *(w * wider for w in (32, 32, 64, 64, 128, 128))]
    for a, b in itertools.pairwise(widths):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.Tanh()]
        if a == b:
            layers.append(nn.MaxPool2d(2, 2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048 * wider, 128), nn.Tanh(), nn.Linear(128, 10))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    def __init__(self, width: int = 256, layers: int = 4, words: int = 8000, time: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        angle = torch.arange(time)[:, None] * torch.exp(-math.log(1e4) * torch.arange(0, width, 2) / width)
        self.register_buffer("position", torch.cat([angle.sin(), angle.cos()], 1))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens) + self.position)).mean(1))


class Bag(nn.Module):
    """Opacus' IMDB example: an embedding, its mean, two linear layers."""

    def __init__(self, wider: int = 1) -> None:
        super().__init__()
        width = 16 * wider
        self.embedding, self.first, self.head = nn.Embedding(28_996, width), nn.Linear(width, 16), nn.Linear(16, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.relu(self.first(self.embedding(tokens).mean(1))))


class Lstm(nn.Module):
    def __init__(self, is_opacus: bool, wider: int = 1) -> None:
        super().__init__()
        hidden = 128 * wider
        self.embedding = nn.Embedding(1000, 64)
        if is_opacus:
            from opacus.layers import DPLSTM

            self.lstm = DPLSTM(64, hidden, batch_first=True)
        else:
            self.lstm = nn.LSTM(64, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


class Residual(nn.Module):
    def __init__(self, a: int, b: int, stride: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.Conv2d(b, b, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(32, b), nn.GroupNorm(32, b)
        is_same = a == b and stride == 1
        self.short = (
            nn.Identity() if is_same else nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.GroupNorm(32, b))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.two(F.relu(self.norm1(self.one(x)))))
        return F.relu(y + self.short(x))


def resnet(wider: int = 1) -> nn.Module:
    """ResNet18 for 32 x 32 pictures, GroupNorm for BatchNorm."""
    widths = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2),
              (512, 512, 1)]  # fmt: skip
    stem = [nn.Conv2d(3, 64 * wider, 3, 1, 1, bias=False), nn.GroupNorm(32, 64 * wider), nn.ReLU()]
    blocks = [Residual(a * wider, b * wider, stride) for a, b, stride in widths]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512 * wider, 10))


class Mixing(nn.Module):
    """A depthwise convolution, a mixture of tokens and one of channels, each behind a LayerNorm."""

    def __init__(self, width: int, tokens: int) -> None:
        super().__init__()
        self.near = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.tokens = nn.Linear(tokens, tokens)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, tokens, width)"""
        b, t, d = x.shape
        side = math.isqrt(t)
        picture = self.norms[0](x).transpose(1, 2).reshape(b, d, side, side)
        x = x + self.near(picture).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norms[1](x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.norms[2](x))))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al., NeurIPS 2021) with a depthwise convolution in each of its four blocks."""

    def __init__(self, wider: int = 1) -> None:
        super().__init__()
        width = 128 * wider
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(*(Mixing(width, 64) for _ in range(4)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(tokens)).mean(1))


def _pictures(*shape: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, *shape), torch.randint(10, (n,)))


def _words(words: int, time: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randint(words, (n, time)), torch.randint(2, (n,)))


TASKS: dict[str, Task] = {
    "mnist": Task(lambda _, wider=1: mnist(wider), _pictures(1, 28, 28), 512, 256, is_image=True),
    "cifar": Task(lambda _, wider=1: cifar(wider), _pictures(3, 32, 32), 512, 32, is_image=True),
    "transformer": Task(lambda _, wider=1: Transformer(256 * wider), _words(8000, 64), 64, 32),
    "imdb": Task(lambda _, wider=1: Bag(wider), _words(28_996, 256), 512, 256),
    "lstm": Task(Lstm, _words(1000, 32), 512, 256),
    "mixer": Task(lambda _, wider=1: Mixer(wider), _pictures(3, 32, 32), 256, 64, is_image=True),
    "head": Task(lambda _, wider=1: nn.Linear(3_969 * wider, 10), _pictures(3_969), 512, 256),
    "resnet": Task(lambda _, wider=1: resnet(wider), _pictures(3, 32, 32), 32, 16, is_image=True),
}
