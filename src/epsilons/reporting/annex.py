"""Annexes for officers: the questions of a form, answered from the report for release. A form is a file in `annexes/`.

    title = "…"; form = "which version of what is followed"; note = "what the annex is not"
    [[part]]
    title = "…"
    [[part.question]]
    asks = "…"; source = "GDPR Art. 35(7)(a)"
    from = ["about.purpose"]   # keys of `facts`; the question is open if none of them has a value
    says = "…"                 # what holds for every run: an answer if there is no `from`, else shown before it
    authors = "…"              # what the authors have to write where it is open
    field = "basic.name"       # only in a form with its own JSON: the path of the answer in it; [] is a list of one

An annex leaves the house. Everything in it comes from the report's version for release, so it keeps to the rule of 20,
from texts of the caller, or from names of columns, which a model card shows too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .._version import __version__
from ..accounting import Accountant
from ..core.disclosure import SMALLEST_SHOWN
from ..core.files import UNWRITTEN, as_json, write_json, write_text
from ..errors import RunError
from ..ledger import model_file
from ..ledger.run_folder import now
from ..planning import display, risk_profile
from .content import Content, Group, make_content
from .html import annex_page
from .load_run import RunRecord, load_run
from .population import Accuracy

FORMS = Path(__file__).parent / "annexes"
OPEN = "FOR THE AUTHORS"
#: Lines of the guarantee, by what is in each.
_LINES = {
    "words": "In words: ",
    "public": "Public, not protected: ",
    "not_covered": "Not covered: ",
    "formal": "For every set S",
    "accounting": "ε is an upper bound",
}
_COLUMNS = {"numeric": "numbers", "dates": "dates", "categorical": "categories", "free_text": "texts"}


@dataclass(frozen=True)
class Answer:
    """A question with its answer, () if it is open; `for_the_authors` then says what to write."""

    asks: str
    source: str
    answer: tuple[Any, ...]
    for_the_authors: str | None
    field: str | None = field(default=None, metadata=UNWRITTEN)


def save_annexes(path: str | Path, folder: Path, accountant: Accountant | None = None) -> list[Path]:
    """Write each annex of a run as NAME.html and NAME.json. No file is replaced, because authors complete them.

    Raises RunError if a file exists, PromiseError if the run or its plan was changed after it was signed, and what
    `report` raises.
    """
    files = {folder / name: content for name, content in annexes(load_run(path, accountant)).items()}
    if taken := [file for file in files if file.exists()]:
        raise RunError(f"{taken[0]} exists already. Authors complete annexes, so none is replaced: name a new folder.")
    return [
        write_text(file, content, release=True) if isinstance(content, str) else write_json(file, content, release=True)
        for file, content in files.items()
    ]


def annexes(record: RunRecord) -> dict[str, Any]:
    """Each form as a page and as JSON, by the name of its file."""
    known, found = facts(record), dict[str, Any]()
    for form in sorted(FORMS.glob("*.toml")):
        values = tomllib.loads(form.read_text(encoding="utf-8"))
        parts = {part["title"]: [answered(one, known) for one in part["question"]] for part in values["part"]}
        heads = {name: values[name] for name in ("title", "form", "note")} | {"date": now()[:10]}
        found[f"{form.stem}.html"] = annex_page(heads, parts)
        found[f"{form.stem}.json"] = _as_json(form.stem, heads, parts)
    return found


def facts(record: RunRecord) -> dict[str, Any]:
    """What answers questions, by key: the fields of the report for release, and what follows from them."""
    content = make_content(record, release=True)
    rows, records, lines = content.groups, record.plan.records, content.guarantee.split("\n")
    return vars(content) | {
        "summary": [
            text.replace("The first table lists the", "Listed further below are the") for text in content.summary
        ],
        "guarantee": {name: [line for line in lines if mark in line] for name, mark in _LINES.items()},
        "rows": [_row(group, content) for group in rows],
        "records": records if records >= SMALLEST_SHOWN else None,
        "trained_on": f"Trained on {records:,} {content.unit.unit}s." if records >= SMALLEST_SHOWN else None,
        "epsilon": _most([group.at_most for group in rows]),
        "delta": _most([group.delta for group in rows]),
        "spends": content.suppressed.get("epsilon_spent", "").replace(
            "Suppressed in this version.", "The exact spends are not shown."
        ),
        "simulated": "The budgets are SIMULATED: they were assigned at random, not chosen." * content.simulated,
        "held_out": list(content.tested[:1]),
        "served_worst": content.accuracy and content.accuracy.served_worst,
        "signatures": [f"{one.in_words(str(one.values.get('date'))[:10])}." for one in record.signed],
        "scores": list(_scores(content)),
        "columns": list(_columns(record.path)),
    }


def _most(values: Sequence[float | None]) -> float | None:
    """The largest; None if the report does not show one of them."""
    shown = [value for value in values if value is not None]
    return max(shown) if len(shown) == len(values) else None


def answered(question: Mapping[str, Any], known: Mapping[str, Any]) -> Answer:
    """A question of a form, with what the facts say about it. Raises KeyError or AttributeError for an unknown key."""
    keys, says = question.get("from", ()), question.get("says")
    found = tuple(value for key in keys for value in _values(known, key, several=len(keys) > 1))
    if says is not None and (found or not keys):
        found = (says, *found)
    authors = None if found else question.get("authors", "Not stated in this run.")
    return Answer(question["asks"], question["source"], found, authors, question.get("field"))


def _values(known: Mapping[str, Any], key: str, several: bool) -> Iterator[Any]:
    """The values under a key; none where there is nothing. A number stays one.

    several  True if the question has other keys: what the caller stated then begins with its name
    """
    first, *rest = key.split(".")
    value = known[first]
    for name in rest:
        is_named = isinstance(value, Mapping) or (several and first == "about")
        value = value.get(name) if isinstance(value, Mapping) else value and getattr(value, name)
        value = f"{name.replace('_', ' ')}: {value}" if is_named and isinstance(value, str) else value
    if isinstance(value, Mapping):
        value = [f"{name}: {f'{one:,.6g}' if isinstance(one, float) else one}" for name, one in value.items()]
    elif not isinstance(value, list | tuple):
        value = [value]
    yield from (one if isinstance(one, int | float) else str(one) for one in value if one not in (None, ""))


def _row(group: Group, content: Content) -> str:
    """A row of the report's first table, in words."""
    unit, few = content.unit.unit, f"fewer than {SMALLEST_SHOWN}"
    count = (
        None if "records" in content.suppressed else f"{few if group.records is None else f'{group.records:,}'} {unit}s"
    )
    spent = None
    if group.epsilon_spent is not None and group.epsilon is not None:
        spent = f"certified for the whole plan: {display.rounded_spend(group.epsilon_spent, group.epsilon)}"
    delta = None if group.delta is None else f"δ\u00a0=\u00a0{group.delta:g}"
    right = group.right_guesses
    odds = None if right is None else f"right guesses {group.odds_of}: {risk_profile.limit_of(right)}"
    odds = f"right guesses {group.odds_of}: {group.bounds}" if group.bounds else odds
    name = f"ε {group.label}" if group.merged else f"ε\u00a0=\u00a0{group.label}"
    tier = f" (“{group.tier}”)" if group.tier else ""
    is_merged = group.merged and group.odds_of == "by the promise"
    why = f"merged because {few} {unit}s share a budget in it" if is_merged else None
    return f"{name}{tier}: {'; '.join(filter(None, (count, why, delta, spent, odds)))}."


