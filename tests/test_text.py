"""Columns of texts: ids of tokens by a public hash, texts for fixed features, and configs with either."""

from __future__ import annotations

import hashlib
import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import csv, parquet

pytest.importorskip("torch")

import torch

from epsilons.cli.init import MOST_BYTES, text_settings
from epsilons.configs.config_file import read_config
from epsilons.configs.prepare import Prepared, prepare
from epsilons.data.guess_values import holds_texts
from epsilons.data.infer import Column, TableGuess
from epsilons.data.texts import Tokens, token_ids
from epsilons.errors import InputError
from epsilons.training.features import FEATURES, features_of_run, hashed_text
from program import change, epsilons

WORDS, BYTES = Tokens("words", length=6, buckets=50), Tokens("bytes", length=6)


def hashed(word: str, buckets: int) -> int:
    """The documented id of a word."""
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "little") % (buckets - 1)


# -- ids -------------------------------------------------------------------------------------------------------------


def test_ids_of_words_are_the_documented_hash_with_the_padding_in_front():
    rows = token_ids(["It's GOOD, good!", "", "a b c d e f g"], WORDS)
    assert rows.tolist() == [
        [0, 0, *(hashed(word, 50) for word in ("it's", "good", "good", "!"))],
        [0] * 6,
        [hashed(word, 50) for word in "abcdef"],
    ]


def test_ids_of_bytes_are_the_bytes_of_utf_8_and_one():
    assert token_ids(["é\0", "abcdefgh"], BYTES).tolist() == [[0, 0, 0, 196, 170, 1], [*range(98, 104)]]


@given(st.lists(st.text(max_size=20), min_size=1, max_size=8), st.sampled_from([WORDS, BYTES]))
@settings(max_examples=30, deadline=None)
def test_any_text_has_ids_in_range_that_depend_on_no_other_text(texts, tokens):
    rows = token_ids(texts, tokens)
    assert rows.shape == (len(texts), tokens.length)
    assert rows.min() >= 0
    assert rows.max() < tokens.ids
    for row, text in zip(rows, texts, strict=True):
        assert row.tolist() == token_ids([text], tokens)[0].tolist()
        assert (np.diff((row > 0).astype(int)) >= 0).all()  # no padding after the first token


# -- tables ----------------------------------------------------------------------------------------------------------

CONFIG = """
[data]
train = "notes.csv"
test_share = 0.25
classes = ["bad", "good"]
text = ["note"]
drop = ["age", "other"]
tokens = { length = 6, buckets = 50 }
[budgets]
shares = { "1" = 0.5, "4" = 0.5 }
delta = 1e-3
[model]
name = "embedding-bag"
[training]
steps = 2
batch_size = 10
seeds = [1]
[privacy]
accountant = "rdp"
"""
TOKENS = "tokens = { length = 6, buckets = 50 }"
HASHED = 'features = { name = "hashed-text", options = { buckets = 32 } }'
NOTES = ["a good film", "not my film", "", '"yes, good"', "007", "true", "NA", '"two\nlines"', "😀 ok", "1.50"]


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """40 notes beside a number and a second text, and a config."""
    monkeypatch.chdir(tmp_path)
    rows = [f"{NOTES[i % 10]},{i},other {i % 3},{('bad', 'good')[i % 2]}" for i in range(40)]
    Path("notes.csv").write_text("\n".join(["note,age,other,label", *rows]) + "\n")
    Path("people.toml").write_text(CONFIG)


def prepared() -> Prepared:
    return prepare(read_config(Path("people.toml")), Path())


def all_inputs() -> np.ndarray[Any, Any]:
    change("test_share = 0.25\n", "")
    return prepared().train.inputs


def the_notes() -> list[str]:
    return [note.strip('"') for note in NOTES] * 4


def test_a_column_of_texts_becomes_ids_as_it_is_written(notes):
    found = all_inputs()
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, token_ids(the_notes(), WORDS))


def test_a_column_of_numbers_that_is_named_as_texts_is_read_as_written(notes):
    cells = ["007", "1.50", "1e5", "0x10"] * 10
    Path("notes.csv").write_text(
        "note,label\n" + "".join(f"{cell},{('bad', 'good')[i % 2]}\n" for i, cell in enumerate(cells))
    )
    change(TOKENS, 'tokens = { kind = "bytes", length = 6 }')
    np.testing.assert_array_equal(all_inputs(), token_ids(cells, BYTES))
    Path("notes.csv").write_text("note,label\n" + "007,bad\n1.50,good\n" * 20)
    np.testing.assert_array_equal(prepared().train.inputs, token_ids(["007", "1.50"] * 20, BYTES))


