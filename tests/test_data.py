"""Readers: a row becomes inputs by stated rules alone, and rows keep their order."""

from __future__ import annotations

import io
import os
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from epsilons import data
from epsilons.budgets.budgets import Budgets
from epsilons.data import sources, windows
from epsilons.data.images import image_table, is_image_table
from epsilons.data.sources import tensors
from epsilons.data.tables import Columns, Features, table
from epsilons.errors import BudgetError, DataError
from epsilons.tabular import read_table
from epsilons.tabular.dates import DateRule, days
from epsilons.training.datasets import shares_records

FEATURES = Features(
    numeric={"age": (0.0, 100.0, False), "gain": (0.0, 1000.0, True)},
    categorical={"town": ("north", "south"), "job": 8},
    drop=("id",),
)
ROWS = """id,age,gain,town,job,label,epsilon
1,50,0,north,smith,yes,1
2,100,1000,south,baker,no,2
3,150,-5,east,smith,yes,1
4,,10,,,no,8
"""


def read(text: str, folder: Path, features: Features = FEATURES, classes=("no", "yes")) -> data.Source:
    (folder / "people.csv").write_text(text)
    return table(folder / "people.csv", "training data", classes, Columns("label", features, {"epsilon": "[budgets]"}))


def test_a_table_becomes_inputs_by_the_stated_rules(tmp_path):
    source = read(ROWS, tmp_path)
    inputs, targets = source.arrays
    assert inputs.shape == (4, 2 + 2 + 8)
    np.testing.assert_allclose(inputs[:, 0], [0, 1, 1, 0])  # middle, top, cut off at the top, empty
    np.testing.assert_allclose(inputs[:, 1], [-1, 1, -1, 2 * np.arcsinh(10) / np.arcsinh(1000) - 1], rtol=1e-6)
    np.testing.assert_array_equal(inputs[:, 2:4], [[1, 0], [0, 1], [0, 0], [0, 0]])  # unlisted and empty: nothing
    np.testing.assert_array_equal(inputs[:, 4:].sum(axis=1), [1, 1, 1, 1])
    np.testing.assert_array_equal(inputs[0, 4:], inputs[2, 4:])  # one value, one bucket
    np.testing.assert_array_equal(targets, [1, 0, 1, 0])
    assert source.classes == ("no", "yes")


def test_no_record_changes_the_inputs_of_another(tmp_path):
    before = read(ROWS, tmp_path).arrays.inputs
    lines = ROWS.splitlines()
    lines[3] = "3,-7000,123456,elsewhere,acrobat,no,0.1"
    after = read("\n".join(lines) + "\n", tmp_path).arrays.inputs
    np.testing.assert_array_equal(np.delete(before, 2, axis=0), np.delete(after, 2, axis=0))
    assert not np.array_equal(before[2], after[2])


def test_csv_and_parquet_hold_the_same_records(tmp_path):
    from_csv = read(ROWS, tmp_path)
    parquet.write_table(from_csv.table, tmp_path / "people.parquet")
    columns = Columns("label", FEATURES, {"epsilon": "[budgets]"})
    again = table(tmp_path / "people.parquet", "training data", ("no", "yes"), columns)
    np.testing.assert_array_equal(from_csv.arrays.inputs, again.arrays.inputs)


def test_a_number_to_predict_keeps_its_size_or_is_scaled_by_stated_bounds(tmp_path):
    text = ROWS.replace("label", "height").replace("yes", "1.5").replace("no,", "2.5,").replace("norththing", "")
    (tmp_path / "people.csv").write_text(text)
    arguments = (tmp_path / "people.csv", "training data", None)
    np.testing.assert_allclose(
        table(*arguments, Columns("height", FEATURES, {"epsilon": "[budgets]"})).arrays.targets[:, 0],
        [1.5, 2.5, 1.5, 2.5],
    )
    scaled = Features({**FEATURES.numeric, "height": (0.0, 5.0, False)}, FEATURES.categorical, FEATURES.drop)
    source = table(*arguments, Columns("height", scaled, {"epsilon": "[budgets]"}))
    np.testing.assert_allclose(source.arrays.targets[:, 0], [-0.4, 0, -0.4, 0], atol=1e-7)
    assert source.arrays.inputs.shape[1] == 12  # the target is no input
    assert source.classes is None


