"""`epsilons init`: draft a commented config from a user's data."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..configs.config import Config, DataSection
from ..configs.config_file import toml, toml_key
from ..configs.prepare import Prepared
from ..core.disclosure import SMALLEST_SHOWN
from ..core.files import write_text
from ..data import DATASETS, sources
from ..data.images import IMAGE_SETS, PLAIN_MEAN, PLAIN_STD, UNCHANGED_MEAN, UNCHANGED_STD, is_image_table
from ..data.infer import BUCKETS, Column, TableGuess, count_classes, guess_table, names_persons
from ..data.sources import is_folder_of_tensors
from ..data.tables import Features
from ..errors import DataError, InputError, printable
from ..ledger.model_file import ArrayInputs, ImageInputs, ModelFile, Named, Origin, Outputs, TableInputs
from ..tabular import SEPARATORS, Marks, alike, as_text, is_table, stem
from .options import option, saying

# -- What `epsilons init` drafts for columns of texts: fixed features of them, or ids of tokens, and settings that
# fit

#: Bytes that the features of all records may take; features are not sparse.
MOST_BYTES = 2 * 10**9
#: Buckets of hashed n-grams: of words, and of the characters of short texts.
TEXT_BUCKETS, SHORT_BUCKETS = 8192, 4096
#: With fewer buckets than this, hashed words are worse than embeddings, if there is nothing beside the text.
FEWEST_BUCKETS = 4096


@dataclass(frozen=True)
class Way:
    """One way to learn from texts.

    inputs    the line that turns texts into inputs
    model     name of the model
    training  settings of [training] that fit it
    """

    inputs: str
    model: str
    training: dict[str, str]

    @property
    def settings(self) -> str:
        """The settings of [training] in words."""
        listed = [f"{name} = {value}" for name, value in self.training.items()]
        return ", ".join(listed if "momentum" in self.training else [*listed, "no momentum"])


@dataclass(frozen=True)
class TextSettings(Way):
    """The way that a draft takes.

    instead  another way, as a comment; None if there is none
    most     largest batch size
    """

    instead: Way | None
    most: float


def text_settings(guess: TableGuess, records: int) -> TextSettings | None:
    """Settings for the columns of texts; None if there are none."""
    texts = [column for column in guess.columns if column.kind == "text"]
    if not texts:
        return None
    is_short, is_number = all(column.short for column in texts), guess.classes is None
    others = [name for kind in ("numeric", "categorical") for name in guess.names(kind) if name != guess.target]
    buckets = _buckets(SHORT_BUCKETS if is_short else TEXT_BUCKETS, records * len(texts))
    hashed = _hashed(buckets, is_short, is_number)
    tokens = _tokens(is_short) if len(texts) == 1 and not others else None
    if tokens is not None and buckets < FEWEST_BUCKETS and not is_short:
        return TextSettings(tokens.inputs, tokens.model, tokens.training, hashed, most=512)
    return TextSettings(hashed.inputs, hashed.model, hashed.training, tokens, most=2048)


def _buckets(buckets: int, texts: int) -> int:
    """As many as fit, a power of 2, and at least 256."""
    while buckets > 256 and 4 * buckets * texts > MOST_BYTES:
        buckets //= 2
    return buckets


def _hashed(buckets: int, is_short: bool, is_number: bool) -> Way:
    n_grams = ", words = [], characters = [1, 2, 3]" if is_short else ""
    training = {"clip_norm": "0.5", "optimizer": '"sgd"', "lr": "10", "momentum": "0.9"}
    if is_number:  # a squared loss diverges at such rates
        training = {"clip_norm": "1.0", "optimizer": '"sgd"', "lr": "0.5"}
    inputs = f'features = {{ name = "hashed-text", options = {{ buckets = {buckets}{n_grams} }} }}'
    return Way(inputs, "logistic", training)


def _tokens(is_short: bool) -> Way:
    if is_short:
        training = {"clip_norm": "1.5", "optimizer": '"sgd"', "lr": "2"}
        return Way('tokens = { kind = "bytes", length = 32 }', "lstm", training)
    training = {"clip_norm": "1.0", "optimizer": '"adam"', "lr": "0.02"}
    return Way('tokens = { kind = "words", length = 256, buckets = 16384 }', "embedding-bag", training)


# -- `epsilons init`: draft a commented config from a user's data

INIT_EXAMPLES = """
[bold]Examples[/bold]

