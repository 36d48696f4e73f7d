"""Options that several commands share, and the values that people type into them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from .. import planning
from ..accounting import ACCOUNTANTS
from ..budgets.risk import Risk
from ..core.disclosure import has_small_cells, of_unit
from ..errors import BudgetError, InputError, PlanError, json_text, printable
from ..planning import STRATEGIES, Plan, class_balance, display, risk_profile
from ..tabular import decimal

BUDGETS, TRAINING = "Budgets", "Training"

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
_Result = TypeVar("_Result")


def option(text: str, *names: str, panel: str | None = None, **settings: Any) -> Any:
    """An option with this help text, under these names, in a panel of the help page."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **settings)


def one_of(names: Iterable[str], more: str = "") -> Any:
    """An option that takes one of these names. The shell completes it."""
    return option(f"One of: {', '.join(names)}. {more}".rstrip(), panel=TRAINING, autocompletion=lambda: list(names))


def with_flags(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """A command of typer: a parameter that is a dataclass becomes one flag for each of its fields."""
    hints, parameters = get_type_hints(function, include_extras=True), []
    classes: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    for name, parameter in signature(function).parameters.items():
        flags = get_type_hints(hints[name], include_extras=True) if name in classes else {name: hints[name]}
        given = {name: parameter} if name not in classes else signature(hints[name]).parameters
        parameters += [given[flag].replace(kind=Parameter.KEYWORD_ONLY, annotation=flags[flag]) for flag in given]

    def command(**values: Any) -> _Result:
        for name, kind in classes.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
        return function(**values)

    command.__doc__, command.__name__ = function.__doc__, function.__name__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # which typer reads
    return command


Quiet = Annotated[bool, option("Print nothing but errors.", "--quiet", "-q")]
AsJson = Annotated[bool, option("Print the result as JSON.", "--json")]


def saying(function: Callable[..., Any]) -> Callable[..., None]:
    """A command of typer that says what the function returns: a text, or a text with values; with --json and --quiet.

    A function that has a parameter `quiet` says something itself. Its text may be None, and `said` among its values.
    """
    hints, parameters = get_type_hints(function, include_extras=True), signature(function).parameters
    own = [one.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]) for name, one in parameters.items()]
    for name, hint in (("quiet", Quiet), ("as_json", AsJson)):
        if name not in parameters:
            own.append(Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=hint))

    def command(*, quiet: bool, as_json: bool, **given: Any) -> None:
        result = function(**given, **({"quiet": quiet or as_json} if "quiet" in parameters else {}))
        text, values = result if isinstance(result, tuple) else (result, {})
        if as_json:
            print(json_text({"said": text, **values}))
        elif text is not None:
            console(quiet=quiet).print(text, soft_wrap=True)

    command.__doc__, command.__name__ = function.__doc__, function.__name__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
    command.__signature__ = Signature(own)  # type: ignore[attr-defined]  # which typer reads
    return command


Steps = Annotated[int, option("Number of noisy updates.", panel=TRAINING)]
BatchSize = Annotated[float, option("EXPECTED number of records per update.", panel=TRAINING)]
Accountant = Annotated[str, one_of(ACCOUNTANTS)]
_OWN = 'Or your own, "package.module:function".'
Strategy = Annotated[str | None, one_of(STRATEGIES, f"{_OWN} Default: scale, or the config's.")]
Select = Annotated[
    str | None,
    option("Runs that epsilons tune makes in secret, logarithmic:10 or poisson:10; the best is kept.", panel=TRAINING),
]
SetKeys = Annotated[
    list[str] | None,
    option("A key of the config, training.lr=0.1. Repeatable. Or EPSILONS_SET_TRAINING__LR.", "--set", panel=TRAINING),
]
Epochs = Annotated[float | None, option("Expected passes over the data, in place of steps.", panel=TRAINING)]
Shares = Annotated[str | None, option('SIMULATED budgets, as epsilon:share: "1:34%,2:43%,3:23%".', panel=BUDGETS)]
Records = Annotated[int | None, option("Number of records. Goes with --shares.", panel=BUDGETS)]
BudgetsFile = Annotated[Path | None, option("A .csv or .parquet file of budgets, one row per record.", panel=BUDGETS)]
Column = Annotated[str, option("The column of budgets in that file.", panel=BUDGETS)]
Tiers = Annotated[
    str | None, option('Epsilon of each tier, if the column holds names: "strict:0.5,open:8".', panel=BUDGETS)
]
_TIED = 'DECLARED counts or shares of the classes in each tier, "1:80/20,3:10/90". Shows what each class weighs.'
Classes = Annotated[str | None, option(_TIED, panel=BUDGETS)]
Risks = Annotated[
    str | None,
    option('In place of --tiers, the risk of each: "strict:odds=55,open:tpr=0.05@0.01" (of FPR 0.01).', panel=BUDGETS),
]
Tail = Annotated[
    str | None, option('With --risks, epsilon and delta that all tiers keep, too: "4,1e-5".', panel=BUDGETS)
]
Delta = Annotated[float, option("The delta of all records.", panel=BUDGETS)]
Person = Annotated[
    str | None,
    option("The column of that file with the id of each row's person. Budgets are then of persons.", panel=BUDGETS),
]
Conflict = Annotated[
    str | None,
    option('For persons whose rows state different budgets: "refuse" or "strictest".', panel=BUDGETS),
]
UnitOption = Annotated[
    str | None, option('What --records counts: "record", or "person" with all their rows.', "--unit", panel=BUDGETS)
]
Trust = Annotated[bool, option("Import and run code that is named as package.module:function.", "--trust")]


