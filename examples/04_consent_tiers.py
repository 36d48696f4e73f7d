"""A table of people with a tier of consent in a column: the Adult census data, from a config to a report.

    python examples/04_consent_tiers.py [--output consent]

The table is read from EPSILONS_DATA, or from the hub. The tiers are SIMULATED, assigned at random: half of the people
are strict, a third standard, the others open. examples/adult.toml gives the epsilon of each tier. The script then runs
the commands `epsilons train adult.toml` and `epsilons report`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import parquet

TINY = bool(os.environ.get("EPSILONS_TINY"))  # one epoch, as a test
HERE = Path(__file__).parent


def adult() -> pyarrow.Table | None:
    """32,561 people: 14 attributes and `label`, 1 for more than $50,000 a year; None if the data are not available."""
    file = Path(os.environ.get("EPSILONS_DATA", "nowhere")) / "adult-train.parquet"
    if file.is_file():
        return parquet.read_table(file).replace_schema_metadata(None)
    try:
        import datasets

        table = datasets.load_dataset("scikit-learn/adult-census-income", split="train").data.table
    except (ImportError, OSError, ValueError):
        return None
    names = [name.replace(".", "_") for name in table.column_names]
    label = pyarrow.array([int(">50K" in text) for text in table.column("income").to_pylist()])
    return table.rename_columns(names).drop_columns(["income"]).append_column("label", label)


def epsilons(*arguments: object) -> None:
    """Run a command."""
    print("\n$ epsilons", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "epsilons", *map(str, arguments)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="a new folder; by default a temporary one")
    output = parser.parse_args().output
    table = adult()
    if table is None:
        print("skipped: Adult is not on this machine. Set EPSILONS_DATA to a folder with adult-train.parquet.")
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = output or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        tiers = np.random.default_rng(0).choice(
            ["strict", "standard", "open"], size=len(table), p=[1 / 2, 1 / 3, 1 / 6]
        )
        parquet.write_table(table.append_column("tier", pyarrow.array(tiers)), folder / "adult-tiers.parquet")
        config = (HERE / "adult.toml").read_text(encoding="utf-8")
        for strategy in ("uniform", "scale"):  # all at the strictest tier, then each at its own
            text = config.replace('strategy = "scale"', f'strategy = "{strategy}"')
            file = folder / f"{strategy}.toml"
            file.write_text(text.replace("epochs = 5", "epochs = 1") if TINY else text, encoding="utf-8")
            epsilons("train", file, "--run-dir", folder / "runs" / strategy)
        epsilons("report", folder / "runs" / "scale")


if __name__ == "__main__":
    main()