@pytest.mark.parametrize(
    ("old", "new", "features", "words"),
    [
        ("id,age", "id,years", FEATURES, "'years'"),
        ("1,50,", "1,old,", FEATURES, "not numbers .first at row 0"),
        (ROWS.partition("\n")[2], "", FEATURES, "no rows"),
        ("", "", Features(drop=("id", "age", "gain", "town", "job")), "No column"),
        ("", "", Features(FEATURES.numeric, {**FEATURES.categorical, "epsilon": 4}, ("id",)), "cannot be an input"),
        ("", "", Features(FEATURES.numeric, {**FEATURES.categorical, "label": 4}, ("id",)), "cannot be an input"),
        ("", "", Features(FEATURES.numeric, {"town": ("north",)}, ("id",)), "'job'"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(old, new, features, words, tmp_path):
    with pytest.raises(DataError, match=words) as caught:
        read(ROWS.replace(old, new, 1) if old else ROWS, tmp_path, features)
    assert "old," not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("label", "lable", r"no column 'label', which data.target names; did you mean 'lable'\?"),
        ("age", "Ages", r"no column 'age', which \[data.numeric\] names; did you mean 'Ages'\?"),
        ("town", "twon", r"no column 'town', which \[data.categorical\] names; did you mean 'twon'\?"),
        ("id,age", "idd,age", r"no column 'id', which data.drop names; did you mean 'idd'\?"),
        ("epsilon", "epsilno", r"no column 'epsilon', which \[budgets\] names; did you mean 'epsilno'\?"),
        ("label", "fate", "no column 'label', which data.target names; it has: 'id', 'age'"),
    ],
)
def test_a_misspelt_column_is_named_with_the_column_that_may_be_meant(old, new, words, tmp_path):
    with pytest.raises(DataError, match=words) as caught:
        read(ROWS.replace(old, new, 1), tmp_path)
    assert "List each" not in str(caught.value)


def test_dropped_and_set_aside_columns_may_be_absent(tmp_path):
    lines = [",".join(line.split(",")[1:-1]) for line in ROWS.splitlines()]
    assert len(read("\n".join(lines) + "\n", tmp_path)) == 4


LISTED = Features(categorical={"smoker": ("true", "false"), "code": ("007", "8"), "band": 16}, texts=("smoker", "code"))


def test_categories_are_compared_as_they_are_written(tmp_path):
    (tmp_path / "a.csv").write_text("smoker,code,band,label\ntrue,007,1.50,no\nfalse,8,2,yes\n")
    inputs = table(tmp_path / "a.csv", "training data", ("no", "yes"), Columns("label", LISTED)).arrays.inputs
    np.testing.assert_array_equal(inputs[:, :4], [[1, 0, 1, 0], [0, 1, 0, 1]])


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()], ids=str)
def test_dates_are_read_from_texts_of_either_size(kind):
    """pandas writes large strings from version 3 on."""
    cells = pyarrow.chunked_array([pyarrow.array(["2024-03-31", " 31.3.2024", "3/31/2024", ""], kind)])
    rule = DateRule(date(2024, 3, 1), date(2024, 4, 1), day_first=False)
    np.testing.assert_array_equal(days(cells, "seen", Path("a.parquet"), DataError, rule), [30, 30, 30, np.nan])


def test_a_column_s_type_in_parquet_does_not_move_its_categories(tmp_path):
    """An empty cell makes floats of whole numbers."""
    features, made = Features(categorical={"band": ("1", "2"), "town": 16, "on": ("true", "false")}), []
    for bands in ([1, 2, 1], [1.0, 2.0, None]):
        columns = {"band": bands, "town": bands, "on": [True, False, True], "label": ["no", "yes", "no"]}
        parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
        made.append(
            table(tmp_path / "a.parquet", "training data", ("no", "yes"), Columns("label", features)).arrays.inputs
        )
    np.testing.assert_array_equal(made[0][:2], made[1][:2])
    assert made[0][:, :2].sum() == 3
    np.testing.assert_array_equal(made[0][:, -2:], [[1, 0], [0, 1], [1, 0]])


@pytest.mark.parametrize("other", ["x", "1.5", "TRUE", "", "2024-01-31"])
def test_one_record_s_cell_does_not_change_how_the_others_are_read(other, tmp_path):
    """Read by pyarrow, a column with one text is a column of texts, and 1.0 is then no longer 1."""
    features, made = Features(categorical={"band": ("1", "2"), "on": ("true", "false")}), []
    for last in ("1", other):
        (tmp_path / "a.csv").write_text(f"band,on,label\n1.0,True,no\n2,false,yes\n{last},{last},no\n")
        made.append(table(tmp_path / "a.csv", "training data", ("no", "yes"), Columns("label", features)).arrays.inputs)
    np.testing.assert_array_equal(made[0][:2], made[1][:2])
    np.testing.assert_array_equal(made[0][:2], [[1, 0, 1, 0], [0, 1, 0, 1]])


