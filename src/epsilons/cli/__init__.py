"""The command line: one module per command. torch loads only when something is trained."""

from __future__ import annotations

import sys

import typer

from ..errors import EpsilonsError
from . import advise, plan, train

app = typer.Typer(
    name="epsilons",
    help="Train PyTorch models under individualized differential privacy: every record has its own budget, and none "
    "is ever spent beyond it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("plan", epilog=plan.EXAMPLES)(plan.command)
app.command("advise", epilog=advise.EXAMPLES)(advise.command)
app.command("train", epilog=train.EXAMPLES)(train.command)


def main() -> None:
    """Run the command line; errors raised on purpose become one short message and their exit code."""
    try:
        app()
    except EpsilonsError as error:
        print(f"epsilons: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("epsilons: interrupted", file=sys.stderr)
        sys.exit(130)