epsilons init people.csv         # drafts people.toml

epsilons init visits.parquet --target readmitted --budget consent -o visits.toml

epsilons init mnist              # a data set with a name
"""

#: Models for data sets with names; all others start with an mlp.
MODELS = {"mnist": "mnist-cnn", "fashion-mnist": "mnist-cnn", "cifar10": "cifar10-cnn", "svhn": "cifar10-cnn"}
#: Settings of [training] that the models of a draft start from.
TRAINING = {"clip_norm": "1.0", "optimizer": '"sgd"', "lr": "0.5"}


@saying
def init_command(
    data: Annotated[
        str, typer.Argument(help="A .csv or .parquet table, an image file, a folder of tensors, or a data set's name.")
    ],
    target: Annotated[str | None, option("The column to predict. Default: a guess by the names.")] = None,
    budget: Annotated[str | None, option("The column of budgets or tiers. Default: a guess by the names.")] = None,
    test: Annotated[Path | None, option("A file to test on. Default: a fifth of the records is held out.")] = None,
    output: Annotated[Path | None, option("The config to write. Default: NAME.toml.", "--output", "-o")] = None,
    separator: Annotated[
        str | None, option("What separates the cells: , ; | or tab. Default: the first rows show it.")
    ] = None,
    decimal: Annotated[
        str | None, option('The decimal mark of numbers: "." or ",". Default: the cells show it.')
    ] = None,
) -> tuple[str, dict[str, Any]]:
    """Draft a config for `epsilons train` from your data.

    It guesses which column to predict and which column holds the budgets, and writes down how each other column becomes
    an input. Read the draft before you train: bounds and lists of values that were read off the data are not covered by
    the guarantee.
    """
    source = Path(data)
    config = output or Path(f"{stem(source) or data}.toml")
    if config.exists():
        raise InputError(f"{config} exists already. Choose another name with -o, or remove it.")
    is_named = data in DATASETS
    train = data if is_named else _relative(source, config)
    named_test = None if test is None else _relative(test, config)
    if is_named or is_folder_of_tensors(source) or is_image_table(source):
        text, notes = draft_arrays(train, named_test, is_named, None if is_named else count_classes(source))
    elif is_table(source) or source.is_file():
        guess = guess_table(source, target, budget, _marks(separator, decimal))
        text, notes = draft_table(guess, source.name, train, named_test)
        notes[0] += " (a guess; --target names another column)" if target is None else ""
    else:
        raise DataError(
            f"{data!r} is neither a .csv, .tsv or .parquet file, a folder with inputs and targets, nor one of: "
            f"{', '.join(DATASETS)}."
        )
    write_text(config, text)
    shown = printable(config)
    said = f"Drafted {shown}. Read it, correct it, then: epsilons train {shown}"
    return "\n".join([*map(printable, notes), "", said]), {"file": str(config), "notes": notes}


def _marks(separator: str | None, decimal: str | None) -> Marks:
    """The marks that the flags state. Raises InputError."""
    mark = {"tab": "\t", "\\t": "\t"}.get(separator or "", separator)
    if mark is not None and mark not in SEPARATORS:
        raise InputError(f'--separator is one of ",", ";", "|" and tab; got {separator!r}.')
    if decimal not in (None, ".", ","):
        raise InputError(f'--decimal is "." or ","; got {decimal!r}.')
    return Marks(mark, decimal)


def draft_arrays(train: str, test: str | None, is_named: bool, classes: int | None) -> tuple[str, list[str]]:
    """A config for images or tensors, and the notes to print.

    classes  number of classes in a user's data; None for a named data set, or if the target is a number
    """
    text = _render(
        name=train,
        train=train,
        test=test,
        is_named=is_named,
        guess=None,
        classes=classes,
        model=MODELS.get(train, "mlp"),
        training=TRAINING,
        delta="1e-5",
        batch_size="512",
        is_number=classes is None and not is_named,
    )
    return text, ["Budgets: SIMULATED; name a file of your own in [budgets]."]


def draft_table(guess: TableGuess, name: str, train: str, test: str | None) -> tuple[str, list[str]]:
    """A config for a table, and the notes to print.

    name         the table's file, for the heading
    train, test  paths from the config's folder
    """
    shared = sorted((column for column in guess.columns if column.repeats), key=lambda c: not names_persons(c.name))
    person = shared[0] if shared else None
    people = guess.records if person is None or person.repeats is None else person.repeats[0]
    records = people if test else math.floor(0.8 * people)
    repeated = [_question(column, person) for column in shared]
    texts = text_settings(guess, records)
    text = _render(
        name=name,
        train=train,
        test=test,
        is_named=False,
        guess=guess,
        repeated=repeated,
        person=None if person is None else person.name,
        texts=texts,
        model=texts.model if texts else "mlp",
        training=texts.training if texts else TRAINING,
        delta=f"{min(1e-5, 10.0 ** math.floor(math.log10(1 / (people + 1)))):.0e}",
        batch_size=f"{_round_down(min(texts.most if texts else 512.0, records / 4)):g}",
        is_number=guess.classes is None,
    )
    return text, _notes(guess, repeated, texts)


def _notes(guess: TableGuess, repeated: list[str], settings: TextSettings | None) -> list[str]:
    drop = guess.names("drop")
    numeric = len(guess.names("numeric")) - (guess.classes is None) + len(guess.names("dates"))
    listed = guess.names("categorical")
    budgets = f"Budgets: {guess.budget!r}"
    if guess.budget is None:
        budgets = "Budgets: no such column was found; the draft has SIMULATED ones. Name yours in [budgets]."
    elif guess.tiers is not None:
        budgets = f"Budgets: the {len(guess.tiers)} tiers of {guess.budget!r}; WRITE DOWN the epsilon of each."
    inputs = f"Inputs: {numeric} numeric, {len(listed)} categorical" + f" ({_listed(listed)})" * bool(listed)
    notes = [f"Predicts: {guess.target!r}", budgets, inputs]
    if texts := guess.names("text"):
        how = "embedded" if settings and settings.model != "logistic" else "as hashed n-grams"
        notes[-1] += f", and texts {how}: {_listed(texts)}"
    if drop:
        notes.append(f"Left out: {_listed(drop)} (identifiers, or columns with nothing to learn from)")
    notes += [f"WARNING: {question}" for question in repeated]
    if days := guess.names("dates"):
        notes.append(f"Dates: {_listed(days)}, as numbers of days between bounds")
    return notes + [f"WARNING: {said}" for said in _doubts(guess)]


def _doubts(guess: TableGuess) -> Iterator[str]:
    """What to look at before the draft is used."""
    if dates := [column.name for column in guess.columns if column.dates and column.kind == "drop"]:
        yield (
            f"{_listed(dates)} hold{'s' * (len(dates) == 1)} dates, which are left out, because the order of day and "
            "month, or the century, is not shown. State bounds and order in [data.dates] to learn from them."
        )
    if guess.missing:
        yield (
            f"{guess.budget!r} holds cells that are no budget ({', '.join(guess.missing)}). See the comments in the "
            "draft: they are refused, unless the config says that they leave their records out."
        )
    spelt: dict[str, list[str]] = {}
    for tier in guess.tiers or ():
        spelt.setdefault(alike(as_text(tier)), []).append(repr(as_text(tier)))
    for names in spelt.values():
        if len(names) > 1:
            yield (
                f"{', '.join(names)} of {guess.budget!r} differ only by case, outer blanks or Unicode form, and the "
                "draft has a tier for each. Keep one of them in [budgets] tiers, and it stands for all its spellings."
            )
    for column in guess.columns:
        if column.dirty:
            yield f"of the cells of {column.name!r}, {column.dirty.said}. The draft takes it as {column.kind}."
    if codes := [column.name for column in guess.columns if column.code]:
        yield (
            f"{_listed(codes)} may be codes, such as zip codes, and not quantities. See the comments in the draft: "
            "quantities are scaled, codes are hashed or listed in [data.categorical]."
        )


def _question(column: Column, person: Column | None) -> str:
    assert column.repeats is not None
    values, cells = column.repeats
    said = f"'{_bare(column.name)}' has {values:,} values in {cells:,} rows"
    if column is person:
        return (
            f"{said}: several rows of one person? The draft has one budget per value, for all its rows. If each row is "
            f"one person, write so in data.person: epsilons docs persons"
        )
    return f"{said}, too. Is this the id of a person? Then name it in data.person."


def _render(**values: Any) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("epsilons", "configs"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"bare": _bare, "value": toml, "key": toml_key, "bounds": _bounds, "tiers": _tiers}
    environment.filters["padded"] = lambda setting: f"{setting:<37}"
    environment.globals |= {"docs": "epsilons docs config", "smallest_shown": SMALLEST_SHOWN, "buckets": BUCKETS}
    return environment.get_template("config.toml.jinja").render(values)


def _round_down(value: float) -> float:
    """To two digits, and at least 1; 512 and 2048 stay.

    >>> _round_down(0.3), _round_down(387.5), _round_down(512.0)
    (1.0, 380.0, 512.0)
    """
    power = 10.0 ** max(0, math.floor(math.log10(max(value, 1))) - 1)
    return max(1.0, math.floor(value / power) * power) if value not in (512, 2048) else value


def _relative(path: Path, config: Path) -> str:
    return Path(os.path.relpath(path, config.parent)).as_posix()


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _bare(text: str) -> str:
    """A text as it is shown in a comment: escaped, without quotation marks."""
    return toml(text)[1:-1]


def _bounds(bounds: tuple[float, float, bool]) -> str:
    low, high, log = bounds
    return f"[{low:.15g}, {high:.15g}" + (', "log"]' if log else "]")


def _tiers(tiers: Iterable[Any]) -> str:
    return ", ".join(f"{toml_key(as_text(tier))} = 0.0" for tier in tiers)


# -- What a config states about a trained model, for its model.json


def describe(prepared: Prepared, folder: Path) -> ModelFile:
    """The description of the model that a config trains; paths are taken from `folder`."""
    config = prepared.config
    return ModelFile(
        model=_named(config, prepared),
        inputs=_inputs(config.data, folder),
        outputs=_outputs(config.data, prepared.classes),
        fixed_features=prepared.features is not None,
        provenance=tuple(Origin(**entry.to_dict()) for entry in config.data.provenance),  # type: ignore[arg-type]
    )


def _named(config: Config, prepared: Prepared) -> Named | None:
    """The model of the table; None for the caller's own."""
    if ":" in config.model.name:
        return None
    shape = prepared.train.inputs.shape[1:]
    return Named(name=config.model.name, options=config.model_options, shape=shape, outputs=prepared.outputs)


