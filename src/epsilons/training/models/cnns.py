"""The paper's two convolutional networks, as its published code has them (Tramèr and Boneh, ICLR 2021)."""

from __future__ import annotations

from torch import nn

from .shapes import expect


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