def test_fixed_features_take_the_texts_of_a_column(notes):
    change(TOKENS, HASHED)
    change('"embedding-bag"', '"logistic"')
    np.testing.assert_array_equal(all_inputs(), hashed_text(the_notes(), buckets=32).numpy())


def test_held_out_texts_are_those_of_the_held_out_records(notes):
    change(TOKENS, HASHED)
    change('"embedding-bag"', '"logistic"')
    ready = prepared()
    assert ready.test is not None
    whole = hashed_text(the_notes(), buckets=32).numpy()
    held_out = np.sort(np.random.default_rng(0).permutation(40)[:10])
    np.testing.assert_array_equal(ready.test.inputs, whole[held_out])
    np.testing.assert_array_equal(ready.train.inputs, np.delete(whole, held_out, 0))


def test_other_columns_are_inputs_beside_the_features_of_texts(notes):
    change(TOKENS, HASHED)
    change('"embedding-bag"', '"logistic"')
    change('drop = ["age", "other"]', 'drop = ["other"]\nnumeric = { age = [0, 39] }')
    ready, found = prepared(), all_inputs()
    assert ready.features is not None
    assert ready.features.origin.endswith("; beside them other columns of the record")
    np.testing.assert_array_equal(found[:, :32], hashed_text(the_notes(), buckets=32).numpy())
    np.testing.assert_allclose(found[:, 32], np.linspace(-1, 1, 40), atol=1e-6)


@pytest.mark.parametrize("compare", [True, False])
def test_two_columns_of_texts_are_joined_or_compared(compare, notes):
    change(TOKENS, HASHED.replace("32 }", "32, compare = true }") if compare else HASHED)
    change('"embedding-bag"', '"logistic"')
    change('text = ["note"]\ndrop = ["age", "other"]', 'text = ["note", "other"]\ndrop = ["age"]')
    a, b = hashed_text(the_notes(), buckets=32), hashed_text([f"other {i % 3}" for i in range(40)], buckets=32)
    expected = torch.cat([a, b, (a - b).abs(), a * b] if compare else [a, b], 1)
    epsilons("train", "people.toml", "-q").succeeded()
    np.testing.assert_array_equal(features_of_run("runs/people-1")([("a good film", "other 0")])[0], expected[0])
    np.testing.assert_array_equal(all_inputs(), expected)


def test_parquet_and_csv_give_the_same_ids_and_a_missing_text_is_empty(notes):
    found = all_inputs()
    cells = [text or None for text in the_notes()]
    columns = {"note": cells, "label": ["bad", "good"] * 20}
    parquet.write_table(pyarrow.table(columns), "notes.parquet")
    change("notes.csv", "notes.parquet")
    np.testing.assert_array_equal(prepared().train.inputs, found)
    columns["note"] = pyarrow.array(cells).dictionary_encode()
    parquet.write_table(pyarrow.table(columns), "notes.parquet")
    np.testing.assert_array_equal(prepared().train.inputs, found)


@pytest.mark.parametrize("model", ["embedding-bag", "lstm"])
def test_a_config_trains_a_model_of_texts(model, notes):
    change('"embedding-bag"', f'"{model}"')
    change(TOKENS, 'tokens = { kind = "bytes", length = 6 }')
    epsilons("train", "people.toml").succeeded("records of shape (6,)")
    epsilons("report", "runs/people-1").succeeded()


@pytest.mark.slow
def test_an_attack_trains_shadows_on_ids(notes):
    epsilons("train", "people.toml", "-q").succeeded()
    epsilons("attack", "runs/people-1", "--shadows", "8", "-q").succeeded()


