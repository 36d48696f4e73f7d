"""The command line, one module per command. Only commands that train import torch."""

from __future__ import annotations

import os
import re
import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer

from .._version import __version__
from ..errors import EpsilonsError, EpsilonsWarning, printable
from . import audit, consent_check, docs_command, init, plan, registry_command, results, train

INTERRUPTED = 130

#: The base of typer's errors about arguments. It is a class of click, which newer versions of typer bundle.
_UsageError: Any = typer.BadParameter.__mro__[2]

_python_showwarning = warnings.showwarning

app = typer.Typer(
    name="epsilons",
    help="Train PyTorch models under individualized differential privacy: every record has its own budget, and no "
    "record's budget is exceeded.",
    epilog="[bold]With a table of your own[/bold]\n\nepsilons init people.csv\n\nepsilons train people.toml\n\n"
    "epsilons report runs/people-1\n\n[bold]Without data[/bold]\n\nepsilons train",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _command, _examples in (
    ("init", init.command, init.EXAMPLES),
    ("plan", plan.plan_command, plan.PLAN_EXAMPLES),
    ("advise", plan.advise_command, plan.ADVISE_EXAMPLES),
    ("train", train.command, train.EXAMPLES),
    ("report", results.report_command, results.REPORT_EXAMPLES),
    ("predict", results.predict_command, results.PREDICT_EXAMPLES),
    ("release", results.release_command, results.RELEASE_EXAMPLES),
    ("audit", audit.audit_command, audit.AUDIT_EXAMPLES),
    ("attack", audit.attack_command, audit.ATTACK_EXAMPLES),
    ("docs", docs_command.command, docs_command.EXAMPLES),
):
    # rich would print each line of a docstring as a paragraph
    _help = "\n\n".join(" ".join(part.split()) for part in (_command.__doc__ or "").split("\n\n"))
    app.command(_name, help=_help, epilog=_examples)(_command)
app.add_typer(registry_command.app)
app.add_typer(consent_check.app)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line. Every error becomes one short message and an exit code."""
    os.environ["PYTHONSAFEPATH"] = "1"  # processes that are started here import nothing from the current folder
    warnings.showwarning = _show_warning  # type: ignore[assignment]  # the location is passed on unchanged
    try:
        code = app(prog_name="epsilons", standalone_mode=False)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        see = f" See: {context.command_path} --help" if context is not None else ""
        _fail(f"{error.format_message().rstrip('.')}.{see}", error.exit_code)
    except EpsilonsError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:  # typer also returns this code
        _fail("interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    without_password = re.sub(r"://[^/\s]*@", "://…@", message)  # a URL that an argument repeats
    print(f"epsilons: {printable(without_password)}", file=sys.stderr)
    sys.exit(code)


def _show_warning(message: Warning | str, category: type[Warning], *location: object) -> None:
    """Print our own warnings in one line without a location; leave other warnings to Python."""
    if issubclass(category, EpsilonsWarning):
        print(f"epsilons: warning: {printable(message)}", file=sys.stderr)
    else:
        _python_showwarning(message, category, *location)  # type: ignore[arg-type]  # passed on unchanged
