"""What a release folder holds, what it never holds, when it is refused, and that a changed one is not used."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import socket
from pathlib import Path

import pytest

from options import fit_flat

pytest.importorskip("torch")

import epsilons
import some_models
from encoders import TRAINED_ON, tiny_encoder
from epsilons.errors import EpsilonsError, RunError
from epsilons.ledger import model_file
from epsilons.reporting import releasing
from epsilons.reporting.releasing import in_markdown
from program import CONFIG, change, files, people
from program import epsilons as command

FILES = {"README.md", "SHA256SUMS", "guarantee.txt", "model.json", "model.safetensors"}
RUN = Path("runs/people-1")


def train(config: str, table: str) -> None:
    Path("people.csv").write_text(table)
    Path("people.toml").write_text(config)
    command("train", "people.toml", "-q").succeeded()


DECLARED = CONFIG.replace('drop = ["id"]', 'drop = ["id"]\nread_off = []')


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A folder with a finished run without values that were read off the data, which no test changes."""
    folder: Path = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train(DECLARED, people())
    return folder


@pytest.fixture
def copy(finished, tmp_path, monkeypatch) -> Path:
    """A copy of that folder, which is the current folder."""
    shutil.copytree(finished, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def texts(folder: Path) -> str:
    """All bytes of a folder as one text."""
    return "\n".join((folder / name).read_bytes().decode("latin1") for name in sorted(files(folder)))


# -- when a release is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("read_off", "words"),
    [
        ('["age"]', "the bounds of 'age' were read off the data"),
        ('["town"]', "the categories of 'town' were read off the data"),
        ('["label"]', "the classes of 'label' were read off the data"),
        (None, "it is not stated whether the bounds of 'age', 'income', and the categories of 'town'"),
    ],
)
def test_a_value_that_was_read_off_the_data_stops_a_release(read_off, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(CONFIG if read_off is None else DECLARED.replace("read_off = []", f"read_off = {read_off}"), people())
    command("release", RUN).is_refused(2, words, "--undeclared")
    assert not (RUN / "release").exists()
    done = command("release", RUN, "--undeclared")
    done.succeeded("NOT COVERED by the guarantee, for tests only", words)
    assert "given away" not in done.out
    for name in ("README.md", "guarantee.txt"):
        assert "NOT COVERED" in (RUN / "release" / name).read_text()
        assert words.split(" were")[0].split(",")[0] in (RUN / "release" / name).read_text().replace("\\", "")
    assert words in json.loads((RUN / "release/model.json").read_text())["not_covered"][0]
    done = command("predict", RUN / "release", "people.csv", "-o", "scored.csv")
    assert done.code == 0
    assert words in " ".join(done.err.split())


def test_a_draft_of_init_is_refused_until_its_values_are_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text(people(200))
    command("init", "people.csv", "--target", "label", "--budget", "epsilon").succeeded()
    change("epochs = 20", "epochs = 0.2")
    done = command("train", "people.toml")
    done.succeeded("NOT COVERED by the guarantee, because they were read off the data: the bounds of 'age', 'income'")
    command("release", RUN).is_refused(2, "'age'", "'town'", "'label'")
    change('read_off = ["age", "income", "town", "job", "label"]', "read_off = []")
    command("train", "people.toml", "-q").succeeded()
    command("release", "runs/people-2").succeeded("may be given away")


def test_a_misspelt_column_in_read_off_is_refused(tmp_path, monkeypatch):
    """It would leave a bound that was read off the data as declared."""
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text(people())
    Path("people.toml").write_text(DECLARED.replace("read_off = []", 'read_off = ["agee"]'))
    command("train", "people.toml").is_refused(2, "data.read_off names 'agee'")


def test_a_seeded_run_is_not_released(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(DECLARED.replace("[training]", "[training]\nseeds = [1]"), people())
    command("release", RUN).is_refused(2, "seeded")


def test_a_run_that_is_not_finished_is_not_released(copy):
    (RUN / "secret").mkdir()
    (RUN / "secret/key").write_bytes(bytes(32))
    command("release", RUN).is_refused(2, "not finished")
    shutil.rmtree(RUN / "secret")
    for name in ("model.json", "model.safetensors"):
        shutil.move(RUN / name, name)
        command("release", RUN).is_refused(2, name)
        shutil.move(name, RUN / name)
    command("release", RUN, "-o", "people.csv").is_refused(2, "exists already")
    command("release", RUN, "-o", "people.csv/x").is_refused(2, "cannot be written")
    assert epsilons.release(RUN) == RUN / "release"
    with pytest.raises(RunError, match="exists already"):
        epsilons.release(RUN)
    with pytest.raises(RunError, match=r"holds no plan.*Predictor.load"):
        epsilons.Run.load(RUN / "release")


def test_an_altered_ledger_is_not_released(copy):
    change('"schema"', '"Schema"', str(RUN / "ledger.jsonl"))
    assert command("release", RUN).code != 0
    assert not (RUN / "release").exists()


def test_a_run_of_fit_states_its_preprocessing(tmp_path):
    import torch

    budgets = epsilons.Budgets([1.0, 4.0] * 30, delta=1e-3)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=2, batch_size=20, clip_norm=1.0), accountant="rdp")
    data = torch.randn(60, 4), torch.arange(60) % 3

    def fitted(name: str, **options: object) -> epsilons.Run:
        run_dir = tmp_path / name
        return fit_flat(torch.nn.Linear(4, 3), data, plan, budgets=budgets, run_dir=run_dir, **options)  # type: ignore[arg-type]

    with pytest.raises(RunError, match=r"not stated whether the preprocessing of '\(all inputs\)'"):
        epsilons.release(str(fitted("unstated").path))
    epsilons.release(str(fitted("stated", metadata={"provenance": []}).path))
    assert "class of its authors" in (tmp_path / "stated/release/README.md").read_text()
    with pytest.raises(EpsilonsError, match="provenance"):
        fitted("wrong", metadata={"provenance": ["age"]})
    assert not (tmp_path / "wrong").exists()