def test_a_list_of_values_that_no_cell_holds_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("smoker,label\n" + "yes,no\nno,yes\n" * 10)
    features = Features(categorical={"smoker": ("Yes", "No")}, texts=("smoker",))
    with pytest.raises(DataError, match=r"None of the 20 cells of column 'smoker' .*'Yes', 'No'.* Spell them"):
        table(tmp_path / "a.csv", "training data", ("no", "yes"), Columns("label", features))


def test_undeclared_classes_are_refused_before_the_data_are_read(tmp_path, monkeypatch):
    arrays = data.Arrays(np.zeros((4, 1, 2, 2), dtype=np.float32), np.array([0, 1, 2, 1]))
    monkeypatch.setattr(sources, "images", lambda *_: arrays)
    assert sources.read_source("owner/name", "train", tmp_path, number=True).classes == ("0", "1", "2")
    monkeypatch.setattr(sources, "is_image_table", lambda path: path.name == "a.parquet")
    for reader in ("images", "image_table", "table"):
        monkeypatch.setattr(sources, reader, lambda *_: pytest.fail("was read"))
    for where in ("owner/name", "a.parquet", "a.csv"):
        with pytest.raises(DataError, match=f"classes of .*{where} are not named"):
            sources.read_source(where, "train", tmp_path)


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("Ann Smith,1971,HIV+,0.5\nBob,1980,none,1\n", True),
        ("1971,0.5\n1980,1\n", True),
        ("lenient,x1\nstrict,x2\nlenient,x3\n", True),  # no number in it, and a name that its own column holds
        ("Ann,1971\nBob,1980\n", True),
        ("0,1,2\n5,6,7\n", False),  # pandas' names
        ("0,1,label\n5,6,0\n", False),
        ("name,year,0.5\nBob,1980,1\n", False),
        (",year\n0,1980\n", False),
        ("smoker,age\nsmoker,40\nnever,50\n", False),
        ("Ann,,0.5\nBob,1980,1\n", True),  # a cell is missing in somebody's row
    ],
    ids=range(10),
)
def test_a_table_without_column_names_is_refused_and_no_row_is_quoted(text, is_refused, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    if not is_refused:
        assert read_table(tmp_path / "a.csv", "data", DataError).num_rows > 0
        return
    for reader in (
        lambda: sources.read_source("a.csv", "train", tmp_path, classes=["no"]),
        lambda: Budgets.from_csv(tmp_path / "a.csv"),
    ):
        with pytest.raises((DataError, BudgetError), match="looks like a record") as caught:
            reader()
        assert not any(cell in str(caught.value) for cell in text.split("\n")[0].split(",") if len(cell) > 1)


def test_a_cell_of_several_lines_is_one_cell(tmp_path):
    rows = [f'"a note{" " * (i % 37)}\nof two lines",{i}' for i in range(60_000)]
    (tmp_path / "a.csv").write_text("note,number\n" + "\n".join(rows) + "\n")
    numbers = read_table(tmp_path / "a.csv", "data", DataError).column("number").to_pylist()
    assert numbers == list(range(60_000))


def test_budgets_that_are_neither_utf8_nor_utf16_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes("prénom,epsilon\nx,1\n".encode("latin-1"))
    with pytest.raises(BudgetError, match=r"not UTF-8 text.*iconv -f WINDOWS-1252"):
        Budgets.from_csv(tmp_path / "a.csv")


def test_tiers_are_compared_as_they_are_written(tmp_path):
    (tmp_path / "a.csv").write_text("tier\n01\n02\n01\n")
    assert Budgets.from_csv(tmp_path / "a.csv", column="tier", tiers={"01": 0.5, "02": 2.0}).counts.tolist() == [2, 1]


# -- images and tensors ----------------------------------------------------------------------------------------------


def png(value: int, size: tuple[int, int] = (4, 3)) -> bytes:
    return encoded(np.full(size[::-1], value, dtype=np.uint8))


def image_file(path: Path, files: list[bytes], column: str = "img", labels: list[int] | None = None) -> Path:
    cells = [{"bytes": file, "path": None} for file in files]
    labels = list(range(len(files))) if labels is None else labels
    parquet.write_table(pyarrow.table({column: cells, "label": labels, "epsilon": [1.0] * len(files)}), path)
    return path


@pytest.mark.parametrize("column", ["image", "img"])
def test_an_image_file_is_read_and_normalised(column, tmp_path):
    path = image_file(tmp_path / "own.parquet", [png(0), png(255), png(51)], column)
    source = image_table(path, "training data", None)
    assert source.arrays.inputs.shape == (3, 1, 3, 4)
    np.testing.assert_allclose(source.arrays.inputs[:, 0, 0, 0], [-1, 1, -0.6], rtol=1e-6)
    assert source.classes == ("0", "1", "2")
    assert source.table.column_names == ["label", "epsilon"]
    assert sources.read_source("own.parquet", "train", tmp_path, classes=("a", "b", "c")).classes == ("a", "b", "c")
    with pytest.raises(DataError, match=r"not named.*an output of the data"):
        sources.read_source("own.parquet", "train", tmp_path)


def encoded(array: np.ndarray, mode: str | None = None, kind: str = "png") -> bytes:
    image, file = Image.fromarray(array), io.BytesIO()
    (image if mode is None else image.convert(mode)).save(file, kind)
    return file.getvalue()


def test_every_kind_of_pixels_is_scaled_from_black_to_white(tmp_path):
    ramp = np.linspace(0, 255, 12).astype(np.uint8).reshape(3, 4)
    kinds = {
        "palette": (encoded(np.stack([ramp, ramp, 255 - ramp], -1), "P"), 3),
        "16 bits": (encoded(ramp.astype(np.uint16) * 257), 1),
        "two": (encoded(ramp, "1"), 1),
        "with alpha": (encoded(np.stack([ramp] * 4, -1)), 4),
    }
    for name, (file, channels) in kinds.items():
        inputs = image_table(image_file(tmp_path / f"{name}.parquet", [file]), "training data", None).arrays.inputs
        assert inputs.shape == (1, channels, 3, 4), name
        assert (inputs.min(), inputs.max()) == (-1, 1), name
    with pytest.raises(DataError, match="'F'"):
        image_table(
            image_file(tmp_path / "f.parquet", [encoded(ramp.astype(np.float32), kind="tiff")]), "training data", None
        )


@pytest.mark.parametrize(
    ("files", "labels", "classes", "words"),
    [
        ([png(0), b"not an image"], None, None, "row 1 .* cannot be decoded"),
        ([png(0), png(0, (5, 5))], None, None, "one size and type"),
        ([png(0), encoded(np.zeros((3, 4), dtype=np.uint16))], None, None, r"uint8 in row 0.*uint16"),
        ([png(0), png(1)], [0, 5], ("a", "b"), "1 of 2 labels"),
    ],
)
def test_an_image_file_that_cannot_be_used_is_refused(files, labels, classes, words, tmp_path):
    path = image_file(tmp_path / "own.parquet", files, labels=labels)
    with pytest.raises(DataError, match=words):
        image_table(path, "training data", classes)


def test_a_folder_of_tensors_in_each_format_holds_the_same_records(tmp_path):
    import torch
    from safetensors.numpy import save_file

    inputs, targets = np.arange(24, dtype=np.uint8).reshape(4, 2, 3), np.array([0, 2, 1, 0])
    save = {
        "npy": lambda path, array: np.save(path, array),
        "safetensors": lambda path, array: save_file({"x": array}, path),
        "pt": lambda path, array: torch.save(torch.from_numpy(array), path),
    }
    for kind in save:
        (tmp_path / kind).mkdir()
        save[kind](tmp_path / kind / f"inputs.{kind}", inputs)
        save[kind](tmp_path / kind / f"targets.{kind}", targets)
        with pytest.raises(DataError, match=r"not named.*how many there are"):
            sources.read_source(kind, "train", tmp_path)
        source = sources.read_source(kind, "train", tmp_path, classes=("0", "1", "2"))
        np.testing.assert_allclose(source.arrays.inputs, inputs / np.float32(255))
        np.testing.assert_array_equal(source.arrays.targets, targets)
        assert source.classes == ("0", "1", "2")


FLOATS, INDICES = np.zeros((4, 2)), np.zeros(4, dtype=np.int64)


@pytest.mark.parametrize(
    ("inputs", "targets", "words"),
    [
        (FLOATS, None, "has no targets"),
        (FLOATS, np.zeros(3, dtype=np.int64), "one row per record"),
        (FLOATS, np.array([0, 1, 2, -1]), "1 of 4 targets"),
        (FLOATS, b"nothing", "cannot be read as an array"),
        (np.full((4, 2), np.nan), INDICES, "inputs .* must be finite"),
        (np.zeros((4, 2), dtype=np.complex64), INDICES, "got complex64"),
        (FLOATS, np.array([0.5, np.nan, 1.0, 2.0]), "targets .* must be finite"),
    ],
)
def test_a_folder_of_tensors_that_cannot_be_used_is_refused(inputs, targets, words, tmp_path):
    np.save(tmp_path / "inputs.npy", inputs)
    if isinstance(targets, bytes):
        (tmp_path / "targets.npy").write_bytes(targets)
    elif targets is not None:
        np.save(tmp_path / "targets.npy", targets)
    with pytest.raises(DataError, match=words):
        tensors(tmp_path, "training data", None)


def test_class_indices_saved_as_a_column_are_class_indices(tmp_path):
    np.save(tmp_path / "inputs.npy", np.zeros((4, 2)))
    np.save(tmp_path / "targets.npy", np.array([[0], [1], [2], [1]]))
    assert tensors(tmp_path, "training data", None).arrays.targets.tolist() == [0, 1, 2, 1]


# -- by name ---------------------------------------------------------------------------------------------------------


def test_the_digits_have_a_fixed_split():
    source = sources.read_source("digits", "train", Path())
    assert source.arrays.inputs.shape == (1437, 64)
    assert source.classes == tuple("0123456789")
    test = sources.read_source("digits", "test", Path())
    together = {row.tobytes() for row in source.arrays.inputs} & {row.tobytes() for row in test.arrays.inputs}
    assert len(together) == 0


def test_data_that_do_not_exist_are_refused_with_the_known_names(tmp_path):
    with pytest.raises(DataError, match="digits, mnist, svhn, cifar10"):
        sources.read_source("imagenet", "train", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no inputs"):
        sources.read_source("empty", "train", tmp_path)
    (tmp_path / "people.csv").write_text(ROWS)
    with pytest.raises(DataError, match=r"data\.classes"):
        sources.read_source("people.csv", "train", tmp_path)


@pytest.mark.slow
@pytest.mark.skipif("EPSILONS_DATA" not in os.environ, reason="EPSILONS_DATA names no folder of data sets")
def test_mnist_is_complete_and_normalised_as_published():
    inputs, targets = data.load("mnist", "train")
    assert inputs.shape == (60_000, 1, 28, 28)
    assert abs(float(inputs.mean())) < 1e-3
    assert abs(float(inputs.std()) - 1) < 1e-3
    assert np.bincount(targets).tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


# -- documents cut into records of equal length, with the person of each -----------------------------------------------


def by_hand(documents: list[list[int]], length: int, step: int, pad: int | None) -> tuple[list[list[int]], list[int]]:
    """One record after the other."""
    records, persons = [], []
    for person, document in enumerate(documents):
        start, end = 0, 0
        while start < len(document) and (start + length <= len(document) or (pad is not None and end < len(document))):
            record = document[start : start + length]
            records.append(record + [pad or 0] * (length - len(record)))
            persons.append(person)
            start, end = start + step, start + length
    return records, persons


@pytest.mark.parametrize("pad", [None, 99])
@pytest.mark.parametrize(("length", "step"), [(1, 1), (3, 1), (3, 2), (3, 3), (2, 5), (7, 4)])
def test_records_and_persons_are_those_of_a_loop_over_documents(length: int, step: int, pad: int | None) -> None:
    coins = np.random.default_rng(0)
    documents = [coins.integers(1, 50, int(n)).tolist() for n in [0, 1, 2, 3, 6, 7, 8, 11, 20]]
    cut = windows(documents, length, step, pad=pad)
    records, persons = by_hand(documents, length, step, pad)
    assert cut.records.tolist() == records
    assert cut.persons.tolist() == persons
    assert cut.records.dtype == np.int64


def test_windows_of_tensors_and_series_keep_their_values_and_share_no_memory() -> None:
    series = torch.arange(24.0).reshape(12, 2)
    cut = windows([series, series.numpy()], length=5, step=3, ids=["a", "b"])
    assert torch.equal(torch.from_numpy(cut.records[1]), series[3:8])
    assert cut.persons.tolist() == ["a", "a", "a", "b", "b", "b"]
    cut.records[:] = 0
    assert series[3, 1] == 7


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([[1, 2]], 0), "length must be a whole number of at least 1, got 0"),
        (([[1, 2]], 2, 1.5), "step must be a whole number of at least 1, got 1.5"),
        (([[1, 2]], True), "length must be"),
        ((["a text"], 2), "Turn texts into token ids"),
        (([3], 2), "sequences of token ids"),
        (([[[1, 2]], [[1, 2, 3]]], 1), "rows of one shape"),
        (([[1, 2]], 2, None, ["a", "b"]), "got 2 for 1 documents"),
        (([[1, 2]], 3), "No document has 3 positions"),
        (([], 3), "No document"),
    ],
)
def test_other_documents_lengths_and_ids_are_refused(given: tuple[object, ...], words: str) -> None:
    with pytest.raises(DataError, match=words):
        windows(*given)  # type: ignore[arg-type]


