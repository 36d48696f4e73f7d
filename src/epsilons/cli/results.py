"""`epsilons report`, `release`, `sign`, `verify`, `predict` and `docs`: what there is to read, to sign and to use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import InputError, RunError, json_text, named, printable
from .options import AsJson, Quiet, console, option, saying

if TYPE_CHECKING:
    from ..ledger.signatures import Signature

REPORT_EXAMPLES = """
[bold]Examples[/bold]

epsilons report runs/first

epsilons report runs/first -o papers/first.html

epsilons report runs/first --json | jq .status

epsilons report runs/people-1 --for-people sheets    # sheets/1-strict.en.html, sheets/1-strict.de.html, …

epsilons report runs/people-1 --annexes annexes      # annexes/gdpr.html, annexes/gdpr.json, annexes/nist.html, …
"""


def report_command(
    run: Annotated[Path, typer.Argument(help="The folder of one run.", show_default=False)],
    output: Annotated[Path | None, option("The internal page. Default: RUN/report.html.", "--output", "-o")] = None,
    as_json: Annotated[bool, option("Print the internal report as JSON, and write no file.", "--json")] = False,
    for_people: Annotated[
        Path | None, option("Write sheets for the people in the data into this folder instead.")
    ] = None,
    annexes: Annotated[Path | None, option("Write annexes for officers into this folder instead.")] = None,
    quiet: Quiet = False,
) -> None:
    """Write a run's report: a page and its JSON for internal use, and a page and its JSON for release.

    The plan is verified and the ledger checked again. The internal files are confidential: they show every budget that
    was chosen. In the files for release, budgets shared by fewer than 20 records are merged, and nothing is shown that
    was measured on private data.

    --for-people writes one sheet for each declared tier, in English and German, for those who chose it: what they
    chose, what it means in 100 guesses, what was done, how to withdraw. Read it before you hand it out: it speaks for
    you. What the config does not state of about.purpose, about.responsible and about.contact is left blank, to be
    written by hand.

    --annexes writes, as pages and as JSON, a data protection impact assessment (GDPR), the topics of NIST SP 800-226, a
    data sheet in the style of the AI Act, and an entry for the registry of deployments. They may leave the house, as
    the files for release may. What the run does not answer is marked for the authors, who complete them.
    """
    from .. import reporting

    if for_people is not None or annexes is not None:
        if as_json or output is not None:
            raise InputError("--for-people and --annexes write no report; leave out --json and --output.")
        for file in _beside_the_report(run, for_people, annexes):
            console(quiet=quiet).print(printable(file), soft_wrap=True)
        return
    if as_json and output is not None:
        raise InputError("--json prints the report and writes no file; give either --json or --output.")
    internal = reporting.report(run)
    if as_json:
        print(reporting.dumps(internal))
        return
    page = output or run / "report.html"
    if page.suffix != ".html":
        raise InputError(f"--output names the internal page, which ends in .html; got {page.name!r}.")
    release = reporting.report(run, release=True)
    public = "DRAFT, the run is not closed: do not publish" if release.content.is_draft else "may be published"
    files = {
        page: (internal, "internal page: CONFIDENTIAL, do not publish"),
        page.with_suffix(".json"): (internal, "the same as JSON: CONFIDENTIAL, do not publish"),
        page.with_name(f"{page.stem}-release.html"): (release, f"page for release: {public}"),
        page.with_name(f"{page.stem}-release.json"): (release, f"the same as JSON: {public}"),
    }
    for file in files:
        reporting.check_replaceable(file)
    for file, (report, description) in files.items():
        report.save(file)
        if not quiet:
            console().print(f"{printable(file)}  {description}", soft_wrap=True)


def _beside_the_report(run: Path, for_people: Path | None, annexes: Path | None) -> Iterator[Path]:
    """Write sheets and annexes."""
    from ..reporting import annex, sheets

    if for_people is not None:
        yield from sheets.save_sheets(run, for_people)
    if annexes is not None:
        yield from annex.save_annexes(run, annexes)


# -- `epsilons release`: the folder with a trained model that may be given away

RELEASE_EXAMPLES = """
[bold]Examples[/bold]

epsilons release runs/people-1                  # writes runs/people-1/release

epsilons predict runs/people-1/release new.csv -o scored.csv

