"""`epsilons sign` and `epsilons verify`: who saw a plan, a run or a release, and whether it is as they saw it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError, RunError, json_text, printable
from ..ledger import signatures
from ..ledger.run_folder import RunFolder
from ..planning import Plan
from .options import AsJson, Quiet, console, option

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


def sign_command(
    path: Annotated[Path | None, typer.Argument(help=_PATH, show_default=False)] = None,
    key: Annotated[Path | None, option("Your private Ed25519 key, as PEM without a password.")] = None,
    name: Annotated[str, option("Who you are.")] = "",
    role: Annotated[str, option("As what you sign.")] = "",
    new_key: Annotated[Path | None, option("Make a private key in this new file, which only you can read.")] = None,
    quiet: Quiet = False,
) -> None:
    """Sign a plan, a finished run or a release: who saw these files, in which role, and when.

    The signature is a file beside the plan, or in the folder, that ends in .sig. It holds the SHA-256 of all that was
    seen: of a plan its file; of a run plan.json, run.json, ledger, metrics, audit, attack, model and features; of a
    release every file. Several people can sign. Audit and attack a run before it is signed: they change it.

    With [privacy] signed_by = ["PUBLIC KEY"] in a config, epsilons train refuses a plan that is not signed with it.
    """
    out = console(quiet=quiet)
    if new_key is not None:
        public = signatures.new_key(new_key)
        out.print(f"{printable(new_key)}  keep it secret\npublic key   {public}", soft_wrap=True)
        out.print(f"fingerprint  {signatures.fingerprint(public)}")
        if path is None:
            return
    key = key or new_key
    if path is None or key is None or not (name.strip() and role.strip()):
        raise InputError("Say what you sign, and who you are: epsilons sign PATH --key FILE --name NAME --role ROLE")
    signed = signatures.sign(path, key, name.strip(), role.strip())
    out.print(f"{printable(signed)}.\n{printable(signed.file)}  the signature, to keep and to copy", soft_wrap=True)


def verify_command(
    path: Annotated[Path, typer.Argument(help=_PATH, show_default=False)],
    signer: Annotated[list[str] | None, option("A public key, or fingerprint, that must have signed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say who signed a plan, a run or a release, and fail if a byte of it was changed since.

    The key is proven. Name and role are what its holder wrote: compare the fingerprint with one that you know, or give
    it with --signer. Of a run, also those are named who signed its plan before the training.
    """
    given, run = signatures.signatures(path), RunFolder(path)
    before = signatures.of_run(run, Plan.load(run.plan)) if run.settings.is_file() else ()
    if as_json:
        print(json_text([{**one.values, "wrong": one.wrong} for one in (*given, *before)]))
    else:
        for one in (*given, *before):
            console().print(f"{printable(one)}.", soft_wrap=True)
    if not given and not before:
        raise RunError(f"Nobody signed {path}: it has no file that ends in {signatures.SUFFIX}.")
    signatures.check_signed((*given, *before), [], path)
    signatures.check_signed(given, signer or [], path)
