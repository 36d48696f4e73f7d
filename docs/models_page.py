"""Writes the table of known models: python docs/models_page.py (with transformers, peft, torchvision and timm)

Every model of tests/known_models.py is trained or refused here, so this takes some minutes. The rows of a library that
is not installed stay as they are.
"""

# ruff: noqa: E501 (lines of the page)

import re
import sys
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from known_models import KNOWN, RECORDS, Known, try_out

PAGE = Path(__file__).with_name("models.md")
LIBRARIES = ("torch", "transformers", "peft", "torchvision", "timm")
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
clipped the model, or a part of it, and why. All other models are clipped by the default engine alone, with a [proof](engine.md#proof-on-the-graph) for each physical batch:
**{proven} of {count}**; {left} are left to the slower engine, {refused} are refused. The first sum of each agrees with that of the reference, `engine="loop"`.

Written by `python docs/models_page.py` with {libraries}. The models are in `tests/known_models.py` and, those of the library torch, in `tests/known_by_hand.py`.
`python tests/known_models.py NAME` tries one of them and prints how far its sum is from the reference.

| library | model | input | result | |
|---|---|---|---|---|
"""
LEFT = "Clipped by the engine vmap"
#: A contribution may be shorter by as much (docs/engine.md).
FURTHEST = 2e-3
PRINTED = {"mended and trained": "`mend`, trained"}


def models_page() -> str:
    """The page, as Markdown: its text, and a row for each model."""
    before = PAGE.read_text(encoding="utf-8")
    versions = {name: _version(name, before) for name in LIBRARIES}
    rows = [_row(known, before) for known in KNOWN]
    left = sum(LEFT in row for row in rows)
    refused = sum("| refused |" in row for row in rows)
    text = TEXT.format(
        libraries=", ".join(f"{name} {number}" for name, number in versions.items()),
        records=RECORDS,
        count=len(rows),
        proven=len(rows) - left - refused,
        left=left,
        refused=refused,
    )
    return text + "\n".join(rows) + "\n"


def _version(library: str, before: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        found = re.search(rf"{library} ([\w.+]+)[,.]", before)
        return found[1].rstrip(".") if found else "?"


def _row(known: Known, before: str) -> str:
    start = f"| {known.library} | {known.name} | {known.takes} |"
    try:
        version(known.library)
    except PackageNotFoundError:
        (row,) = (line for line in before.splitlines() if line.startswith(start))
        return row
    outcome = try_out(known)
    if outcome.how != "refused" and outcome.distance > FURTHEST:
        raise AssertionError(f"{known.name}: the sum is {outcome.distance:.1e} from the reference")
    detail = f"{outcome.detail} {outcome.vmap}".strip().replace("|", "/").replace("\n", " ")
    return f"{start} {PRINTED.get(outcome.how, outcome.how)} | {detail} |"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    PAGE.write_text(models_page(), encoding="utf-8")
