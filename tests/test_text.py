"""Columns of texts: ids of tokens by a public hash, texts for fixed features, and configs with either."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

pytest.importorskip("torch")

import torch

from epsilons.configs.config_file import read_config
from epsilons.configs.prepare import Prepared, prepare
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
