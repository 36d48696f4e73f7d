"""Writes the page of known models: python docs/models_page.py (with transformers, peft, torchvision and timm)

Every model of tests/known_models.py is trained or refused here, so this takes some minutes. The models of a library
that is not installed stay as the page has them.
"""

# ruff: noqa: E501 (lines of the page)

import re
import sys
import warnings
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from known_models import KNOWN, RECORDS, Known, try_out

PAGE = Path(__file__).with_name("models.md")
LIBRARIES = ("torch", "transformers", "peft", "torchvision", "timm")
TEXT = """# Models

## Mend a model

BatchNorm mixes the records of a batch, so it is refused in training mode. `mend` edits the model in place and returns
what it replaced, and no model, unlike Opacus' `ModuleValidator.fix` and `epsilons.opacus.ModuleValidator.fix`:

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
| use it for | models that you train | models that were trained on **public** data |

Weight and bias are kept, and trained as before.

* **Frozen statistics are not protected.** Statistics of private records reveal them, and no guarantee covers that. If
  they were never updated, the layer normalises nothing; the line says so.
* **Groups.** There are at most 32 groups of at least 8 channels, and one group if the channels have no such divisor (13
  channels, say). `groups=16` means at most 16 groups of at least 2 channels. A group of one value would be erased, so
  BatchNorm of one channel is refused. Of two values, as BatchNorm1d may see them, little more than the order is left.
* **Other layers.** InstanceNorm with running statistics loses them, and StochasticDepth drops rows in place of batches.
  Layers of timm that normalise and then apply an activation keep it.
* **Shared layers** stay shared. Parameters stay the same objects, so an optimizer that exists stays valid.
* **Refused**, with the layer's name, and the model unchanged: layers with a `forward` method of their own, with hooks
  or parametrizations, lazy layers before their first call, layers that are also kept in a plain list, and the layer
  itself as the model.

## Known models

Each model has random weights and is small (two layers, 32 channels), or the smallest variant of its library.
`make_private` trains it for two steps on {records} made-up records, each in every draw, with the default engine, all
checks, and dropout. **{proven} of {count}** are clipped by the default engine alone, with a
[proof](engine.md#proof-on-the-graph) for each physical batch; {left} are left to the slower engine `vmap`, {refused}
are refused. The first sum of each agrees with that of `engine="loop"`. Where `mend` was needed, the number of replaced
layers follows the name.

Written by `python docs/models_page.py` with {libraries}. `python tests/known_models.py NAME` tries one of them.

| library | input | models |
|---|---|---|
{models}

| clipped by the engine `vmap`, or a part of it | models |
|---|---|
{slow}

| refused | why |
|---|---|
{errors}
"""
SAID = "Clipped by the engine vmap, which is slower: "
#: A contribution may be shorter by as much (docs/engine.md).
FURTHEST = 2e-3


class Row(NamedTuple):
    """How a model ended. how: trained, mended or refused; layers: that were replaced; why: of vmap, or the message."""

    takes: str
    how: str
    layers: int = 0
    why: str = ""


Rows = Mapping[tuple[str, str], Row]


def models_page(rows: Rows, versions: str) -> str:
    """The page, as Markdown."""
    refused = {key: row for key, row in rows.items() if row.how == "refused"}
    slow = {key: row for key, row in rows.items() if row.why and key not in refused}
    places: dict[tuple[str, str], list[str]] = {}
    for (library, name), row in rows.items():
        layers = f" ({row.layers})" if row.layers else ""
        places.setdefault((library, row.takes), []).append(f"{name}{layers}")
    whys = dict.fromkeys(row.why for row in slow.values())
    by_why = {
        why: "; ".join(_model(key) for key, row in slow.items() if row.why == why) for why in whys
    }
    return TEXT.format(
        libraries=versions,
        records=RECORDS,
        count=len(rows),
        proven=len(rows) - len(slow) - len(refused),
        left=len(slow),
        refused=len(refused),
        models="\n".join(
            f"| {library} | {takes} | {'; '.join(names)} |"
            for (library, takes), names in places.items()
        ),
        slow="\n".join(f"| {why} | {names} |" for why, names in by_why.items()),
        errors="\n".join(f"| {_model(key)} | {row.why} |" for key, row in refused.items()),
    )


def _model(key: tuple[str, str]) -> str:
    return f"{key[1]} ({key[0]})"


def read(page: str) -> dict[tuple[str, str], Row]:
    """The rows of a page that `models_page` wrote."""
    _, models, slow, errors = re.split(
        r"^\|.*\|\n\|[-|]+\|\n", page.partition("## Known models")[2], flags=re.M
    )
    found = {}
    for library, takes, names in re.findall(r"^\| (\w+) \| (\w+) \| (.+) \|$", models, re.M):
        for name in names.split("; "):
            alone, layers = re.fullmatch(r"(.+?)(?: \((\d+)\))?", name).groups()  # type: ignore[union-attr]
            found[library, alone] = Row(takes, "mended" if layers else "trained", int(layers or 0))
    for why, names in re.findall(r"^\| (.+?) \| (.+) \|$", slow, re.M):
        for key in map(_key, names.split("; ")):
            found[key] = found[key]._replace(why=why)
    for name, why in re.findall(r"^\| (.+?) \| (.+) \|$", errors, re.M):
        found[_key(name)] = found[_key(name)]._replace(how="refused", why=why)
    return found


def _key(text: str) -> tuple[str, str]:
    name, library = re.fullmatch(r"(.+) \((\w+)\)", text).groups()  # type: ignore[union-attr]
    return library, name


def _row(known: Known, before: Rows) -> Row:
    if _version(known.library) is None:
        return before[known.library, known.name]
    outcome = try_out(known)
    if outcome.how != "refused" and outcome.distance > FURTHEST:
        raise AssertionError(f"{known.name}: the sum is {outcome.distance:.1e} from the reference")
    how = outcome.how.split()[0]  # "mended and trained"
    layers = int(outcome.detail.split()[0]) if how == "mended" else 0
    why = outcome.detail if how == "refused" else outcome.vmap.removeprefix(SAID)
    return Row(known.takes, how, layers, why.replace("|", "/").replace("\n", " "))


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _versions(before: str) -> str:
    """Of each library; of one that is not installed, the version that the page names."""
    named = dict(re.findall(rf"({'|'.join(LIBRARIES)}) (\d[\w.+]*\w)", before))
    return ", ".join(f"{name} {_version(name) or named.get(name, '?')}" for name in LIBRARIES)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    page = PAGE.read_text(encoding="utf-8")
    rows = {(known.library, known.name): _row(known, read(page)) for known in KNOWN}
    PAGE.write_text(models_page(rows, _versions(page)), encoding="utf-8")