def parse_shares(text: str, named: bool = False) -> dict[Any, float]:
    """{epsilon: share} from "1:34%,2:43%,3:23%" or "1:.34, 2:.43, 3:.23"; `named`: {tier: share}. Raises BudgetError.

    >>> parse_shares("1:34%,2:66%")
    {1.0: 0.34, 2.0: 0.66}
    """
    if named:
        return _pairs(text, _name, _share, 'Shares of --risks are written tier:share, e.g. "strict:30%,open:70%"')
    return _pairs(text, decimal, _share, 'Shares are written epsilon:share, e.g. "1:34%,2:43%,3:23%"')


def parse_tiers(text: str) -> dict[str, float]:
    """{name: epsilon} from "strict:0.5,open:8". Raises BudgetError.

    >>> parse_tiers("strict:0.5, open:8")
    {'strict': 0.5, 'open': 8.0}
    """
    return _pairs(text, _name, decimal, 'Tiers are written name:epsilon, e.g. "strict:0.5,open:8"')


def parse_risks(text: str | None, tail: str | None) -> tuple[dict[str, Risk], tuple[float, float]] | None:
    """{name: risk}, each with its epsilon, and the tail; None without both. Several limits are joined by "+".

    Raises BudgetError.

    >>> risks, tail = parse_risks("strict:odds=55, open:tpr=.05@.01+epsilon=2", "4,1e-5")
    >>> risks == {"strict": Risk(odds=55.0, epsilon=4.0), "open": Risk(tpr=0.05, at_fpr=0.01, epsilon=2.0)}, tail
    (True, (4.0, 1e-05))
    """
    if text is None and tail is None:
        return None
    form = 'Risks are written --risks "strict:odds=55,open:tpr=0.05@0.01" --tail EPSILON,DELTA'
    epsilon, delta = (*map(decimal, (tail or "").split(",")), None)[:2]
    if text is None or epsilon is None or delta is None:
        raise BudgetError(f"{form}; got {text!r} and {tail!r}.")
    risks = _pairs(text, _name, _risk, form)
    return {name: replace(risk, epsilon=min(risk.epsilon or epsilon, epsilon)) for name, risk in risks.items()}, (
        epsilon,
        delta,
    )


def _risk(text: str) -> Risk | None:
    pairs = [part.partition("=")[::2] for part in text.replace("@", "+at_fpr=").split("+")]
    limits = {name.strip(): decimal(value) for name, value in pairs}
    if len(limits) < len(pairs) or None in limits.values() or not limits.keys() <= {one.name for one in fields(Risk)}:
        return None
    return Risk(**limits)


def _name(text: str) -> str | None:
    return text or None


def parse_classes(text: str | None) -> tuple[class_balance.Classes | None, list[str]]:
    """({epsilon: one number per class}, the classes' numbers as names) from "1:80/20,3:10/90". Raises BudgetError.

    >>> parse_classes("1:80/20, 3:10/90")
    ({1.0: [80.0, 20.0], 3.0: [10.0, 90.0]}, ['0', '1'])
    """
    if text is None:
        return None, []
    classes = _pairs(text, decimal, _numbers, 'Classes are written epsilon:number/number, e.g. "1:80/20,3:10/90"')
    return classes, list(map(str, range(max(map(len, classes.values())))))


