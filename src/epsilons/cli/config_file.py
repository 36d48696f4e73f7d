"""A config file as it is read, with the settings of the command line, and what is wrong with it in a sentence."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from ..errors import InputError
from ..escaping import not_too_deep
from .config import Config
from .settings import Setting, with_settings


def read_config(path: Path, settings: Sequence[Setting] = ()) -> Config:
    """The config in this file, with these settings in place of its own.

    Raises InputError that names the wrong key and the key that may be meant.
    """
    try:
        values = not_too_deep(tomllib.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise InputError(f"No config at {path}. Draft one from your data with: epsilons init DATA.csv") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not TOML: {error}. Draft a config with: epsilons init DATA.csv") from None
    try:
        return Config.model_validate(with_settings(values, settings))
    except ValidationError as error:
        problems = error.errors(include_url=False)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        where = f"{path} with {' '.join(setting.flag for setting in settings)}" if settings else path
        message = f"{_explained(problems[0])}{more}"
        raise InputError(f"{where}: {message}{'' if message.endswith('?') else '.'}") from None


#: What to do about a tier without an epsilon, and about another form of `test_after`.
NO_TIER = ". Write the epsilon of each tier; the names of those that are left out go into budgets.left_out"
LAST_DAY = '. Write the column and the last day of training: test_after = {admitted = ["2024-06-30"]}'


def _explained(problem: Any) -> str:
    """One problem that pydantic found, in a sentence."""
    path = [str(part) for part in problem["loc"]]
    name = ".".join(path) or "the config"
    if problem["type"] == "extra_forbidden":
        section, known = f"[{'.'.join(path[:-1])}]" if len(path) > 1 else "A config", _keys(path[:-1])
        close = difflib.get_close_matches(path[-1], known, n=1) or _elsewhere(path[-1])
        hint = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(known)}"
        return f"{section} has no key {path[-1]!r}; {hint}"
    if problem["type"] == "missing":
        return f"{name} is missing"
    message: str = problem["msg"].removeprefix("Value error, ")
    value = problem["input"]
    if not path:
        return message
    got = f", got {_shortened(value)}" if isinstance(value, str | int | float | bool) else ""
    hint = {"budgets.tiers": NO_TIER, "data.test_after": LAST_DAY}.get(".".join(path[:2]), "")
    return f"{name}: {message[:1].lower()}{message[1:]}{got if ', got ' not in message else ''}{hint}"


def _elsewhere(key: str) -> list[str]:
    """The keys of sections with this name, or with one that is nearly the same."""
    names = {name: section for section in Config.model_fields for name in _keys([section])}
    return [f"{names[close]}.{close}" for close in difflib.get_close_matches(key, names, n=1, cutoff=0.8)]


def _keys(path: list[str]) -> list[str]:
    """The keys of a section, or of a section in a section."""
    model: Any = Config
    for key in path:
        kind = model.model_fields[key].annotation
        model = next((part for part in get_args(kind) if part is not type(None)), kind)
    return list(model.model_fields)


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"
