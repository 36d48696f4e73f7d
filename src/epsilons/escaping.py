"""Text from data without control characters, for messages, tables, pages and JSON. And JSON read from files.

Names of tiers, classes, columns and files come from the data. Written raw, an escape sequence could recolour or
overwrite what a terminal shows, and a bidirectional override could turn a name around. Messages, tables and pages pass
such text through `printable`. JSON keeps the text itself, with JSON's escapes.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

#: Control (Cc) and format characters (Cf), line and paragraph separators, lone surrogates. The two joiners U+200C and
#: U+200D are allowed: some scripts need them, and they move no other character.
UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u2064\u2066-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)

#: The deepest nesting of what is read from a file. Python's own limit would end in a RecursionError anywhere later.
DEEPEST = 100


def printable(text: object) -> str:
    r"""Return the text in one line, with every control character replaced by its escape.

    >>> printable("strict\x1b[31m\n")
    'strict\\x1b[31m\\n'
    """
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), str(text))


def json_text(values: Any, indent: int | None = 1, allow_nan: bool = False) -> str:
    r"""JSON text in which every control character is escaped, also those that the standard library leaves raw.

    >>> json_text("\x9b31m ε", indent=None)
    '"\\u009b31m ε"'
    """
    lines = json.dumps(values, indent=indent, ensure_ascii=False, allow_nan=allow_nan).split("\n")
    return "\n".join(UNPRINTABLE.sub(lambda match: json.dumps(match[0])[1:-1], line) for line in lines)


def parsed_json(text: str | bytes, **hooks: Any) -> Any:
    """The value of a JSON text. Raises ValueError if it is none, or nested more than DEEPEST levels deep.

    hooks  as of json.loads

    >>> parsed_json("[" * 101 + "]" * 101)
    Traceback (most recent call last):
    ValueError: nested more than 100 levels deep
    """
    try:
        return not_too_deep(json.loads(text, **hooks))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def not_too_deep(value: Any) -> Any:
    """The same value of dicts, lists and others. Raises ValueError if it is nested more than DEEPEST levels deep.

    Also for NaN and infinity, and for whole numbers that no floating-point number can hold.
    """
    level = [value]
    for _ in range(DEEPEST):
        if any(isinstance(one, int | float) and not abs(one) <= sys.float_info.max for one in level):
            raise ValueError("a number out of range")
        nested = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [part for parts in nested for part in parts]
        if not level:
            return value
    raise ValueError(f"nested more than {DEEPEST} levels deep")
