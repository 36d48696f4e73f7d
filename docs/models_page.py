"""The table of known models: python docs/models_page.py > docs/models.md (with transformers, torchvision and timm)

Every model of tests/known_models.py is trained or refused here, so this takes some minutes.
"""

# ruff: noqa: E501 (lines of the page)

import sys
import warnings
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from known_models import KNOWN, RECORDS, Known, try_out

TEXT = """# Models

What happens to known architectures, and what `epsilons.mend` changes in a model.

## Mend a model

BatchNorm mixes the records of a batch, so it is refused in training mode. `mend` edits the model in place and returns what it replaced, a
line per layer. It returns no model, unlike Opacus' `ModuleValidator.fix`, whose place `epsilons.opacus.ModuleValidator.fix` takes:

```python
import epsilons
import torch
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
lines = epsilons.mend(model)
assert lines == [
    "1: BatchNorm2d(16) is now GroupNorm(2, 16). Weight and bias are kept, the outputs change."
]
```

| | `batch_norm="group"`, the default | `batch_norm="freeze"` |
|---|---|---|
| BatchNorm becomes | GroupNorm, which normalises each record alone | its running statistics, as constants, also after `model.train()` |
| outputs | change, so train the model from the start or train on | are those of `model.eval()` before |
| weight and bias | are kept, and trained as before | are kept, and trained as before |
| use it for | models that you train | models that were trained on **public** data |

* **Frozen statistics are not protected.** Statistics of private records reveal them, and no guarantee covers that. Statistics that
  were never updated are 0 and 1, so the layer normalises nothing; the line says so.
* **Groups.** There are at most 32 groups of at least 8 channels, and one group if the channels have no such divisor (13 channels, say).
  `groups=16` means at most 16 groups of at least 2 channels. A group of one value would be erased: GroupNorm returns its bias. Of
  two values, as BatchNorm1d may see them, little more than the order is left. So BatchNorm of one channel is refused.
* **Other layers.** InstanceNorm with running statistics loses them, and StochasticDepth drops rows in place of batches.
* **timm** has layers that normalise and then apply an activation. The activation is kept.
* **Shared layers** stay shared. Parameters stay the same objects, so an optimizer that exists stays valid.
* **Refused**, with the layer's name, and the model unchanged: layers with a `forward` method of their own, with hooks or
  parametrizations, lazy layers before their first call, layers that are also kept in a plain list, and the layer itself as the model.

## Known models

Each model has random weights and is small: about two layers or blocks, 32 channels, images of 3 x 32 x 32 pixels, texts of 12 tokens, where the
library lets one choose, otherwise its smallest variant. `make_private` trains it for two steps on {records} made-up records, each in
every draw, with the default engine and all checks. *trained* means as it is, in training mode with its dropout. *`mend`, trained* means that
it was refused, then mended by `epsilons.mend(model)`, and trained. *refused* shows the message. Some operators have no rule in the default engine; the row then says that the slower engine
clipped the model, or a part of it.

Printed by `python docs/models_page.py` with {libraries}. The models are in `tests/known_models.py`, {count} of them.

| library | model | input | result | |
|---|---|---|---|---|
"""
PRINTED = {"mended and trained": "`mend`, trained"}


def models_page() -> str:
    """The page, as Markdown: its text, and a row for each model."""
    libraries = ", ".join(
        f"{name} {version(name)}" for name in ("torch", "transformers", "torchvision", "timm")
    )
    rows = [_row(known) for known in KNOWN]
    return (
        TEXT.format(libraries=libraries, records=RECORDS, count=len(rows)) + "\n".join(rows) + "\n"
    )


def _row(known: Known) -> str:
    outcome = try_out(known)
    detail = outcome.detail.replace("|", "/").replace("\n", " ")
    return f"| {known.library} | {known.name} | {known.takes} | {PRINTED.get(outcome.how, outcome.how)} | {detail} |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(models_page(), end="")
