"""Known architectures with random weights: trained, mended and trained, or refused with a reason (docs/models.md)."""

from __future__ import annotations

import importlib.util
import re

import pytest
from torch import nn

import epsilons
from known_models import KNOWN, Known, train, try_out
from pages import ROOT

PAGE = ROOT / "docs" / "models.md"
ROWS = re.findall(r"^\| (\w+) \| ([^|]+) \| (\w+) \| ([^|]+) \| ([^|]*) \|$", PAGE.read_text("utf-8"), re.M)
#: A few of each family; the page has all.
SOME = [
    "Bert",
    "GPT2",
    "T5 encoder",
    "Llama",
    "Nystromformer",
    "ViT",
    "ConvNext",
    "ResNet",
    "MobileNetV2",
    "test_byobnet",
    "U-Net",
    "Variational autoencoder",
    "GPT with tied weights",
    "Transformer, sequence to sequence",
    "TabNet",
    "Siamese",
    "Graph attention",
    "Spectral normalisation",
]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]


def test_the_page_has_a_row_for_every_model_and_none_is_left_open():
    assert [row[:3] for row in ROWS] == [(known.library, known.name, known.takes) for known in KNOWN]
    assert len(ROWS) >= 100
    assert {how for *_, how, _ in ROWS} <= {"trained", "`mend`, trained", "refused"}
    assert all(detail for *_, how, detail in ROWS if how != "trained")


@pytest.mark.slow
@pytest.mark.parametrize("known", [known for known in KNOWN if known.name in SOME], ids=lambda known: known.name)
def test_a_known_model_ends_as_its_row_of_the_page_says(known: Known):
    if not importlib.util.find_spec(known.library):
        pytest.skip(f"{known.library} is not installed")
    ((said, detail),) = {
        (how.replace("`mend`,", "mended and"), detail)
        for library, name, _, how, detail in ROWS
        if name == known.name and library == known.library
    }
    outcome = try_out(known)
    assert outcome.how == said
    assert bool(outcome.vmap) == ("Clipped by the engine vmap" in detail)
    assert outcome.how == "refused" or outcome.distance <= 2e-3


class _Bottleneck(nn.Module):
    """The residual block of ResNet-50 (He et al., 2016), as torchvision and timm build it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width // 2, 1, bias=False), nn.BatchNorm2d(width // 2)
        self.conv2, self.bn2 = nn.Conv2d(width // 2, width // 2, 3, padding=1, bias=False), nn.BatchNorm2d(width // 2)
        self.conv3, self.bn3 = nn.Conv2d(width // 2, width, 1, bias=False), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        return self.relu(self.bn3(self.conv3(out)) + x)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["group", "freeze"])
def test_a_residual_net_by_its_definition_is_mended_and_trained(mode):
    body = [nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), _Bottleneck(16), _Bottleneck(16)]
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))
    assert len(epsilons.mend(model, mode)) == 7
    train(model, "image")
