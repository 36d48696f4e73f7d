"""A config file as it is read, with the settings of the command line, and what is wrong with it in a sentence."""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from ..errors import UNPRINTABLE, InputError, PlanError, not_too_deep
from ..planning import plan
from .config import Config

# -- `--set section.key=value`: keys of a config that are given on the command line

_FORM = (
    'Settings are written section.key=value, with the value as in TOML: --set training.lr=0.1 --set model.name="mlp"'
)
#: Keys of which a config has one: setting it replaces the other.
ALTERNATIVES = {"training.steps": "epochs", "training.epochs": "steps"}


@dataclass(frozen=True)
class Setting:
    """One key of a config, from the section on, and its value."""

    path: tuple[str, ...]
    value: Any

    @property
    def name(self) -> str:
        """The key as it is written in a config."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """The flag that gives this setting, for a shell."""
        return "--set " + shlex.quote(f"{'.'.join(map(toml_key, self.path))}={toml(self.value)}")


def parse_settings(texts: Sequence[str]) -> tuple[Setting, ...]:
    """Settings from section.key=value. A value that is not TOML is a text, so that quotes may be left out.

    >>> parse_settings(["training.lr=0.1", "model.name=mlp", 'budgets.shares."1"=0.5'])[1:]
    (Setting(path=('model', 'name'), value='mlp'), Setting(path=('budgets', 'shares', '1'), value=0.5))

    Raises InputError for another form.
    """
    return tuple(map(_parsed, texts))


#: Environment variables that begin so set keys of a config.
PREFIX = "EPSILONS_SET_"


def environment_settings() -> tuple[Setting, ...]:
    """Settings from EPSILONS_SET_SECTION__KEY=value, in the order of their names. Raises InputError for another form.

    Section and key are written in small letters in the config; further parts as they are.
    """
    found = []
    for name, value in sorted(os.environ.items()):
        section, *keys = name.removeprefix(PREFIX).split("__")
        if name.startswith(PREFIX) and not (section and keys and all(keys) and value.strip()):
            raise InputError(f"{name} is not in the form of {PREFIX}TRAINING__LR=0.1, for training.lr in a config.")
        if name.startswith(PREFIX):
            found.append(Setting((section.lower(), keys[0].lower(), *keys[1:]), _value(value.strip())))
    return tuple(found)


def with_settings(values: Mapping[str, Any], settings: Sequence[Setting]) -> dict[str, Any]:
    """The values of a config with these settings; a later setting of one key counts. Raises InputError."""
    changed = copy.deepcopy(dict(values))
    for setting in settings:
        *sections, key = setting.path
        inner: Any = changed
        for section in sections:
            inner = inner.setdefault(section, {})
            if not isinstance(inner, dict):
                raise InputError(f"--set {setting.name}: {section!r} is a value in this config, and holds no keys.")
        inner[key] = setting.value
        inner.pop(ALTERNATIVES.get(setting.name), None)
    return changed


def recorded(settings: Sequence[Setting]) -> dict[str, Any]:
    """The settings as JSON values, for run.json."""
    values: dict[str, Any] = json.loads(json.dumps({one.name: one.value for one in settings}, default=str))
    return values


def _parsed(text: str) -> Setting:
    key, equals, written = text.partition("=")
    path = _path(key) if equals else None
    if path is None or not written.strip():
        raise InputError(f"{_FORM}; got {text!r}.")
    return Setting(path, _value(written.strip()))


def _path(key: str) -> tuple[str, ...] | None:
    """The parts of a dotted key; None if it is no key of TOML."""
    try:
        inner: Any = tomllib.loads(f"{key.strip()} = 0") if "\n" not in key else None
    except tomllib.TOMLDecodeError:
        return None
    path = []
    while isinstance(inner, dict) and len(inner) == 1:
        ((name, inner),) = inner.items()
        path.append(name)
    return tuple(path) if inner == 0 else None


def _value(written: str) -> Any:
    try:
        values = tomllib.loads(f"value = {written}")
    except tomllib.TOMLDecodeError:
        return written
    return values["value"] if set(values) == {"value"} else written


def toml_key(name: str) -> str:
    """A part of a key as TOML."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else toml(name)


def toml(value: Any) -> str:
    """A value as TOML, which has one escape for a character beyond 16 bits, where JSON has two."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_key(name)} = {toml(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return UNPRINTABLE.sub(lambda match: f"\\U{ord(match[0]):08x}", text)
    return str(value)


def strategy_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options. Raises PlanError if one of them is a parameter of every plan."""
    taken = sorted(set(options) & set(inspect.signature(plan).parameters))
    if taken:
        raise PlanError(
            f"{taken[0]!r} is not an option of a strategy. On the command line it has a flag of its own, in a config "
            "a key of its own."
        )
    return dict(options)


# -- A config file as it is read, with the settings of the command line, and what is wrong with it in a sentence


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
