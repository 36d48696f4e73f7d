"""The command line: one module per command. torch loads only when something is trained."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, Any, NoReturn

import typer

from .._version import __version__
from ..errors import EpsilonsError, EpsilonsWarning
from ..escaping import printable
from . import advise, audit, init, plan, report, train

INTERRUPTED = 130

#: The base of all that typer raises about arguments; it comes from click, which newer typers carry inside themselves.
_UsageError: Any = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="epsilons",
    help="Train PyTorch models under individualized differential privacy: every record has its own budget, and none "
    "is ever spent beyond it.",
    epilog="[bold]With a table of your own[/bold]\n\nepsilons init people.csv\n\nepsilons train people.toml\n\n"
    "epsilons report runs/people-1\n\n[bold]Without[/bold]\n\nepsilons train",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _module in {
    "init": init,
    "plan": plan,
    "advise": advise,
    "train": train,
    "report": report,
    "audit": audit,
}.items():
    # a paragraph of a docstring is one line for the terminal to break
    _help = "\n\n".join(" ".join(part.split()) for part in (_module.command.__doc__ or "").split("\n\n"))
    app.command(_name, help=_help, epilog=_module.EXAMPLES)(_module.command)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; whatever is wrong becomes one short message and its exit code."""
    warnings.showwarning = _show_warning  # type: ignore[assignment]  # the places are passed on as they came
    try:
        code = app(prog_name="epsilons", standalone_mode=False)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        more = f" See: {context.command_path} --help" if context is not None else ""
        _fail(f"{error.format_message().rstrip('.')}.{more}", error.exit_code)
    except EpsilonsError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:  # typer may say so, too
        _fail("interrupted", INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    print(f"epsilons: {printable(message)}", file=sys.stderr)
    sys.exit(code)


def _show_warning(message: Warning | str, category: type[Warning], *place: object) -> None:
    """Our own warnings in one line, without the place in our code that nobody asked for; others are left to Python."""
    if issubclass(category, EpsilonsWarning):
        print(f"epsilons: warning: {printable(message)}", file=sys.stderr)
    else:
        _python_s_own(message, category, *place)  # type: ignore[arg-type]  # passed on as it came


_python_s_own = warnings.showwarning
