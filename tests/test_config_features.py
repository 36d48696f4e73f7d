"""Training by a config on fixed features: inputs, constants and words of the run, and what is refused."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from epsilons.training import RunFolder

pytest.importorskip("torch")

import torch

from epsilons import Budgets, Recipe, make_private, plan
from epsilons import fit as epsilons_fit
from epsilons.configs.config_file import read_config
from epsilons.configs.prepare import Prepared, prepare
from epsilons.errors import InputError
from epsilons.training.features import FEATURES, features_of_run, scattering
from program import change, epsilons


def train(*arguments: str) -> None:
    epsilons("train", "people.toml", *arguments).succeeded()


def prepared(run: Path | None = None) -> Prepared:
    return prepare(read_config(Path("people.toml")), Path(), run)


def written(path: str) -> Any:
    return json.loads(Path(path).read_text())


PICTURES = """
[data]
train = "pictures"
test_share = 0.25
classes = 2
features = { name = "scattering", options = { normalisation = "groups", pooled = 1 } }
[budgets]
shares = { "1" = 0.5, "4" = 0.5 }
delta = 1e-3
[model]
name = "logistic"
[training]
steps = 3
batch_size = 10
lr = 0.2
seeds = [1]
[privacy]
accountant = "rdp"
"""


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """60 small pictures, 8 bits a pixel, and a config that trains on their features."""
    monkeypatch.chdir(tmp_path)
    coins = np.random.default_rng(0)
    Path("pictures").mkdir()
    np.save("pictures/inputs.npy", coins.integers(0, 256, (60, 1, 12, 12), dtype=np.uint8))
    np.save("pictures/targets.npy", coins.integers(0, 2, 60))
    Path("people.toml").write_text(PICTURES)


def test_a_config_trains_on_features_and_the_run_s_guarantee_names_them(pictures):
    train("-q")
    origin = "wavelet scattering of each record's image, with constants that come from no data"
    settings = written("runs/people-1/run.json")
    assert settings["features"] == origin
    assert f"Inputs: {origin}." in settings["guarantee"]
    assert settings["metadata"]["config"]["data"]["features"]["name"] == "scattering"
    report = epsilons("report", "runs/people-1", "--json")
    report.succeeded(origin)
    settings["features"] = "raw inputs"
    Path("runs/people-1/run.json").write_text(json.dumps(settings))
    epsilons("report", "runs/people-1").is_refused(2, "contradicts itself")


def test_the_inputs_of_a_config_with_features_are_those_of_the_function(pictures):
    inputs = torch.from_numpy(np.load("pictures/inputs.npy")).float() / 255
    ready = prepared()
    assert ready.train.inputs.shape == (45, 81)
    assert ready.test is not None
    joined = np.concatenate([ready.train.inputs, ready.test.inputs])
    whole = scattering(inputs, "groups", 1).numpy()
    np.testing.assert_allclose(np.sort(joined[:, 0]), np.sort(whole[:, 0]), atol=1e-6)
    train("-q")
    np.testing.assert_array_equal(features_of_run("runs/people-1")(inputs), whole)
    assert Path("runs/people-1/features.safetensors").stat().st_mode & 0o77 == 0


def test_features_of_an_image_file_get_its_pixels_from_0_to_1(pictures):
    images = np.load("pictures/inputs.npy")
    cells = []
    for pixels in images:
        file = io.BytesIO()
        Image.fromarray(pixels[0]).save(file, "png")
        cells.append(file.getvalue())
    labels = pa.array(np.load("pictures/targets.npy"))
    parquet.write_table(pa.table({"image": cells, "label": labels}), "pictures.parquet")
    from_tensors = prepared().train.inputs
    change('"pictures"', '"pictures.parquet"')
    np.testing.assert_array_equal(prepared().train.inputs, from_tensors)


def test_features_keep_the_constants_of_the_run(pictures):
    """A later version of a decoder may compute others; an attack and a later record use those of the run."""
    change('normalisation = "groups"', 'normalisation = "public"')
    train("-q")
    stored = features_of_run("runs/people-1").constants
    assert {name: tuple(values.shape) for name, values in stored.items()} == {"matrix": (81, 81), "offset": (81,)}
    assert all(
        torch.equal(values, stored[name]) for name, values in FEATURES["scattering"].constants((1,), "public").items()
    )
    run = Path("runs/people-1")
    np.testing.assert_array_equal(prepared(run).train.inputs, prepared().train.inputs)
    replace(features_of_run(run), constants={name: 1.1 * values for name, values in stored.items()}).save(run)
    assert not np.allclose(prepared(run).train.inputs, prepared().train.inputs)


def test_a_run_does_not_continue_on_other_features(pictures):
    train("-q")
    change("pooled = 1", "pooled = 1, unit = true")
    train("--resume", "-q")  # the same constants; the data have changed, and the run was finished
    change('normalisation = "groups"', 'normalisation = "public"')
    epsilons("train", "people.toml", "--resume", "--run-dir", "runs/people-1").is_refused(2, "began on other features")


def test_an_attack_on_a_run_uses_the_features_that_the_run_keeps(pictures):
    train("-q")
    shadows = ("--shadows", "8", "-o", "attack", "-q")
    epsilons("attack", "runs/people-1", *shadows).succeeded()
    Path("runs/people-1/features.safetensors").write_bytes(b"damaged")
    again = ("--shadows", "8", "-o", "attack-2", "-q")
    epsilons("attack", "runs/people-1", *again).is_refused(2, "features.safetensors cannot be read")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "scattering"', 'name = "wavelets"', "No features are called 'wavelets'; there are: scattering"),
        ("pooled = 1", "pool = 1", "no option 'pool'; they take: normalisation, pooled, unit"),
        ("pooled = 1", "constants = {}", "no option 'constants'"),
        ("pooled = 1", "pooled = 9", "pooled must be from 1 to 3"),
        (
            '"scattering", options = {',
            '"hashed-text", options = {} } #',
            "are of texts: name their columns in data.text",
        ),
        ("options = {", "option = {", r"[data.features] has no key 'option'; did you mean 'options'"),
    ],
)
def test_features_that_do_not_fit_are_refused_before_training(pictures, old, new, words):
    change(old, new)
    epsilons("train", "people.toml").is_refused(2, words)
    assert not Path("runs").exists()


def test_features_of_images_refuse_records_that_are_none(pictures):
    change("delta = 1e-3", "delta = 1e-4")
    change('train = "pictures"\ntest_share = 0.25\nclasses = 2', 'train = "digits"')
    epsilons("train", "people.toml").is_refused(2, "got (1437, 64)")


@pytest.mark.parametrize("fit", [True, False])
def test_in_python_the_metadata_say_what_computed_the_inputs(fit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    budgets = Budgets([1.0] * 100, delta=1e-3)
    made = plan(budgets, Recipe(steps=2, batch_size=10, clip_norm=1.0), accountant="rdp")
    data = torch.zeros(100, 3), torch.arange(100) % 2

    def guarantee(features: object, folder: str) -> str:
        metadata, model = {"features": features}, torch.nn.Linear(3, 2)
        if fit:
            epsilons_fit(model, data, made, budgets=budgets, run_dir=RunFolder(folder, metadata=metadata))
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with make_private(
                model, optimizer, data, made, budgets=budgets, run_dir=RunFolder(folder, metadata=metadata)
            ):
                pass
        return str(written(f"{folder}/run.json")["guarantee"])

    assert "Inputs: pooled pixels." in guarantee("pooled pixels", "first")
    for wrong in (["pooled"], " "):
        with pytest.raises(InputError, match="in words"):
            guarantee(wrong, "second")
