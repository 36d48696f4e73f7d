"""Drafts of `init` for tables with columns of texts: which columns count as texts, and that each draft trains."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from bad_tables import CELLS, table, write
from epsilons.cli.init import MOST_BYTES, text_settings
from epsilons.configs.config_file import read_config
from epsilons.data.guess_values import holds_texts
from epsilons.data.infer import Column, TableGuess
from program import change, epsilons


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def drafted(content: Any, file: str = "people.parquet", *words: str) -> dict[str, Any]:
    """The [data] of a draft."""
    write(content, file)
    epsilons("init", file, "-o", "people.toml").succeeded(*words)
    return tomllib.loads(Path("people.toml").read_text())["data"]


#: What a column that is called "thing" is drafted as.
KINDS = {
    "plain": "text",
    "some missing": "text",
    "numbers among texts": "drop",
    "odd among texts": "text",
    "without spaces": "text",
    "all missing": "drop",
    "one value": "drop",
    "two values": "categorical",
    "ids": "drop",
    "uuids": "drop",
    "codes": "drop",
    "mails": "drop",
    "people": "drop",
}


@pytest.mark.parametrize("cells", KINDS)
def test_long_cells_that_differ_are_texts_and_codes_are_not(cells):
    data = drafted(table(cells, "thing", number=True))
    found = {kind for kind in ("text", "drop", "categorical", "numeric") if "thing" in data.get(kind, ())}
    assert found == {KINDS[cells]}


@pytest.mark.parametrize(
    ("name", "cells", "is_text"),
    [
        ("surname", [f"Miller{'abcdefghij'[i % 10] * i}" for i in range(60)], False),
        ("title", [f"Miller{'abcdefghij'[i % 10] * i}" for i in range(60)], True),
        ("note", [f"A{i}" for i in range(60)], False),
        ("street", [f"{i} Old High Street by the Sea" for i in range(60)], False),
        ("link", [f"see https a b c example page {i}" for i in range(60)], False),
        ("diagnosis", [f"a long name of disease number {'abcde'[i % 5]}" for i in range(600)], False),
    ],
)
def test_the_name_of_a_column_helps_to_see_what_it_holds(name, cells, is_text):
    assert holds_texts(name, cells) is is_text


@pytest.mark.parametrize("number", [True, False])
def test_a_draft_says_what_becomes_of_texts_beside_other_columns(number):
    words = f"Inputs: {int(number)} numeric, 0 categorical, and texts as hashed n-grams: 'note'"
    data = drafted(table("plain", number=number), "people.csv", words)
    assert data["features"] == {"name": "hashed-text", "options": {"buckets": 8192}}
    draft = Path("people.toml").read_text()
    assert ('model.name = "embedding-bag"' in draft) is not number  # ids cannot be beside numbers
    change("epochs = 20", "steps = 1")
    epsilons("train", "people.toml").succeeded(f"records of shape ({8192 + number},)")


def test_the_other_way_in_a_draft_trains_as_its_comment_says():
    drafted(table("plain"))
    lines = Path("people.toml").read_text().splitlines()
    row = next(i for i, line in enumerate(lines) if line.startswith("features"))
    assert 'clip_norm = 1.0, optimizer = "adam", lr = 0.02, no momentum' in lines[row + 1]
    lines[row] = lines[row + 2].removeprefix("# ")
    Path("people.toml").write_text("\n".join(line for line in lines if not line.startswith("momentum")) + "\n")
    for old, new in (('"logistic"', '"embedding-bag"'), ('"sgd"', '"adam"'), ("lr = 10", "lr = 0.02")):
        change(old, new)
    change("epochs = 20", "steps = 1")
    epsilons("train", "people.toml").succeeded("records of shape (256,)")


def test_two_columns_of_texts_are_drafted_together():
    data = drafted(table("plain", second="some missing"), "people.csv")
    assert data["text"] == ["note", "reply"]
    assert "compare = true" in Path("people.toml").read_text()


def test_a_text_to_predict_is_refused_and_not_quoted():
    write(table("plain", "answer"), "people.csv")
    epsilons("init", "people.csv", "--target", "answer").is_refused(
        2, "holds 80 different texts; name another --target"
    )


def guess(*columns: Column) -> TableGuess:
    return TableGuess(100, "label", ("no", "yes"), None, None, columns)


@pytest.mark.parametrize("texts", [1, 2, 5])
@pytest.mark.parametrize("records", [10, 10_000, 100_000, 1_000_000, 10**8])
def test_drafted_features_fit_into_memory_or_are_as_few_as_useful(records, texts):
    found = text_settings(guess(*(Column(f"note {i}", "text") for i in range(texts))), records)
    assert found is not None
    if found.model == "embedding-bag":
        assert (texts, records > MOST_BYTES / 4 / 4096) == (1, True)
        return
    buckets = tomllib.loads(found.inputs)["features"]["options"]["buckets"]
    assert 4 * buckets * records * texts <= MOST_BYTES or buckets == 256


def test_a_table_without_texts_gets_no_settings_of_texts():
    assert text_settings(guess(Column("age", "numeric", (0, 1, False))), 100) is None


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("cells", CELLS)
def test_every_table_with_texts_is_drafted_and_trains_or_has_no_inputs(cells, suffix):
    for name, second, number in (("note", None, False), ("thing", None, True), ("thing", "plain", True)):
        Path("people.toml").unlink(missing_ok=True)
        data = drafted(table(cells, name, second=second, number=number), f"people.{suffix}")
        assert read_config(Path("people.toml")).data.text == data.get("text", [])
        change("epochs = 20", "steps = 1")
        change('"pld"', '"rdp"')
        outcome = epsilons("train", "people.toml", "-q", "-o", f"run-{name}-{second}")
        if "text" in data or data["numeric"] or data["categorical"]:
            outcome.succeeded()
        else:
            outcome.is_refused(2, "is an input")