# -- what a release holds ----------------------------------------------------------------------------------------------


def test_a_release_holds_these_files_with_their_checksums(copy):
    folder = epsilons.release(RUN, "model")
    assert files(folder) == FILES
    sums = dict(reversed(line.split("  ")) for line in (folder / "SHA256SUMS").read_text().splitlines())  # type: ignore[misc]
    assert sums == {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in FILES - {"SHA256SUMS"}}
    assert {path.name for path in copy.iterdir()} == {"people.csv", "people.toml", "runs", "model"}


def test_a_release_holds_no_path_no_key_no_line_of_the_ledger_and_no_score(copy):
    epsilons.release(RUN)
    held = texts(RUN / "release")
    settings = json.loads((RUN / "run.json").read_text())
    ledger = (RUN / "ledger.jsonl").read_text()
    secrets = {str(copy), settings["metadata"]["folder"], socket.gethostname(), "people.csv", "people.toml"}
    secrets |= set(re.findall(r"[0-9a-f]{32,}", ledger + (RUN / "plan.json").read_text() + json.dumps(settings)))
    assert len(secrets) > 8
    last = json.loads((RUN / "metrics.jsonl").read_text().splitlines()[-1])
    secrets |= {f"{100 * last['accuracy']:.1f} %", f"{last['loss']:.4g}"}
    for secret in secrets - {""}:
        assert secret not in held, secret
    assert "No score is shown" in held


