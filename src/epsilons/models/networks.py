"""The models of the table: logistic regression, a multilayer perceptron, models for texts and for images.

tanh by default: bounded activations keep gradients small, so less of them is clipped away (Papernot et al., Tempered
Sigmoid Activations for Deep Learning with Differential Privacy, AAAI 2021).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from ..errors import InputError, named

# -- What a model can take

#: More are refused: each layer takes time to build, whatever its size.
MOST_LAYERS, MOST_UNITS = 1_000, 2**31


def expect(name: str, shape: tuple[int, ...], expected: str, fits: bool) -> None:
    """Raise InputError unless the data's records have a shape that this model can take."""
    if not fits:
        raise InputError(
            f"The model {name!r} expects records of shape {expected}; these data have {shape}. Choose another model."
        )


# -- Logistic regression and a multilayer perceptron

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "gelu": nn.GELU}


def logistic(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """One linear layer on the flattened record; linear regression if the target is a number."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


def mlp(shape: tuple[int, ...], outputs: int, hidden: Sequence[int] = (64,), activation: str = "tanh") -> nn.Module:
    """Linear layers with `hidden` units each; activation: "tanh", "relu" or "gelu"."""
    activate = named(ACTIVATIONS, activation, "activation")
    is_list = not isinstance(hidden, str | int | float) and len(hidden) <= MOST_LAYERS
    if not (is_list and all(isinstance(width, int) and width >= 1 for width in hidden)):
        raise InputError(f"hidden lists at most {MOST_LAYERS:,} layer widths, e.g. [64, 64], got {hidden!r:.80}.")
    layers: list[nn.Module] = [nn.Flatten()]
    width = math.prod(shape)
    for next_width in hidden:
        layers += [nn.Linear(width, next_width), activate()]
        width = next_width
    return nn.Sequential(*layers, nn.Linear(width, outputs))


# -- Models for texts as ids of tokens (`epsilons.data.texts`): 0 is padding; every record has the same number of ids


def embedding_bag(
    shape: tuple[int, ...], outputs: int, buckets: int = 16_384, dimension: int = 16, hidden: int = 16
) -> nn.Module:
    """The mean of the tokens' embeddings, then linear layers; for (tokens,).

    buckets    ids are from 0 to buckets - 1
    dimension  length of an embedding
    hidden     units of the layer between the mean and the output; 0 for none
    """
    _check("embedding-bag", shape, buckets=buckets, dimension=dimension)
    if not isinstance(hidden, int) or hidden < 0:
        raise InputError(f"hidden is a number of units, or 0 for no hidden layer, got {hidden!r}.")
    layers: list[nn.Module] = [_Mean(buckets, dimension)]
    if hidden:
        layers += [nn.Linear(dimension, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden or dimension, outputs))


def lstm(
    shape: tuple[int, ...], outputs: int, buckets: int = 257, dimension: int = 64, hidden: int = 128, layers: int = 1
) -> nn.Module:
    """Embeddings, an LSTM, and a linear layer on its last state; for (tokens,), with the padding in front.

    buckets    ids are from 0 to buckets - 1; 257 are those of bytes
    dimension  length of an embedding
    hidden     units of each LSTM layer
    layers     number of LSTM layers
    """
    _check("lstm", shape, buckets=buckets, dimension=dimension, hidden=hidden, layers=layers)
    return nn.Sequential(_LastState(buckets, dimension, hidden, layers), nn.Linear(hidden, outputs))


def _check(name: str, shape: tuple[int, ...], **sizes: int) -> None:
    expect(name, shape, "(tokens,), which are ids of tokens", len(shape) == 1 and shape[0] >= 1)
    for option, size in sizes.items():
        least, most = 2 if option == "buckets" else 1, MOST_LAYERS if option == "layers" else MOST_UNITS
        if not isinstance(size, int) or not least <= size <= most:
            raise InputError(f"{option} must be a whole number, at least {least}, got {size!r:.80} (at most {most:,}).")


class _Embeddings(nn.Module):
    """(batch, tokens) -> (batch, tokens, dimension): the tokens' embeddings, and zeros for padding.

    The padding's row of the table has no gradient, but it gets noise like all others, so it must not be used.
    """

    def __init__(self, buckets: int, dimension: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(buckets, dimension, padding_idx=0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids.long()) * (ids != 0).unsqueeze(-1)  # type: ignore[no-any-return]  # modules are untyped


class _Mean(nn.Module):
    """The mean of the embeddings of the tokens that are no padding; zeros for an empty text."""

    def __init__(self, buckets: int, dimension: int) -> None:
        super().__init__()
        self.embeddings = _Embeddings(buckets, dimension)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, tokens) -> (batch, dimension)."""
        tokens = (ids != 0).sum(1, keepdim=True).clamp(min=1)
        return self.embeddings(ids).sum(1) / tokens  # type: ignore[no-any-return]


class _LastState(nn.Module):
    def __init__(self, buckets: int, dimension: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embeddings = _Embeddings(buckets, dimension)
        self.lstm = nn.LSTM(dimension, hidden, layers, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        """(batch, tokens) -> (batch, hidden)."""
        return self.lstm(self.embeddings(ids))[0][:, -1]  # type: ignore[no-any-return]


# -- The paper's two convolutional networks, as its published code has them (Tramèr and Boneh, ICLR 2021)


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