epsilons release runs/people-1 -o model --undeclared    # for a test; marked NOT COVERED
"""


@saying
def release_command(
    run: Annotated[Path, typer.Argument(help="The folder of one finished run.", show_default=False)],
    output: Annotated[Path | None, option("A new folder. Default: RUN/release.", "--output", "-o")] = None,
    undeclared: Annotated[
        bool, option("Release in spite of the reasons against it. Every file then says NOT COVERED.", "--undeclared")
    ] = False,
) -> tuple[str, dict[str, Any]]:
    """Write the folder to copy: the model, its preprocessing, a model card, the guarantee, and checksums.

    `epsilons predict` needs no other file. The folder holds no budget that fewer than 20 share, no score but on data
    that were declared public, no path of this machine, and no key.

    It is refused while a bound, a category list or the classes were read off the data (data.read_off in the config),
    because the guarantee does not cover them, and for runs with a seed, because the seed shows the noise.
    """
    from .. import reporting
    from ..ledger.model_file import read_model_file

    folder = reporting.release(run, output, undeclared)
    reasons = read_model_file(folder).not_covered
    words = (
        f"NOT COVERED by the guarantee, for tests only: {'; '.join(reasons)}"
        if reasons
        else "may be given away, whole, as far as the budgets go; who gets it, those who are responsible decide"
    )
    said = f"{printable(folder)}  {printable(words)}. Its README.md is the model card."
    following = f"Next: epsilons predict {printable(folder)} NEW.csv -o scored.csv"
    return f"{said}\n{following}", {"path": str(folder), "not_covered": reasons}


# -- `epsilons sign` and `verify`: who saw a plan, a run or a release, and whether it is as they saw it

SIGN_EXAMPLES = """
[bold]Examples[/bold]

epsilons sign --new-key officer.pem              # a private key, and its public key to hand out

epsilons sign plan.json --key officer.pem --name "A. Meyer" --role "data protection officer"

epsilons sign runs/people-1/release --key officer.pem --name "A. Meyer" --role "data protection officer"
"""


VERIFY_EXAMPLES = """
[bold]Examples[/bold]

epsilons verify plan.json

epsilons verify runs/people-1 --signer mTlWkqd2cWkBDC0T0XM2l1m0ZFkpvgd8CAoIRkHwMlE=
"""

_PATH = "plan.json, the folder of a run, or a release."


@saying
def sign_command(
    path: Annotated[Path | None, typer.Argument(help=_PATH, show_default=False)] = None,
    key: Annotated[Path | None, option("Your private Ed25519 key, as PEM without a password.")] = None,
    name: Annotated[str, option("Who you are.")] = "",
    role: Annotated[str, option("As what you sign.")] = "",
    new_key: Annotated[Path | None, option("Make a private key in this new file, which only you can read.")] = None,
) -> tuple[str, dict[str, Any]]:
    """Sign a plan, a finished run or a release: who saw these files, in which role, and when.

    The signature is a file beside the plan, or in the folder, that ends in .sig. It holds the SHA-256 of all that was
    seen: of a plan its file; of a run plan.json, run.json, ledger, metrics, audit, attack, model and features; of a
    release every file. Several people can sign. Audit a run before it is signed: that changes it. An attack
    leaves a signed run as it is, and its report does not show it.

    A run keeps the signatures of a plan if it is trained under its file: epsilons train CONFIG --plan plan.json. With
    privacy.signed_by = ["PUBLIC KEY"] in the config, train refuses any plan that is not signed with this key.
    """
    from ..ledger import signatures

    said, values = "", {}
    if new_key is not None:
        public = signatures.new_key(new_key)
        values = {"public_key": public, "fingerprint": signatures.fingerprint(public)}
        said = f"{printable(new_key)}  keep it secret\npublic key   {public}\nfingerprint  {values['fingerprint']}"
        if path is None:
            return said, values
    key = key or new_key
    if path is None or key is None or not (name.strip() and role.strip()):
        raise InputError("Say what you sign, and who you are: epsilons sign PATH --key FILE --name NAME --role ROLE")
    signed = signatures.sign(path, key, name.strip(), role.strip())
    said += f"\n{printable(signed)}.{_of_numbers(signed)}\n{printable(signed.file)}  the signature, to keep and to copy"
    return said.lstrip(), values | {"signature": str(signed.file)}


def _of_numbers(signed: Signature) -> str:
    """A line with the digest of the plan that was seen, as its page shows it; "" without one."""
    digest = signed.values.get("plan")
    return (
        f"\n{printable(digest)}  digest of the plan's numbers, as on its page and in the ledger; internal"
        if digest
        else ""
    )


def verify_command(
    path: Annotated[Path, typer.Argument(help=_PATH, show_default=False)],
    signer: Annotated[list[str] | None, option("A public key, fingerprint or PEM file: who must have signed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say who signed a plan, a run or a release, and fail if a byte of it was changed since.

    The key is proven. Name and role are what its holder wrote: compare the fingerprint with one that you know, or give
    it with --signer. Of a run, also those are named who signed its plan before the training.
    """
    from ..ledger import signatures

    given, before = signatures.signatures(path), signatures.before(path)
    if as_json:
        print(json_text([{**one.values, "wrong": one.wrong} for one in (*given, *before)]))
    else:
        for one in (*given, *before):
            console().print(f"{printable(one)}.{_of_numbers(one)}", soft_wrap=True)
    if not given and not before:
        raise RunError(
            f"Nobody signed {path}: it has no file that ends in {signatures.SUFFIX}. A run keeps the signatures of a "
            "plan only if it is trained under its file: epsilons train CONFIG --plan plan.json."
        )
    signatures.check_signed((*given, *before), [], path)
    signatures.check_signed(given, [signatures.signer(one) for one in signer or ()], path)


