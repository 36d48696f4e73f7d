"""Known architectures with random weights: trained, mended and trained, or refused with a reason (docs/models.md)."""

from __future__ import annotations

import importlib.util
import runpy

import pytest
from torch import nn

import epsilons
from known_models import KNOWN, Known, train, try_out
from pages import ROOT

PAGE = (ROOT / "docs" / "models.md").read_text("utf-8")
WRITER = runpy.run_path(str(ROOT / "docs" / "models_page.py"))
ROWS = WRITER["read"](PAGE)
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
    assert {key: row.takes for key, row in ROWS.items()} == {(k.library, k.name): k.takes for k in KNOWN}
    assert len(ROWS) == len(KNOWN) >= 100
    assert {row.how for row in ROWS.values()} <= {"trained", "mended", "refused"}
    assert all(row.layers for row in ROWS.values() if row.how == "mended")
    assert all(row.why for row in ROWS.values() if row.how == "refused")


def test_the_page_is_what_its_program_writes_of_these_rows():
    """If it is out of date: python docs/models_page.py."""
    in_order = {(known.library, known.name): ROWS[known.library, known.name] for known in KNOWN}
    assert WRITER["models_page"](in_order, WRITER["_versions"](PAGE)) == PAGE


@pytest.mark.slow
@pytest.mark.parametrize("known", [known for known in KNOWN if known.name in SOME], ids=lambda known: known.name)
def test_a_known_model_ends_as_its_row_of_the_page_says(known: Known):
    if not importlib.util.find_spec(known.library):
        pytest.skip(f"{known.library} is not installed")
    row = ROWS[known.library, known.name]
    outcome = try_out(known)
    assert outcome.how == {"mended": "mended and trained"}.get(row.how, row.how)
    assert bool(outcome.vmap) == (row.how != "refused" and bool(row.why))
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
