"""The paper's two convolutional networks, as its published code has them (Tramèr and Boneh, ICLR 2021)."""

from __future__ import annotations

from torch import Tensor, nn

from ..errors import InputError, named
from .plain import expect


def mnist_cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Two convolutions and two linear layers for (1, 28, 28); 26,010 parameters for 10 classes."""
    expect("mnist-cnn", shape, "(1, 28, 28)", shape == (1, 28, 28))
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, outputs),
    )


def cifar10_cnn(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """Six convolutions and two linear layers for (3, 32, 32); 550,570 parameters for 10 classes."""
    expect("cifar10-cnn", shape, "(3, 32, 32)", shape == (3, 32, 32))
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(after, after, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, outputs))


# -- ResNet-18 (He et al., CVPR 2016) with GroupNorm in the place of BatchNorm, which would mix records


def resnet18_gn(shape: tuple[int, ...], outputs: int, norm_groups: int = 32, stem: str = "small") -> nn.Module:
    """For images (channels, height, width) of at least 8 pixels a side.

    norm_groups  groups of each GroupNorm; must divide 64
    stem         "small": a 3x3 convolution, for images like CIFAR's; "large": 7x7 with stride 2 and pooling, as
                 published for ImageNet (11,181,642 parameters for 3 channels and 10 classes)
    """
    fits = len(shape) == 3 and min(shape[1:]) >= 8
    expect("resnet18-gn", shape, "(channels, height, width), each side at least 8", fits)
    if norm_groups < 1 or 64 % norm_groups:
        raise InputError(f"norm_groups must divide 64, got {norm_groups}.")
    stems = {
        "small": [nn.Conv2d(shape[0], 64, 3, padding=1, bias=False), nn.GroupNorm(norm_groups, 64), nn.ReLU()],
        "large": [
            nn.Conv2d(shape[0], 64, 7, stride=2, padding=3, bias=False),
            nn.GroupNorm(norm_groups, 64),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        ],
    }
    blocks: list[nn.Module] = [*named(stems, stem, "stem")]
    before = 64
    for after, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [_Block(before, after, stride, norm_groups), _Block(after, after, 1, norm_groups)]
        before = after
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, outputs)]
    return nn.Sequential(*blocks, *head)


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int, norm_groups: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.GroupNorm(norm_groups, after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.GroupNorm(norm_groups, after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(
                nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.GroupNorm(norm_groups, after)
            )
        self.out = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, before, h, w) -> (batch, after, h / stride, w / stride)."""
        return self.out(self.body(x) + self.shortcut(x))  # type: ignore[no-any-return]  # modules are untyped
