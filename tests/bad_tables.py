"""Tables with columns of texts as people have them: cells of every kind, beside other columns."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import csv, parquet

SENTENCE = "the patient has a mild cough and no fever since two weeks but pain in left knee naïve Straße 東京 привет"
WORDS = SENTENCE.split()
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
    return " ".join(coins.choices(WORDS, k=coins.randint(5, 20)))


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
    "mails": lambda i, coins: f"{coins.choice(WORDS)}{i}@example.com",
    "people": lambda i, coins: f"{coins.choice(WORDS)}{i} {coins.choice(WORDS)}",
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
