"""Numbers that are read from text are decimal; hexadecimal and other notations are refused."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from epsilons import Budgets, Recipe, plan
from epsilons.cli.options import parse_groups, parse_options, parse_shares, parse_tiers
from epsilons.configs.config_file import read_config
from epsilons.data.infer import guess_table
from epsilons.data.tables import Columns, Features, table
from epsilons.errors import BudgetError, DataError, InputError, PlanError
from epsilons.tabular import decimal

GOOD = ["1", "0.5", ".5", "5.", "+2", "1e-5", "2E+1", "007", "12345678901234567890", "0.1000000000000000055511151231"]
NONE = [
    *(
        "0x10",
        "0X1F",
        "0x1p3",
        "0b1",
        "0o7",
        "1_0",
        "1,5",
        "1.000,5",
        "1 000",
        "1'000",
        "１０",
        "٣",
        "1\u00a0",
        "½",
        "Ⅷ",
    ),
    *("inf", "-inf", "Infinity", "infinity", "1e", "e5", "--1", "+-1", ".", "1.2.3", "$1", "1%", "1f", "1L", "true"),
    *("1\x1b[0m", "\u202e1", "1\u200b", "0x", "1e5_0", "1d3", "one"),
]


def random_texts(seed: int, many: int) -> list[str]:
    """Texts of characters that numbers are made of in some country."""
    chosen = random.Random(seed)
    return ["".join(chosen.choices("0123456789.,_+-eExXaAfFnNiI １٣", k=chosen.randint(1, 6))) for _ in range(many)]


def is_decimal(text: str) -> bool:
    """The slow definition, character by character."""
    text = text.strip(" \t")
    mantissa, sign, exponent = text.lower().partition("e")
    digits = "0123456789"
    if sign:
        exponent = exponent[1:] if exponent[:1] in ("+", "-") else exponent
        if not exponent or any(c not in digits for c in exponent):
            return False
    mantissa = mantissa[1:] if mantissa[:1] in ("+", "-") else mantissa
    whole, _, part = mantissa.partition(".")
    return bool(whole + part) and all(c in digits for c in whole + part)


@pytest.mark.parametrize("text", GOOD)
def test_decimals_are_read_as_they_are(tmp_path, text):
    assert decimal(text) == float(text)
    (tmp_path / "w.csv").write_text(f"epsilon\n{text}\n 3 \n")
    assert sorted(Budgets.from_csv(tmp_path / "w.csv").epsilons) == sorted({float(text), 3.0})
    (tmp_path / "t.csv").write_text(f"age,label\n{text},a\n3,b\n")
    source = table(tmp_path / "t.csv", "data", ["a", "b"], Columns("label", Features({"age": (0.0, 1e20, False)})))
    assert source.arrays.inputs[0, 0] == np.float32(2 * (float(text) / 1e20) - 1)


@pytest.mark.parametrize("text", NONE)
@pytest.mark.parametrize("others", ["x", *(pytest.param(o, marks=pytest.mark.slow) for o in ("2", "2\n2.5", "0x2"))])
def test_a_cell_that_is_no_decimal_is_named_by_row_and_column_and_not_quoted(tmp_path, text, others):
    cell = f'"{text}"'
    (tmp_path / "w.csv").write_text(f"who,epsilon\na,1\nb,{cell}\n" + "".join(f"c,{o}\n" for o in others.split("\n")))
    with pytest.raises(BudgetError, match="are not numbers") as caught:
        Budgets.from_csv(tmp_path / "w.csv")
    assert "column 'epsilon'" in str(caught.value)
    assert "first at row 1," in str(caught.value)
    if text not in ("0x10", "one", "1_0", ".", "0x", "1e", "inf"):  # the message itself contains these
        assert text not in str(caught.value).replace(str(tmp_path), "")
    (tmp_path / "d.csv").write_text(f"epsilon,delta\n1,1e-6\n1,{cell}\n")
    with pytest.raises(BudgetError, match="column 'delta'"):
        Budgets.from_csv(tmp_path / "d.csv", delta_column="delta")
    (tmp_path / "t.csv").write_text(f"age,label\n1,a\n{cell},b\n")
    for features, target, classes in (({"age": (0.0, 9.0, False)}, "label", ["a", "b"]), ({}, "age", None)):
        declared = Features(features, {"label": 2} if not classes else {})
        with pytest.raises(DataError, match="not numbers"):
            table(tmp_path / "t.csv", "data", classes, Columns(target, declared))


@pytest.mark.parametrize("text", sorted({*NONE} - {"1,5", "1%", "1\u00a0"}))  # a list, a share, and a space at an end
def test_options_and_keys_of_configs_are_decimal(tmp_path, text):
    for shares in (f"{text}:50%,2:50%", f"1:{text},2:50%", f"1:{text}%,2:50%"):
        with pytest.raises(BudgetError):
            parse_shares(shares)
    with pytest.raises(BudgetError):
        parse_tiers(f"strict:{text}")
    assert parse_options([f"weight={text}"]) == {"weight": text.strip()}
    with pytest.raises(InputError):
        parse_groups(text)
    config = (
        "[data]\ntrain = 'digits'\n[budgets]\nshares = {{ {key} = 0.5, '2' = 0.5 }}\n"
        "[training]\nsteps = 1\nbatch_size = 1\n"
    )
    key = "".join(f"\\u{ord(c):04x}" for c in text)
    (tmp_path / "c.toml").write_text(config.format(key=f'"{key}"'), encoding="utf-8")
    with pytest.raises(InputError, match="must be a number"):
        read_config(tmp_path / "c.toml")


def test_random_texts_are_read_as_the_slow_definition_says(tmp_path):
    texts = random_texts(1, 3000)
    right = [text for text in texts if is_decimal(text)]
    assert 200 < len(right) < 2000
    assert [text for text in texts if decimal(text) is not None] == right
    for text in texts[:200]:
        (tmp_path / "w.csv").write_text(f'epsilon,who\n7,a\n"{text}",b\n', encoding="utf-8")
        positive = is_decimal(text) and 0 < float(text) < math.inf
        try:
            budgets = Budgets.from_csv(tmp_path / "w.csv")
        except BudgetError:
            assert not positive, text
        else:
            assert positive, text
            assert set(budgets.epsilons) == {7.0, float(text)}


def test_a_column_of_hexadecimals_is_not_read_as_integers(tmp_path):
    (tmp_path / "w.csv").write_text("epsilon\n0x10\n0x1\n")
    with pytest.raises(BudgetError, match="2 of 2 cells"):
        Budgets.from_csv(tmp_path / "w.csv")
    (tmp_path / "t.csv").write_text("age,epsilon,label\n" + "".join(f"0x{i:x},1,{i % 2}\n" for i in range(40)))
    assert [(column.name, column.kind) for column in guess_table(tmp_path / "t.csv", None, None).columns] == [
        ("age", "categorical")
    ]


def test_empty_cells_are_empty(tmp_path):
    for nothing in ("", "NA", "nan", "null", " "):
        (tmp_path / "w.csv").write_text(f"epsilon,x\n1,1\n{nothing},1\n")
        with pytest.raises(BudgetError, match=r"1 of 2 cells .* empty or NaN"):
            Budgets.from_csv(tmp_path / "w.csv")
        (tmp_path / "t.csv").write_text(f"age,label\n9,a\n{nothing},b\n")
        source = table(tmp_path / "t.csv", "data", ["a", "b"], Columns("label", Features({"age": (0.0, 9.0, False)})))
        assert source.arrays.inputs[:, 0].tolist() == [1.0, 0.0]


def test_a_missing_header_above_numbers_is_detected(tmp_path):
    (tmp_path / "w.csv").write_text("1.0\n2.0\n3.0\n")
    with pytest.raises(BudgetError, match="looks like a record"):
        Budgets.from_csv(tmp_path / "w.csv")
    with pytest.raises(BudgetError, match="looks like a record"):
        Budgets.from_csv(tmp_path / "w.csv", column="1.0")


def test_floors_of_mix_are_decimal():
    budgets = Budgets.from_shares({1.0: 0.5, 2.0: 0.5}, records=600)
    for floor in ("1:0x1", "1:1_0", "inf:0.01", "1:nan", "1:0.01:2", "1"):
        with pytest.raises(PlanError, match="takes a floor like"):
            plan(budgets, Recipe(steps=10, batch_size=60, clip_norm=1.0), "mix", "rdp", floor=floor)
