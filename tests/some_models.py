"""Configs of every kind of input that `epsilons train` knows, each with a file to train on and one to test on."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TRAINING = """
[budgets]
delta = 1e-3
[training]
steps = 4
batch_size = 20
lr = 0.5
{loss}
[model]
{model}
[privacy]
accountant = "rdp"
"""

ROWS = ["north", "south", "a town that is in no list", ""]
WORDS = ["good film", "a bad, bad book!", "", "Müller's shop", "nothing to say"]


def table(records: int, seed: int) -> str:
    """A .csv file with numbers, categories, texts, empty cells, and values that no list has."""
    rng = np.random.default_rng(seed)
    lines = ["id,age,income,seen,town,band,job,note,label,price,epsilon"]
    for i in range(records):
        age = "" if rng.random() < 0.1 else str(rng.integers(-5, 130))
        income = "NA" if rng.random() < 0.1 else f"{rng.normal(3e4, 3e4):.2f}"
        town, note = rng.choice(ROWS), rng.choice(WORDS)
        band, job = rng.choice(["1", "2.0", "03", "x", ""]), rng.choice(["smith", "baker", ""])
        label, price = rng.choice(["no", "yes"]), f"{rng.lognormal(3, 2):.3f}"
        seen = rng.choice(["", "1999-12-31", "2010-07-02", "31.12.2019", "2030-01-01T10:15"])
        lines.append(f'{i},{age},{income},{seen},{town},{band},{job},"{note}",{label},{price},{rng.choice([1, 4])}')
    return "\n".join(lines) + "\n"


def config_of_table(inputs: str, model: str, dropped: str, target: str = "label", sections: str = "") -> str:
    """A config for such a table."""
    classes = 'classes = ["no", "yes"]' if target == "label" else ""
    data = f'[data]\ntrain = "train.csv"\ntest = "test.csv"\ntarget = "{target}"\n{classes}\nread_off = []\n'
    other = ["price"] if target == "label" else ["label"]
    left_out = [*dropped.split(), *other, "id"]
    data += f"drop = {left_out!r}\n{inputs}\n{sections}\n".replace("'", '"')
    return data + TRAINING.format(loss="" if target == "label" else 'loss = "mse"', model=model)


COLUMNS = """
[data.numeric]
age = [0, 100]
income = [0, 100000, "log"]
{target}
[data.dates]
seen = ["2000-01-01", "2020-01-01"]
[data.categorical]
town = ["north", "south"]
band = [1, 2, 3]
job = 4
"""


def _tables(config: str) -> str:
    Path("train.csv").write_text(table(120, seed=0), encoding="utf-8")
    Path("test.csv").write_text(table(60, seed=1), encoding="utf-8")
    return config


def mlp() -> str:
    """Numbers and categories."""
    return _tables(
        config_of_table("", 'name = "mlp"\noptions = { hidden = [5] }', "note", sections=COLUMNS.format(target=""))
    )


def number() -> str:
    """A number as the target, scaled by bounds on a logarithmic scale."""
    sections = COLUMNS.format(target='price = [0, 1000, "log"]')
    return _tables(config_of_table("", 'name = "logistic"', "note", "price", sections))


def unscaled_number() -> str:
    """A number as the target, as it is."""
    sections = COLUMNS.format(target="")
    return _tables(config_of_table("", 'name = "logistic"', "note", "price", sections))


def hashed_text() -> str:
    """Texts by hashed n-grams, beside other columns."""
    inputs = 'text = ["note"]\nfeatures = { name = "hashed-text", options = { buckets = 64, characters = [2] } }'
    return _tables(config_of_table(inputs, 'name = "logistic"', "", sections=COLUMNS.format(target="")))


def two_texts() -> str:
    """Two texts of a record, compared."""
    inputs = 'text = ["note", "job"]\nfeatures = { name = "hashed-text", options = { buckets = 16, compare = true } }'
    return _tables(config_of_table(inputs, 'name = "logistic"', "age income seen town band"))


def words() -> str:
    """Texts as ids of words."""
    inputs = 'text = ["note"]\ntokens = { kind = "words", length = 5, buckets = 50 }'
    options = 'name = "embedding-bag"\noptions = { dimension = 4, hidden = 3 }'
    return _tables(config_of_table(inputs, options, "age income seen town band job"))


def characters() -> str:
    """Texts as ids of bytes."""
    inputs = 'text = ["note"]\ntokens = { kind = "bytes", length = 6 }'
    options = 'name = "lstm"\noptions = { dimension = 4, hidden = 3 }'
    return _tables(config_of_table(inputs, options, "age income seen town band job"))


def pictures(side: int, channels: int, features: str, model: str) -> str:
    """Encoded images in Parquet."""
    import pyarrow
    from PIL import Image
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    for name, records in (("train", 60), ("test", 24)):
        cells = []
        for _ in range(records):
            file = io.BytesIO()
            shape = (side, side, 3) if channels == 3 else (side, side)
            Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(file, "png")
            cells.append(file.getvalue())
        labels = rng.integers(0, 2, records)
        values = {"image": cells, "label": labels, "epsilon": rng.choice([1.0, 4.0], records)}
        parquet.write_table(pyarrow.table(values), f"{name}.parquet")
    data = f'[data]\ntrain = "train.parquet"\ntest = "test.parquet"\nclasses = 2\nread_off = []\n{features}\n'
    return data + TRAINING.format(loss="", model=model)


def scattering() -> str:
    """Images by wavelet scattering, with constants that are kept."""
    features = 'features = { name = "scattering", options = { normalisation = "public", pooled = 1 } }'
    return pictures(12, 1, features, 'name = "logistic"')


def grey_cnn() -> str:
    """Grey images for a convolutional network."""
    return pictures(28, 1, "", 'name = "mnist-cnn"')


def colour_cnn() -> str:
    """Colour images for a convolutional network."""
    return pictures(32, 3, "", 'name = "cifar10-cnn"')


def resnet() -> str:
    """Colour images for a residual network."""
    return pictures(8, 3, "", 'name = "resnet18-gn"')


def arrays() -> str:
    """A folder of tensors with 8 bits per value."""
    rng = np.random.default_rng(0)
    for name, records in (("train", 60), ("test", 24)):
        Path(name).mkdir()
        np.save(f"{name}/inputs.npy", rng.integers(0, 256, (records, 2, 3), dtype=np.uint8))
        np.save(f"{name}/targets.npy", rng.integers(0, 3, records))
    np.savetxt("budgets.csv", rng.choice([1.0, 4.0], 60), header="epsilon", comments="")
    data = '[data]\ntrain = "train"\ntest = "test"\nclasses = ["a", "b", "c"]\nread_off = []\n'
    config = data + TRAINING.format(loss="", model='name = "mlp"')
    return config.replace("[budgets]", '[budgets]\nfile = "budgets.csv"')


KINDS: dict[str, Callable[[], str]] = {
    make.__name__: make
    for make in (
        *(mlp, number, unscaled_number, hashed_text, two_texts, words, characters),
        *(scattering, grey_cnn, arrays),
    )
}
LARGE: dict[str, Callable[[], str]] = {make.__name__: make for make in (colour_cnn, resnet)}


def tested_on(config: str) -> str:
    """The file or folder that a config tests on."""
    return next(name for name in ("test.csv", "test.parquet", "test") if f'test = "{name}"' in config)


def targets(name: str) -> Any:
    """The targets in a test file, read without the library."""
    import csv

    from pyarrow import parquet

    if name == "test":
        return np.load("test/targets.npy")
    if name == "test.parquet":
        return parquet.read_table(name).column("label").to_numpy()
    with open(name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