def test_the_model_has_an_embedding_for_every_id_of_the_config(notes):
    config = read_config(Path("people.toml"))
    assert config.model_options == {"buckets": 50}
    change(TOKENS, 'tokens = { kind = "bytes" }')
    assert read_config(Path("people.toml")).model_options == {"buckets": 257}
    change('"embedding-bag"', '"torch.nn:Linear"')
    assert read_config(Path("people.toml")).model_options == {}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (TOKENS, "", "needs either features, such as hashed-text, or tokens"),
        (TOKENS, f"{TOKENS}\n{HASHED}", "needs either features"),
        ('text = ["note"]', "", r"data.tokens needs one column in data.text, got 0"),
        ('text = ["note"]\ndrop = ["age", "other"]', 'text = ["note", "other"]\ndrop = ["age"]', "got 2"),
        ('drop = ["age", "other"]', 'drop = ["other"]\nnumeric = { age = [0, 9] }', "no other columns can be beside"),
        ('text = ["note"]', 'text = ["note", "age"]', "in more than one of numeric, dates, categorical, drop and text"),
        ('text = ["note"]', 'text = ["Note"]', "no column 'Note', which data.text names; did you mean 'note'"),
        ('text = ["note"]', 'target = "note"\ntext = ["note"]', "is data.target, and cannot be in data.text"),
        ("[budgets]", '[budgets]\ncolumn = "note"', "is the target or a budget"),
        ('"embedding-bag"', '"mlp"', "which mlp takes for quantities; use embedding-bag or lstm"),
        ('text = ["note"]\ndrop = ["age", "other"]\n' + TOKENS, 'drop = ["note", "other"]', "give data.text and"),
        (TOKENS, HASHED, "embedding-bag takes ids of tokens"),
        (TOKENS, "tokens = { length = 0 }", "data.tokens.length"),
        (TOKENS, 'tokens = { kind = "bytes", buckets = 9 }', "has 257 ids"),
        (TOKENS, 'tokens = { kind = "letters" }', "words"),
        ('name = "embedding-bag"', 'name = "embedding-bag"\noptions = { buckets = 9 }', "leave them out"),
        (f"{TOKENS}", 'features = { name = "scattering" }', "takes ids of tokens"),
    ],
)
def test_a_config_of_texts_that_does_not_fit_is_refused_before_training(old, new, words, notes):
    change(old, new)
    epsilons("train", "people.toml").is_refused(2, words)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ([1, 2, 3, 4] * 10, "holds int64, and data.text needs texts"),
        ([b"\xff", b"b"] * 20, "is not UTF-8 text"),
        ([["a", "b"]] * 40, "holds list"),
    ],
)
def test_cells_that_are_no_texts_are_refused(cells, words, notes):
    parquet.write_table(pyarrow.table({"note": cells, "label": ["bad", "good"] * 20}), "notes.parquet")
    change("notes.csv", "notes.parquet")
    epsilons("train", "people.toml").is_refused(2, words)


def test_features_of_images_refuse_texts(notes):
    change(TOKENS, 'features = { name = "scattering" }')
    change('"embedding-bag"', '"logistic"')
    epsilons("train", "people.toml").is_refused(2, "are of images, and data.text names texts")


# -- features of several texts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "options", "words"),
    [
        ([("a", "b"), ("c",)], {}, "the same number of texts"),
        ([()], {}, "the same number of texts"),
        ([("a", "b", "c")], {"compare": True}, "needs two texts"),
        (["a"], {"compare": True}, "needs two texts"),
        ([("a", 7)], {}, "take a list of texts"),
        ([("a", "b")], {"compare": 1}, "must be true or false"),
    ],
)
def test_records_of_several_texts_that_do_not_fit_are_refused(records, options, words):
    with pytest.raises(InputError, match=words):
        FEATURES["hashed-text"](records, buckets=8, **options)


def test_features_of_images_have_no_option_to_compare():
    with pytest.raises(InputError, match="no option 'compare'"):
        FEATURES["scattering"](torch.rand(1, 1, 12, 12), compare=True)


# -- drafts for texts --------------------------------------------------------------------------------------------------


SENTENCE = "the patient has a mild cough and no fever since two weeks but pain in left knee naïve Straße 東京 привет"
SPOKEN = SENTENCE.split()
ODD = [
    *("", " ", "\t", "NA", "null", "nan", "true", "007", "1e5", "-3.5", "2024-03-31", "N/A", "None", "inf"),
    *(
        "😀😀 ok 👩‍👩‍👧",
        "a\0b",
        "\0",
        "\u200b\u202e",
        "\ufeff",
        "e\u0301 é",
        "ﬁ",
        "a,b;c\td",
        'say "no"',
        "two\nlines\r\nthree",
    ),
    *(
        "x" * 40_000,
        "long text " * 5_000,
        "!?!?",
        "''",
        "{{ jinja }} {% if %}",
        "[bold]red[/bold]",
        "$HOME `ls`",
        "\x1b[31m",
    ),
]


def sentence(coins: random.Random) -> str:
    """A text of 5 to 20 words."""
    return " ".join(coins.choices(SPOKEN, k=coins.randint(5, 20)))