def _scores(content: Content) -> Iterator[str]:
    """Scores on test data that were declared public, as far as the report for release shows them."""
    found = content.accuracy
    if found is not None:
        overall = replace(found.overall, label="all test data, declared public")
        yield from (_score(one) for one in (overall, *found.classes, *found.groups) if one.accuracy is not None)
        if found.errors is not None:
            yield f"mean absolute error {found.errors.mean_absolute_error:.4g}, RMSE {found.errors.rmse:.4g}"


def _score(one: Accuracy) -> str:
    ends = " to ".join(f"{100 * end:.1f}" for end in (one.low, one.high) if end is not None)
    return f"{one.label}: accuracy {100 * (one.accuracy or 0):.1f} %" + f" (95 % interval {ends} %)" * bool(ends)


def _columns(path: Path) -> Iterator[str]:
    """Names of the model's input columns and of its target, as its card shows them."""
    if (path / model_file.FILE).is_file():
        file = model_file.read_model_file(path)
        rules = file.inputs.features if isinstance(file.inputs, model_file.TableInputs) else None
        for kind, what in _COLUMNS.items() if rules else ():
            if names := list(getattr(rules, kind)):
                yield f"{what}: {', '.join(names)}"
        if file.outputs.target:
            yield f"target: {file.outputs.target}"


def _as_json(name: str, heads: Mapping[str, str], parts: Mapping[str, list[Answer]]) -> dict[str, Any]:
    """The JSON that the form prescribes, or questions and answers."""
    answers = [answer for part in parts.values() for answer in part]
    if answers[0].field is not None:
        return _entry(answers)
    about = {"schema": 1, "document": "epsilons annex", "annex": name, "epsilons_version": __version__, **heads}
    texts = [{"part": part, **as_json(one)} for part, found in parts.items() for one in found]
    return about | {"open": sum(not one.answer for one in answers), "questions": texts}


def _entry(answers: list[Answer]) -> dict[str, Any]:
    """Answers at their fields. Where one is open, the text says so, and the form's own check refuses it."""
    entry: dict[str, Any] = {}
    for one in answers:
        at, value = entry, one.answer[0] if len(one.answer) == 1 else "\n".join(map(str, one.answer))
        *parents, last = str(one.field).split(".")
        for name in parents:
            at = at.setdefault(name[:-2], [{}])[0] if name.endswith("[]") else at.setdefault(name, {})
        value = value if one.answer else f"{OPEN}: {one.for_the_authors}"
        at[last.removesuffix("[]")] = [value] if last.endswith("[]") else value
    return entry
