"""`--set section.key=value`: keys of a config that are given on the command line."""

from __future__ import annotations

import copy
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, PlanError
from ..escaping import UNPRINTABLE
from ..planning import plan

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
