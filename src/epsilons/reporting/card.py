"""The model card and the guarantee of a release, as texts.

The card is Markdown with a header in YAML, as the Hugging Face Hub reads it (huggingface.co/docs/hub/model-cards).
Names of columns and classes come from the config, and are escaped for Markdown.
"""

from __future__ import annotations

import re
from functools import cache

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from ..escaping import printable
from ..model_file import ArrayInputs, ImageInputs, ModelFile
from .content import Content

#: Lists of categories and classes longer than this are shortened in the card; model.json has all of them.
MOST_LISTED = 20


def card(content: Content, model: ModelFile, unit: str, has_encoder: bool) -> str:
    """The model card. content: that of the report's version for release; unit: of the plan, "record" or "person"."""
    text = _template("card.md.jinja").render(
        content=content,
        model=model,
        task=task(model),
        unit=unit,
        has_encoder=has_encoder,
        most=MOST_LISTED,
    )
    return re.sub("\n{3,}", "\n\n", text)


def guarantee(content: Content, model: ModelFile) -> str:
    """The guarantee in words, with what it does not cover."""
    return _template("guarantee.txt.jinja").render(content=content, model=model)


def task(model: ModelFile) -> str:
    """The name of the task on the Hugging Face Hub ("pipeline_tag"); "other" if it has none."""
    is_number = model.outputs.kind not in ("classes", "binary")
    if isinstance(model.inputs, ImageInputs):
        return "other" if is_number else "image-classification"
    if isinstance(model.inputs, ArrayInputs):
        return "other"
    if model.inputs.features.free_text and not is_number:
        return "text-classification"
    return "tabular-regression" if is_number else "tabular-classification"


@cache
def _template(name: str) -> Template:
    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"md": in_markdown, "plain": printable}
    return environment.get_template(name)


def in_markdown(text: object) -> str:
    """A text as Markdown shows it: in one line, with every mark escaped.

    >>> in_markdown("a|b <b>_x_")
    'a\\\\|b &lt;b&gt;\\\\_x\\\\_'
    """
    escaped = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", escaped)
