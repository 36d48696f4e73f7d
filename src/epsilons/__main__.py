"""python -m epsilons"""

from __future__ import annotations

import sys

from .errors import MissingPackageError, app_packages


def main() -> None:
    """Run the command line, which needs the extra `app`."""
    try:
        with app_packages():
            from .cli import main as run
    except MissingPackageError as error:
        print(f"epsilons: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    run()


if __name__ == "__main__":
    main()