def _inputs(data: DataSection, folder: Path) -> TableInputs | ImageInputs | ArrayInputs:
    """How the records of data.train become inputs, by the kinds of `data.sources`."""
    kind = sources.kind_of(data.train, folder)
    if data.train in IMAGE_SETS and data.features is None:
        return ImageInputs(mean=IMAGE_SETS[data.train].mean, std=IMAGE_SETS[data.train].std)
    if data.train in IMAGE_SETS or kind in ("images", "hub"):
        mean, std = (PLAIN_MEAN, PLAIN_STD) if data.features is None else (UNCHANGED_MEAN, UNCHANGED_STD)
        return ImageInputs(mean=mean, std=std)
    if kind in ("name", "tensors"):
        return ArrayInputs()
    return TableInputs(features=inputs_alone(data.columns, data.target))


def inputs_alone(features: Features, target: str) -> Features:
    """The rules of the inputs, without the target and the columns that are left out or set aside."""
    numeric = {name: bounds for name, bounds in features.numeric.items() if name != target}
    alone = replace(features, numeric=numeric, drop=())
    return replace(alone, texts=tuple(sorted({*features.texts} & {*alone.names})))


def _outputs(data: DataSection, classes: tuple[str, ...] | None) -> Outputs:
    if classes is not None:
        return Outputs(kind="classes", target=data.target, classes=classes)
    return Outputs(kind="number", target=data.target, bounds=data.columns.numeric.get(data.target))