#: A column of texts of one kind: (record, coins) -> cell.
CELLS: dict[str, Callable[[int, random.Random], Any]] = {
    "plain": lambda i, coins: sentence(coins),
    "some missing": lambda i, coins: None if i % 3 == 0 else sentence(coins),
    "all missing": lambda i, coins: None,
    "all empty": lambda i, coins: "",
    "numbers among texts": lambda i, coins: str(i) if i % 2 else sentence(coins),
    "numbers only": lambda i, coins: str(i),
    "one value": lambda i, coins: "the same text in every row of it",
    "two values": lambda i, coins: ("a text that says yes, really", "a text that says no, never")[i % 2],
    "odd": lambda i, coins: ODD[i % len(ODD)],
    "odd among texts": lambda i, coins: coins.choice(ODD) if i % 4 == 0 else sentence(coins),
    "ids": lambda i, coins: f"{coins.getrandbits(128):032x}",
    "uuids": lambda i, coins: "-".join(f"{coins.getrandbits(4 * n):0{n}x}" for n in (8, 4, 4, 4, 12)),
    "codes": lambda i, coins: f"{coins.choice('ABC')}{i:04d}-{coins.randint(0, 99)}",
    "mails": lambda i, coins: f"{coins.choice(SPOKEN)}{i}@example.com",
    "people": lambda i, coins: f"{coins.choice(SPOKEN)}{i} {coins.choice(SPOKEN)}",
    "without spaces": lambda i, coins: "".join(coins.choices("東京都市人口水火木金土日月山川", k=20)),
    "huge": lambda i, coins: "word " * 400_000 if i == 0 else sentence(coins),
}


def table(cells: str, name: str = "note", records: int = 80, second: str | None = None, number: bool = False) -> Any:
    """A pyarrow.Table with this column of texts, a label and a budget; perhaps with a second text and a number."""
    coins = random.Random(0)
    columns: dict[str, Any] = {name: pyarrow.array([CELLS[cells](i, coins) for i in range(records)], pyarrow.string())}
    if second is not None:
        columns["reply"] = pyarrow.array([CELLS[second](i, coins) for i in range(records)], pyarrow.string())
    if number:
        columns["age"] = [18 + coins.random() * 70 for _ in range(records)]
    columns |= {"label": [coins.choice(["no", "yes"]) for _ in range(records)], "epsilon": [1.0, 4.0] * (records // 2)}
    return pyarrow.table(columns)


def write(content: Any, file: str) -> None:
    """As .csv or .parquet."""
    if Path(file).suffix == ".csv":
        csv.write_csv(content, file)
    else:
        parquet.write_table(content, file)


# -- the drafts --------------------------------------------------------------------------------------------------------


@pytest.fixture
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


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("cells", KINDS)
def test_long_cells_that_differ_are_texts_and_codes_are_not(cells):
    data = drafted(table(cells, "thing", number=True))
    found = {kind for kind in ("text", "drop", "categorical", "numeric") if "thing" in data.get(kind, ())}
    assert found == {KINDS[cells]}


@pytest.mark.usefixtures("_folder")
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


@pytest.mark.usefixtures("_folder")
@pytest.mark.parametrize("number", [True, False])
def test_a_draft_says_what_becomes_of_texts_beside_other_columns(number):
    words = f"Inputs: {int(number)} numeric, 0 categorical, and texts as hashed n-grams: 'note'"
    data = drafted(table("plain", number=number), "people.csv", words)
    assert data["features"] == {"name": "hashed-text", "options": {"buckets": 8192}}
    draft = Path("people.toml").read_text()
    assert ('model.name = "embedding-bag"' in draft) is not number  # ids cannot be beside numbers
    change("epochs = 20", "steps = 1")
    epsilons("train", "people.toml").succeeded(f"records of shape ({8192 + number},)")


@pytest.mark.usefixtures("_folder")
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


@pytest.mark.usefixtures("_folder")
def test_two_columns_of_texts_are_drafted_together():
    data = drafted(table("plain", second="some missing"), "people.csv")
    assert data["text"] == ["note", "reply"]
    assert "compare = true" in Path("people.toml").read_text()


@pytest.mark.usefixtures("_folder")
def test_a_text_to_predict_is_refused_and_not_quoted():
    write(table("plain", "answer"), "people.csv")
    epsilons("init", "people.csv", "--target", "answer").is_refused(
        2, "holds 80 different texts; name another --target"
    )


def guess(*columns: Column) -> TableGuess:
    return TableGuess(100, "label", ("no", "yes"), None, None, columns)


@pytest.mark.usefixtures("_folder")
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


@pytest.mark.usefixtures("_folder")
def test_a_table_without_texts_gets_no_settings_of_texts():
    assert text_settings(guess(Column("age", "numeric", (0, 1, False))), 100) is None


@pytest.mark.usefixtures("_folder")
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
