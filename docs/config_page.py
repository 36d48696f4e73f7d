"""The keys of a config file: a hook of mkdocs adds them to config.md; the script prints them."""

import inspect
from typing import Any, get_args

from epsilons.configs.config import Config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by mkdocs with every page."""
    return markdown + config_keys() if page.file.src_uri == "config.md" else markdown


def config_keys() -> str:
    """Every section and key of a config file, as Markdown."""
    lines = []
    for name, field in Config.model_fields.items():
        # A section that may be missing is a union with None.
        section: Any = next(
            (part for part in get_args(field.annotation) if part is not type(None)),
            field.annotation,
        )
        lines += ["", f"## [{name}]", "", inspect.cleandoc(section.__doc__)]
        for key, value in section.model_fields.items():
            lines += ["", f"`{key}`{_default(value)}", f":   {' '.join(value.description.split())}"]
    return "\n".join(lines) + "\n"


def _default(value: Any) -> str:
    if value.is_required():
        return ", required"
    if isinstance(value.default, bool):
        return f", default `{str(value.default).lower()}`"
    return f", default `{value.default}`" if value.default not in (None, [], {}, "") else ""


if __name__ == "__main__":
    print(config_keys(), end="")