# -- `epsilons predict`: the predictions of a trained model for every row of a table

PREDICT_EXAMPLES = """
[bold]Examples[/bold]

epsilons predict runs/people-1 new.csv -o scored.csv

epsilons predict release new.parquet -o scored.parquet --keep id   # a copied release folder

[bold]From Python[/bold]

epsilons.Predictor.load("release").predict("new.csv").to_table()
"""


def predict_command(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or a release folder.", show_default=False)],
    table: Annotated[
        Path,
        typer.Argument(help="A .csv, .tsv or .parquet table; for models of arrays an .npy file.", show_default=False),
    ],
    output: Annotated[Path, option("The .csv or .parquet file to write.", "--output", "-o")],
    keep: Annotated[list[str] | None, option("Copy this column into the output. May be repeated.", "--keep")] = None,
    bad_rows: Annotated[Literal["refuse", "mark"], option("What to do about unreadable cells.")] = "refuse",
    device: Annotated[str, option("cpu, cuda, …, or auto for a GPU if there is one.")] = "cpu",
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Predict every row of a table with a trained model, and write one row for each, in the same order.

    The preprocessing of training is applied to each row: bounds, categories, texts, fixed features. Columns may be in
    any order and others are ignored; a missing column is named. Empty cells and unknown categories count as in
    training. The output has a column `prediction`, and one `probability_CLASS` per class.

    With --bad-rows mark, rows with a cell that is no number or date are not refused: they have no prediction, and the
    reason in a last column, `not_predicted`; the exit code is then 4. In a .csv file, an apostrophe is written before
    texts that a spreadsheet would take for a formula.

    A file may be larger than the memory. Predictions about people are confidential: only you may read the file.
    """
    if output.suffix not in (".csv", ".parquet"):
        raise InputError(f"--output must end in .csv or .parquet, got {output.name!r}.")
    if output.exists():
        raise InputError(f"{output} exists already. Choose another name with -o, or remove it.")
    from ..training.predicting import Predictor  # torch is imported here
    from ..training.predicting.predictor import write

    predictor = Predictor.load(run, device=device)
    for reason in predictor.description.not_covered:
        console(stderr=True, quiet=quiet).print(f"NOT COVERED by the guarantee: {printable(reason)}", soft_wrap=True)
    rows, bad = write(predictor, table, output, list(dict.fromkeys(keep or [])), quiet, bad_rows == "mark")
    words = f"{rows - bad:,} rows predicted in {printable(output)}" + f", and {bad:,} not" * bool(bad)
    console(quiet=quiet or as_json).print(words, soft_wrap=True)
    if as_json:
        print(json_text({"said": words, "file": str(output), "predicted": rows - bad, "not_predicted": bad}))
    return 4 if bad else 0


# -- `epsilons docs`: the pages of the documentation, which messages name

DOCS_EXAMPLES = """
[bold]Examples[/bold]

epsilons docs

epsilons docs concepts
"""


def pages() -> dict[str, Path]:
    """The pages by name: of an installed package those in epsilons/docs, of a checkout those in docs."""
    package = Path(__file__).parents[1]
    folder = package / "docs" if (package / "docs").is_dir() else package.parents[1] / "docs"
    return {file.stem: file for file in sorted([*folder.glob("*.md"), *folder.glob("doors/*.md")])}


def docs_command(
    page: Annotated[str | None, typer.Argument(help="A page. Without it, all are listed.")] = None,
    schemas: Annotated[bool, option("Print the JSON Schema of what each command prints with --json.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print a page of the documentation, as Markdown, or the names and titles of all pages."""
    if schemas:
        print((Path(__file__).parents[1] / "reporting" / "schemas.json").read_text(encoding="utf-8"), end="")
        return
    texts = {name: file.read_text(encoding="utf-8") for name, file in pages().items()}
    titles = {name: next(line for line in text.split("\n") if line[:2] == "# ")[2:] for name, text in texts.items()}
    if page is not None:
        text = named(texts, page, "page of the documentation")
        if page == "config":
            from ..configs.config import config_keys

            text += config_keys()
        print(json_text({"page": page, "markdown": text}) if as_json else text)
        return
    lines = [f"{name:<24} {title}" for name, title in titles.items()]
    print(json_text({"pages": titles}) if as_json else "\n".join(lines))
