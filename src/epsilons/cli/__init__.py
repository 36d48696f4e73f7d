"""The command line. The module of a command is imported when the command is run, and torch only by those that train."""

from __future__ import annotations

import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from .._version import __version__
from ..errors import EpsilonsError, EpsilonsWarning, app_packages, printable

INTERRUPTED = 130
TERMINATED = 75  # EX_TEMPFAIL of sysexits.h: repeat the command
#: Characters of the beginning and of the end of a long message that are shown.
SHOWN = 1000

#: The base of typer's errors about arguments. It is a class of click, which newer versions of typer bundle.
_UsageError: Any = typer.BadParameter.__mro__[2]

# pyarrow then gives free memory back at once, so that it is not held beside the inputs of large tables.
os.environ.setdefault("MIMALLOC_PURGE_DELAY", "0")

_python_showwarning = warnings.showwarning

#: Command -> (its module, the first sentence of its help).
COMMANDS = {
    "init": ("init", "Draft a config for `epsilons train` from your data."),
    "plan": ("plan", "Show what each tier of budgets gives and gets, before any training. Needs no torch."),
    "advise": (
        "plan",
        "Compare the strategies uniform, exclude, scale, mix and sample for your budgets, before any training.",
    ),
    "compare": (
        "plan",
        "Show two or three plans side by side: odds, noise and influence of each tier, and a verdict.",
    ),
    "train": (
        "train",
        "Train under individual budgets: on your data, by a config, or on the digits as a demonstration.",
    ),
    "tune": ("train", "Try settings within the budgets: make a secret number of runs, and keep the best."),
    "report": (
        "results",
        "Write a run's report: a page and its JSON for internal use, and a page and its JSON for release.",
    ),
    "predict": (
        "results",
        "Predict every row of a table with a trained model, and write one row for each, in the same order.",
    ),
    "release": (
        "results",
        "Write the folder to copy: the model, its preprocessing, a model card, the guarantee, and checksums.",
    ),
    "sign": ("results", "Sign a plan, a finished run or a release: who saw these files, in which role, and when."),
    "verify": ("results", "Say who signed a plan, a run or a release, and fail if a byte of it was changed since."),
    "audit": ("audit", "Train once more under a run's plan, with canaries among the records, and test the result."),
    "attack": ("audit", "Measure how well an attacker recognises the training records of each group."),
    "registry": (
        "registry_command",
        "Keep one lifetime budget per person over many runs: whatever is computed from people reserves first, is "
        "charged for what it did, and gives the rest back.",
    ),
    "docs": ("results", "Print a page of the documentation, as Markdown, or the names and titles of all pages."),
    "consent": ("audit", "Who takes part, by a list or a registry."),
}


class _Commands(TyperGroup):
    """The list of commands needs their first sentences alone."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in COMMANDS:
            self.commands[args[0]] = loaded(args[0])
        return super().resolve_command(ctx, args)


def loaded(name: str) -> Any:
    """A command, or a group of commands, of click."""
    with app_packages():
        module = import_module(f".{COMMANDS[name][0]}", __package__)
    alone, function = _typer(), getattr(module, f"{name}_command", None)
    if function is None:
        alone.add_typer(module.app)
    else:
        # rich would print each line of a docstring as a paragraph
        text = "\n\n".join(" ".join(part.split()) for part in function.__doc__.split("\n\n"))
        alone.command(name, help=text, epilog=getattr(module, f"{name.upper()}_EXAMPLES"))(function)
    return typer.main.get_command(alone).commands[name]  # type: ignore[attr-defined]  # a group, by its callback


def _typer(**settings: Any) -> typer.Typer:
    made = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False, **settings)
    made.callback(invoke_without_command=True)(_options)
    return made


def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit


app = _typer(
    cls=_Commands,
    name="epsilons",
    help="Train PyTorch models under individualized differential privacy: every record has its own budget, and no "
    "record's budget is exceeded.",
    epilog="[bold]With a table of your own[/bold]\n\nepsilons init people.csv\n\nepsilons train people.toml\n\n"
    "epsilons report runs/people-1\n\n[bold]Without data[/bold]\n\nepsilons train",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, (_, _sentence) in COMMANDS.items():
    app.command(_name, help=_sentence)(lambda: None)


def main() -> None:
    """Run the command line. Every error becomes one short message and an exit code."""
    os.environ["PYTHONSAFEPATH"] = "1"  # processes that are started here import nothing from the current folder
    warnings.showwarning = _show_warning  # type: ignore[assignment]  # the location is passed on unchanged
    try:
        with app_packages():
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
    text = printable(without_password)
    if len(text) > 2 * SHOWN:  # it names what a damaged file holds
        text = f"{text[:SHOWN]} … {text[-SHOWN:]}"
    print(f"epsilons: {text}", file=sys.stderr)
    sys.exit(code)


def _show_warning(message: Warning | str, category: type[Warning], *location: object) -> None:
    """Print our own warnings in one line without a location; leave other warnings to Python."""
    if issubclass(category, EpsilonsWarning):
        print(f"epsilons: warning: {printable(message)}", file=sys.stderr)
    else:
        _python_showwarning(message, category, *location)  # type: ignore[arg-type]  # passed on unchanged


# -- Ctrl-C, and SIGTERM, by which a scheduler takes a machine away


class Interrupted(EpsilonsError):
    """Training was interrupted. The message says what was charged and how to continue."""

    exit_code = INTERRUPTED

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.exit_code = TERMINATED if isinstance(cause, Terminated) else INTERRUPTED


class Terminated(SystemExit):
    """SIGTERM came. What is open is closed as on Ctrl-C."""


class Termination:
    """What SIGTERM does: while a run makes updates it is noted, for the end of the update; else all stops at once."""

    def __init__(self) -> None:
        self.has_come = self.makes_updates = False

    def __call__(self, *_: object) -> None:
        is_first, self.has_come = not self.has_come, True
        if not (is_first and self.makes_updates):
            raise Terminated(TERMINATED)


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """On SIGTERM, end with an Interrupted."""
    before = signal.signal(signal.SIGTERM, Termination())
    try:
        yield
    except Terminated as error:
        raise Interrupted("terminated, and not by an error. To go on: repeat the command.", error) from None
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