def test_scores_on_public_data_are_in_the_card(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(DECLARED.replace("test_share = 0.25", "test_share = 0.25\ntest_public = true"), people(120))
    epsilons.release(RUN)
    accuracy = json.loads((RUN / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"]
    card = (RUN / "release/README.md").read_text()
    assert f"accuracy {100 * accuracy:.1f} %" in card
    assert f"value: {accuracy:.6f}" in card


def test_budgets_of_few_are_merged_in_a_release(tmp_path, monkeypatch):
    """Three records chose 0.37: neither the number, nor theirs, nor what follows from it is shown."""
    monkeypatch.chdir(tmp_path)
    header, *rows = people(200).splitlines()
    rows = [row.rpartition(",")[0] + (",0.37" if i < 8 else ",4") for i, row in enumerate(rows)]
    train(DECLARED.replace("test_share = 0.25\n", ""), "\n".join([header, *rows]) + "\n")
    epsilons.release(RUN)
    held = "".join((RUN / "release" / name).read_text() for name in ("README.md", "guarantee.txt", "model.json"))
    plan = json.loads((RUN / "plan.json").read_text())
    noise = plan["phases"][0]["noise_std"]
    for number in ("0.37", "192", f"{noise:.4g}", f"{noise:.6g}"):
        assert number not in held, number
    assert "does not show how many records hold which budget" in held
    assert "|  | 4 | 0.001 |" in held  # 192 of 200 are nearly all


def test_the_number_of_rows_of_persons_is_in_no_release(tmp_path, monkeypatch):
    """140 rows of 70 persons."""
    monkeypatch.chdir(tmp_path)
    header, *rows = people(70).splitlines()
    doubled = [row for row in rows for _ in range(2)]
    config = DECLARED.replace('drop = ["id"]', 'person = "id"').replace("test_share = 0.25\n", "")
    train(config, "\n".join([header, *doubled]) + "\n")
    epsilons.release(RUN)
    held = texts(RUN / "release").replace((RUN / "release/SHA256SUMS").read_text(), "")
    held = held.replace((RUN / "release/model.safetensors").read_bytes().decode("latin1"), "")
    assert "limit for one person" in held or "persons" in held
    assert "140" not in held
    assert "id" not in json.loads((RUN / "release/model.json").read_text())["inputs"]["features"]["drop"]


def test_the_card_has_a_header_that_the_hub_reads(copy):
    yaml = pytest.importorskip("yaml")
    epsilons.release(RUN)
    _, header, body = (RUN / "release/README.md").read_text().split("---\n", 2)
    values = yaml.safe_load(header)
    assert values["library_name"] == "epsilons"
    assert values["pipeline_tag"] == "tabular-classification"
    assert "differential-privacy" in values["tags"]
    assert "| age | number | 0 … 100; others are clipped. Empty: the middle |" in body
    assert "\n\n\n" not in body


@pytest.mark.parametrize(
    ("inputs", "task"),
    [
        ({"free_text": ["note"]}, "text-classification"),
        ({"free_text": ["note"], "numeric": {"age": [0, 9, False]}}, "tabular-classification"),
        (
            {"free_text": ["note"], "dates": {"day": {"first": "2020-01-01", "last": "2024-12-31"}}},
            "tabular-classification",
        ),
        ({"categorical": {"town": ["a"]}}, "tabular-classification"),
    ],
)
def test_the_task_of_a_table_with_texts_beside_other_columns_is_tabular(inputs, task):
    table = {"kind": "table", "features": {"numeric": {}, "categorical": {}} | inputs}
    values = {"model": None, "inputs": table, "outputs": {"kind": "classes", "classes": ["no", "yes"]}}
    assert releasing.task(model_file.ModelFile.model_validate_json(json.dumps(values))) == task


def test_the_card_names_columns_of_dates(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = people().strip().split("\n")
    table = [f"{lines[0]},seen", *(f"{line},2024-0{1 + n % 9}-03" for n, line in enumerate(lines[1:]))]
    train(
        DECLARED.replace("[budgets]", '[data.dates]\nseen = ["2024-01-01", "2024-12-31"]\n[budgets]'), "\n".join(table)
    )
    epsilons.release(RUN)
    row = "| seen | date | 2024-01-01 … 2024-12-31; others are clipped. Empty: the middle |"
    assert row in (RUN / "release/README.md").read_text()


def test_names_of_the_config_cannot_change_the_card(tmp_path, monkeypatch):
    """A class or column may hold marks of Markdown, HTML or YAML."""
    monkeypatch.chdir(tmp_path)
    evil = "---\\n# <script>|`"
    table = people().replace(",yes,", f",{evil.replace(chr(92) + 'n', ' ')},")
    train(DECLARED.replace('"yes"', json.dumps(evil.replace("\\n", " "))), table)
    epsilons.release(RUN)
    card = (RUN / "release/README.md").read_text()
    assert "<script" not in card
    assert card.count("\n---\n") == 1
    assert in_markdown("a\nb") == "a\\\\nb"


# -- a changed release is not used -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def released(finished, tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("released")
    return epsilons.release(finished / RUN, folder / "model")


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_release_with_one_changed_byte_is_refused(name, released, tmp_path):
    coins = random.Random(name)
    whole = (released / name).read_bytes()
    shutil.copytree(released, tmp_path / "model")
    for place in [0, len(whole) - 1, *(coins.randrange(len(whole)) for _ in range(40))]:
        changed = bytearray(whole)
        changed[place] ^= 1 << coins.randrange(8)
        (tmp_path / "model" / name).write_bytes(changed)
        with pytest.raises(RunError, match="Copy the whole folder again") as caught:
            epsilons.Predictor.load(tmp_path / "model")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_release_without_a_file_or_with_half_of_it_is_refused(name, released, finished, tmp_path):
    shutil.copytree(released, tmp_path / "model")
    for content in (b"", (released / name).read_bytes()[:-20], None):
        (tmp_path / "model" / name).unlink()
        if content is not None:
            (tmp_path / "model" / name).write_bytes(content)
        arguments = (tmp_path / "model", finished / "people.csv", "-o", tmp_path / "scored.csv")
        if name == "SHA256SUMS" and content is None:
            continue  # then the folder is no release, but holds what a run does
        command("predict", *arguments).is_refused(2, name)


def test_random_files_with_fitting_checksums_are_refused(released, finished, tmp_path):
    """A forger can write checksums; the files are still read without running code, and refused with one message."""
    coins = random.Random(0)
    outcomes = set()
    for number in range(20):
        folder = tmp_path / f"{number}"
        shutil.copytree(released, folder)
        name = coins.choice(["model.json", "model.safetensors"])
        content = bytearray((folder / name).read_bytes())
        for _ in range(coins.choice([1, 3, 30])):
            content[coins.randrange(len(content))] = coins.randrange(256)
        (folder / name).write_bytes(content)
        model_file.write_sums(folder)
        done = command("predict", folder, finished / "people.csv", "-o", folder / "scored.csv")
        outcomes.add(done.code)
        if done.code:
            done.is_refused(2)
    assert outcomes == {0, 2}


@pytest.mark.slow
def test_a_local_encoder_is_copied_without_its_path(tmp_path, tmp_path_factory, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    encoder = Path(tiny_encoder(tmp_path_factory))
    (encoder / "pytorch_model.bin").write_bytes(b"a pickle, which no release holds")
    shutil.copytree(encoder, "tiny")
    options = f'{{ model = "tiny", trained_on = "{TRAINED_ON}", tokens = 16 }}'
    inputs = f'text = ["note"]\nfeatures = {{ name = "encoder", options = {options} }}'
    text = some_models.config_of_table(inputs, 'name = "logistic"', "age income seen town band job")
    Path("train.csv").write_text(some_models.table(60, 0))
    Path("test.csv").write_text(some_models.table(30, 1))
    Path("people.toml").write_text(text)
    command("train", "people.toml", "-q").succeeded()
    epsilons.release(RUN, "model")
    assert "encoder/model.safetensors" in files(Path("model"))
    assert not any(name.endswith(".bin") for name in files(Path("model")))
    assert str(tmp_path) not in texts(Path("model")).replace(str(encoder), "")
    expected = epsilons.Run.load(RUN).predict("test.csv").probabilities
    shutil.rmtree("tiny")
    found = epsilons.Predictor.load("model").predict("test.csv").probabilities
    assert (found == expected).all()
    with pytest.raises(EpsilonsError, match="tiny"):
        epsilons.Run.load(RUN).predict("test.csv")
