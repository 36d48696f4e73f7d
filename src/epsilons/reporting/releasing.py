"""Write a release folder: what may be given away of a run, so that others can use its model. No torch in here.

The facts come from the report's version for release, so they keep to the rule of 20. Files are written into a temporary
folder, which gets its name when all of them are whole.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template

from ..accounting import Accountant
from ..core.files import write_bytes
from ..data.arrays import Provenance, in_words
from ..errors import RunError, printable
from ..ledger import model_file
from ..ledger.model_file import ArrayInputs, ImageInputs, ModelFile, read_model_file
from .content import Content, make_content
from .html import template
from .load_run import RunRecord, load_run

# -- The model card and the guarantee of a release, as texts
#
# The card is Markdown with a header in YAML, as the Hugging Face Hub reads it (huggingface.co/docs/hub/model-cards).
# Names of columns and classes come from the config, and are escaped for Markdown.

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
    rules = model.inputs.features
    if rules.free_text and not (is_number or rules.numeric or rules.dates or rules.categorical):
        return "text-classification"
    return "tabular-regression" if is_number else "tabular-classification"


def in_markdown(text: object) -> str:
    """A text as Markdown shows it: in one line, with every mark escaped.

    >>> in_markdown("a|b <b>_x_")
    'a\\\\|b &lt;b&gt;\\\\_x\\\\_'
    """
    escaped = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", escaped)


@cache
def _template(name: str) -> Template:
    filters = {"md": in_markdown, "plain": printable}
    return template(name, filters, autoescape=False, keep_trailing_newline=True)


# -- Write a release folder: what may be given away of a run, so that others can use its model. No torch in here

#: Files of an encoder that are copied: never a pickle, never code.
ENCODER_FILES = (".json", ".txt", ".model", ".safetensors")


def release(
    path: str | Path, folder: str | Path | None = None, undeclared: bool = False, accountant: Accountant | None = None
) -> Path:
    """Write what may be given away of a finished run, and return the folder.

    path        the run's folder, as `epsilons train` or `fit` wrote it
    folder      a new folder; None for `release` in the run's folder
    undeclared  True to release a model that the guarantee does not cover, such as one with bounds that were read off
                the data. Card, guarantee and model.json then say NOT COVERED, and why
    accountant  the function that certified the plan, if it is not one of the library's

    Raises RunError if the run is not finished, its model has values that were read off the data, or the run was seeded,
    and what `report` raises.
    """
    record = load_run(path, accountant)
    model = _finished_model(record)
    reasons = not_covered(record, model)
    if reasons and not undeclared:
        raise RunError(
            f"{path} cannot be released, because the guarantee does not cover it: {'; '.join(reasons)}. Train again "
            "without this, or release it with undeclared=True (--undeclared), marked NOT COVERED."
        )
    target = Path(folder) if folder is not None else record.path / "release"
    if target.exists():
        raise RunError(f"{target} exists already. Remove it, or choose another folder.")
    return _write(target, record, model.model_copy(update={"not_covered": reasons}))


def not_covered(record: RunRecord, model: ModelFile) -> tuple[str, ...]:
    """Why the guarantee does not cover all that a release would hold; empty if it does."""
    entries = [Provenance(origin.column, origin.what, origin.source) for origin in model.undeclared]
    read_off = [entry for entry in entries if entry.source == "read off the data"]
    not_stated = [entry for entry in entries if entry.source != "read off the data"]
    reasons = []
    if read_off:
        reasons.append(f"{in_words(read_off)} were read off the data (data.read_off in the config)")
    if not_stated:
        reasons.append(
            f"it is not stated whether {in_words(not_stated)} were read off the data (data.read_off = [] in the "
            'config says that nothing was; for fit, RunFolder(path, metadata={"provenance": []}))'
        )
    if record.settings.randomness == "seeded":
        reasons.append("the run was seeded, and with the seed the noise can be removed")
    return tuple(reasons)


def _finished_model(record: RunRecord) -> ModelFile:
    """The model.json of a run that has ended. Raises RunError for another run."""
    if record.made is None or record.key_left:
        raise RunError(
            f"The run in {record.path} is not finished, so it is not released. Continue it with --resume, or with "
            "RunFolder(path, resume=True)."
        )
    if not (record.path / model_file.WEIGHTS).is_file():
        raise RunError(
            f"{record.path} has no {model_file.WEIGHTS}, so there is no model to release. `epsilons train` and "
            "`fit` write it; after make_private, save the model yourself."
        )
    return read_model_file(record.path)


def _write(target: Path, record: RunRecord, model: ModelFile) -> Path:
    content = make_content(record, release=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        _fill(temporary, record, model, content)
        model_file.write_sums(temporary)
        os.replace(temporary, target)
    except OSError as error:
        raise RunError(f"{target} cannot be written: {error.strerror or error}. Choose another place.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _fill(folder: Path, record: RunRecord, model: ModelFile, content: Content) -> None:
    weights = (record.path / model_file.WEIGHTS).read_bytes()
    write_bytes(folder / model_file.WEIGHTS, weights, release=True)
    has_encoder = model.fixed_features and _copy_features(record, folder)
    model.write(folder, release=True)
    texts = {
        model_file.CARD: card(content, model, record.plan.unit, has_encoder),
        model_file.GUARANTEE: guarantee(content, model),
    }
    for name, text in texts.items():
        write_bytes(folder / name, text.encode("utf-8"), release=True)


def _copy_features(record: RunRecord, folder: Path) -> bool:
    """Copy the fixed features. True if a local encoder was copied with them: its path stays on this machine."""
    from safetensors import safe_open
    from safetensors.numpy import save

    file = record.path / model_file.FIXED
    with safe_open(file, framework="numpy") as content:
        header: dict[str, str] = dict(content.metadata() or {})
        constants = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118  # it is no dict
    options: dict[str, Any] = json.loads(header.get("options", "{}"))
    encoder = Path(str(options.get("model", "")))
    has_encoder = "model" in options and encoder.is_dir()
    if has_encoder:
        _copy_encoder(encoder, folder / model_file.ENCODER)
        header["options"] = json.dumps({**options, "model": model_file.ENCODER})
    elif encoder.is_absolute():
        raise RunError(f"The encoder of this run is no longer at {encoder}. Restore it, and release again.")
    write_bytes(folder / model_file.FIXED, save(constants, metadata=header), release=True)
    return has_encoder


def _copy_encoder(source: Path, target: Path) -> None:
    target.mkdir()
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in ENCODER_FILES and not file.name.startswith("."):
            shutil.copyfile(file, target / file.name)
