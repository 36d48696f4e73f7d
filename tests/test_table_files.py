"""Files of tables: each is read in one way, or refused with the true reason."""

from __future__ import annotations

import gzip

import pytest

from epsilons import Budgets
from epsilons.errors import BudgetError

REFUSED = [
    ("a.csv", b"", "is empty"),
    ("a.csv", b"\n\n", "only blank lines"),
    ("a.csv", b"\x89PNG\r\n", "a PNG image"),
    ("a.csv", b"PK\x03\x04", r"a workbook \(.xlsx"),
    ("a.xlsx", b"PK\x03\x04", "export the sheet as CSV"),
    ("a.csv", "epsilon\n1\n2\n".encode("utf-16-le"), "without a byte-order mark"),
    ("a.csv", b"epsilon;b,c\n1;2,3\n2;2,3\n", "commas or semicolons"),
    ("a.csv", b'epsilon,b\n1,"x\n2,y\n3,z\n', "never closed"),
    ("a.csv", b"epsilon;b\n1.234;x\n2.500;y\n", "may be between thousands"),
    ("a.csv", b"epsilon;b\n0,5;x\n2;y\n", "decimal commas"),
    ("a.csv", b"epsilon,b\n1,x\n,\n", "blank lines"),
    ("a.csv.gz", gzip.compress(b"epsilon\n1\n2\n")[:-9], "damaged"),
]


@pytest.mark.parametrize(("name", "content", "words"), REFUSED, ids=range(len(REFUSED)))
def test_a_file_that_cannot_be_read_in_one_way_is_refused_with_the_reason(name, content, words, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BudgetError, match=words):
        Budgets.from_csv(tmp_path / name, delta=1e-3)


@pytest.mark.parametrize(
    ("name", "content", "stated"),
    [
        ("a.csv.gz", gzip.compress(b"epsilon,b\n0.5,x\n2,y\n"), {}),
        ("a.tsv", b"epsilon\tb,c\n0.5\tx,1\n2\ty,1\n", {}),
        ("a.CSV", "epsilon;b\r\n0.5;Köln\r\n2;y\r\n".encode("utf-16"), {}),
        ("a.csv", b"sep=;\r\nepsilon;b\r\n0.5;x\r\n2;y\r\n", {}),
        ("a.csv", b'epsilon,b\n"0,5",x\n2,y\n', {"decimal": ","}),
        ("a.csv", b"epsilon|b\n0,500|x\n2,000|y\n", {"decimal": ","}),
        ("a.csv", b"epsilon;b,c\n0.5;2,3\n2;2,3\n", {"separator": ";"}),
    ],
    ids=range(7),
)
def test_budgets_are_the_same_in_every_form_of_text(name, content, stated, tmp_path):
    (tmp_path / name).write_bytes(content)
    assert Budgets.from_csv(tmp_path / name, delta=1e-3, **stated).epsilons.tolist() == [0.5, 2.0]


def test_a_folder_is_no_table(tmp_path):
    (tmp_path / "a.csv").mkdir()
    with pytest.raises(BudgetError, match="is a folder"):
        Budgets.from_csv(tmp_path / "a.csv")