# -- whether an evaluation is of training records


class Unreadable(Dataset):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, place: int) -> object:
        raise OSError("no such file")


def numbers(count: int, first: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(first, first + count).float()[:, None].expand(-1, 3), torch.zeros(count))


def few_values(seed: int) -> list[tuple[int, int]]:
    drawn = np.random.default_rng(seed).integers(0, 3, (5000, 2))
    return [(int(a), int(b)) for a, b in drawn]


def rows(first: int, count: int, **more: object) -> list[dict[str, object]]:
    return [{"words": [place, place + 1], "label": place % 2} | more for place in range(first, first + count)]


def shuffled(data: Dataset, seed: int = 0) -> Subset:
    order = np.random.default_rng(seed).permutation(len(data))  # type: ignore[arg-type]  # it has a length
    return Subset(data, order.tolist())


SHARING = {
    "a copy": (numbers(5000), numbers(5000)),
    "a copy of many records": (numbers(2_000_000), numbers(2_000_000)),
    "without the first": (numbers(5000), numbers(4999, first=1)),
    "without the first, of many": (numbers(100_000), numbers(99_999, first=1)),
    "shuffled": (numbers(5000), shuffled(numbers(5000))),
    "shuffled, of many": (numbers(100_000), shuffled(numbers(100_000))),
    "a part": (numbers(20_000), Subset(numbers(20_000), range(300, 900))),
    "ten records": (numbers(300), numbers(10, first=40)),
    "with others": (numbers(2000), ConcatDataset([numbers(500), numbers(1000, first=9000)])),
    "a larger set that holds it": (numbers(500), numbers(3000)),
    "with another column": (rows(0, 500), rows(0, 500, score=0.5)),
    "without a column": (rows(0, 500, epsilon=1.0), rows(100, 300)),
    "rows in another order of columns": (rows(0, 50), [dict(reversed(row.items())) for row in rows(0, 50)]),
}
STRANGERS = {
    "disjoint": (numbers(5000), numbers(5000, first=5000)),
    "a split": (Subset(numbers(1000), range(800)), Subset(numbers(1000), range(800, 1000))),
    "few values": (few_values(0), few_values(1)),
    "few values, shuffled": (few_values(0), few_values(1)[::-1][:700]),
    "rows": (rows(0, 500), rows(500, 500)),
    "no columns in common": (rows(0, 50), [{"pixels": place} for place in range(50)]),
    "other records": (rows(0, 50), numbers(50)),
    "empty": (numbers(50), numbers(0)),
    "not readable": (numbers(50), Unreadable()),
    "no length": (numbers(50), iter(())),
}


@pytest.mark.parametrize(("one", "other"), SHARING.values(), ids=SHARING)
def test_data_sets_that_share_records_are_found(one: Dataset, other: Dataset) -> None:
    before = torch.get_rng_state()
    assert shares_records(one, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("one", "other"), STRANGERS.values(), ids=STRANGERS)
def test_strangers_are_no_training_records(one: Dataset, other: Dataset) -> None:
    assert not shares_records(one, other)
    assert not shares_records(other, one)


def test_columns_that_do_not_count_are_left_out() -> None:
    assert not shares_records(rows(0, 50, epsilon=1.0), [{"epsilon": 1.0, "pixels": n} for n in range(50)], ["epsilon"])
    assert shares_records(rows(0, 50, epsilon=1.0), rows(0, 50, epsilon=2.0), ["epsilon"])


def test_a_parquet_file_with_a_name_that_is_no_text_holds_no_images(tmp_path):
    file = tmp_path / "own.parquet"
    parquet.write_table(pyarrow.table({"abcdef": [1]}), file)
    file.write_bytes(file.read_bytes().replace(b"abcdef", b"ab\xbedef"[:6]))
    assert not is_image_table(file)