def parse_options(texts: list[str]) -> dict[str, Any]:
    """{"weight": 0.5} from ["weight=.5"]; numbers become numbers. Raises PlanError.

    >>> parse_options(["weight=.5", "mean=harmonic"])
    {'weight': 0.5, 'mean': 'harmonic'}
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise PlanError(f"Options are written name=value, e.g. weight=.5; got {text!r}.")
        options[name.strip().replace("-", "_")] = _number_or_text(value.strip())
    return options


def parse_groups(text: str) -> list[int]:
    """[0, 2] from "0,2". Raises InputError.

    >>> parse_groups("0, 2")
    [0, 2]
    """
    if not re.fullmatch(r" *[0-9]{1,9} *(, *[0-9]{1,9} *)*", text):
        raise InputError(f"--groups takes the numbers of groups, like 0,2; got {text!r}.")
    return [int(part) for part in text.split(",")]


def _pairs(
    text: str, read_key: Callable[[str], _Key | None], read_value: Callable[[str], _Value | None], form: str
) -> dict[_Key, _Value]:
    """{key: value} from "key:value,key:value"; `form` says in messages how the text should be written."""
    pairs: dict[_Key, _Value] = {}
    for part in text.split(","):
        written, colon, number = (piece.strip() for piece in part.rpartition(":"))
        key, value = read_key(written), read_value(number)
        if not colon or key is None or value is None:
            raise BudgetError(f"{form}; got {part.strip()!r}.")
        if key in pairs:
            raise BudgetError(f"{written!r} is given twice; each needs one value.")
        pairs[key] = value
    return pairs


def _share(text: str) -> float | None:
    value = decimal(text.removesuffix("%"))
    return value / 100 if value is not None and text.endswith("%") else value


def _numbers(text: str) -> list[float] | None:
    found = [number for part in text.split("/") if (number := decimal(part)) is not None]
    return found if len(found) == text.count("/") + 1 else None


def _number_or_text(value: str) -> float | int | str:
    number = decimal(value)
    if number is None:
        return value
    return int(value) if re.fullmatch(r"[+-]?[0-9]{1,15}", value) else number


# -- Plans on the terminal: the tables of `planning.display`, printed by rich

WIDTH_WITHOUT_TERMINAL = 120


def console(stderr: bool = False, quiet: bool = False) -> Console:
    """A console as wide as the terminal, or 120 columns wide without a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return _console(stderr=stderr, quiet=quiet, width=None if stream.isatty() else WIDTH_WITHOUT_TERMINAL)


def _console(**settings: Any) -> Console:
    """Printed text may hold names from data, so rich must read no markup and no emoji in it."""
    return Console(highlight=False, markup=False, emoji=False, **settings)


def show_table(content: display.Table, out: Console, left: int = 0) -> None:
    """Print a table without cutting off a number; all columns but the first `left` are right-aligned.

    On a terminal that is too narrow, columns become rows, if that is narrower. Without a terminal the table is as wide
    as it needs to be.
    """
    table, width = _layout(content, left)
    if width > out.width and out.is_terminal:
        headers, rows = content
        first, *others = map(list, zip(headers, *rows, strict=True))
        turned, turned_width = _layout((first, others), 1)
        if turned_width < width:
            table, width = turned, turned_width
    if width <= out.width:
        out.print(table)
    else:
        _console(file=out.file, quiet=out.quiet, width=width).print(table)


def _layout(content: display.Table, left: int) -> tuple[Table, int]:
    """The table, and its width in characters."""
    headers, rows = content
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, header in enumerate(headers):
        table.add_column(printable(header), justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(printable, row))
    unlimited = _console(width=10_000)
    return table, Measurement.get(unlimited, unlimited.options, table).maximum


def show_plan(plan: Plan, out: Console, tiers: Mapping[str, float] | None = None) -> None:
    """What each group gives and gets, phase by phase. tiers: {name: epsilon}"""
    out.print(plan.title, style="bold")
    for title, table in display.phase_tables(plan, tiers):
        out.print(title)
        show_table(table, out)
    for note in plan.notes:
        out.print(note)


def show_classes(plan: Plan, classes: class_balance.Classes, names: Sequence[str], out: Console) -> None:
    """What each class weighs in training. Not of plans with small groups: the weights follow from all budgets."""
    if not has_small_cells(plan.groups):  # show_plan has printed why
        found = planning.balance(plan, classes)
        show_table(found.table(names), out, left=1)
        if warning := found.warning(names):
            out.print(warning, style="bold")


def show_risk(plan: Plan, out: Console) -> None:
    """What attacks could gain from each group, and how much of it comes from the other groups' budgets."""
    if has_small_cells(plan.groups):  # show_plan has printed why
        show_table(risk_profile.risk_table(plan, ()), out)
        return
    risks = planning.risk(plan)
    show_table(risk_profile.risk_table(plan, risks), out)
    out.print(max(risks, key=lambda risk: risk.advantage).odds)
    out.print(f"{risk_profile.ODDS}\n{risk_profile.EXCESS}\n", style="dim")


def show_comparison(plans: Sequence[Plan], out: Console) -> None:
    """Several plans for the same budgets, side by side."""
    show_table(display.comparison_table(plans), out)
    if not has_small_cells(plans[0].groups):
        out.print(of_unit(display.INFLUENCE, plans[0].unit) + "\n", style="dim")
