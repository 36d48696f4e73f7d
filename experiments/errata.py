"""Numbers of the paper that contradict the paper, or its code, each computed from the paper's own numbers.

`python -m experiments.errata` prints them; the words of the page are in texts.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from scipy import stats

from epsilons import SampledGaussian
from epsilons.accounting import ACCOUNTANTS, noise_for

from .comparing import expected, markdown

SHARES = {"a": (0.34, 0.43, 0.23), "b": (0.54, 0.37, 0.09)}
RDP, DELTA = ACCOUNTANTS["rdp"], 1e-5
#: Table 5, and the authors' code: data set -> clip norm, records, batch size, batches of an epoch ⌈N / B⌉, epochs.
DATA = {
    "mnist": (0.2, 60_000, 512, 118, 80),
    "svhn": (0.9, 73_257, 1_024, 72, 30),
    "cifar10": (0.4, 50_000, 1_024, 49, 30),
}


def harmonic(shares: Sequence[float], numbers: Sequence[float]) -> float:
    """The mean of Algorithm 3.

    >>> round(harmonic((0.5, 0.5), (1.0, 3.0)), 2), arithmetic((0.5, 0.5), (1.0, 3.0))
    (1.5, 2.0)
    """
    return 1 / sum(share / number for share, number in zip(shares, numbers, strict=True))


def arithmetic(shares: Sequence[float], numbers: Sequence[float]) -> float:
    return sum(share * number for share, number in zip(shares, numbers, strict=True))


def printed(cell: str, quantity: str) -> list[float]:
    """The numbers of Tables 5 to 7 for a cell, by group."""
    return [row.mean for row in expected("parameters").cells[cell] if row.quantity.startswith(quantity)]


def scale_rows() -> list[list[str]]:
    """The rows of Scale in Table 7: what the paper has, what its own numbers give, what the printed ones spend."""
    rows = []
    for data, (clip, _, _, batches, epochs) in DATA.items():
        for setup, shares in SHARES.items():
            keys = ("noise_scale", "noise_multiplier", "clip_norm")
            (shared,), own, clips = (printed(f"{data}-scale-{setup}", key) for key in keys)
            spent = [_spent(shared * clip / norm, 1 / batches, epochs * batches) for norm in clips]
            where, uses = f"Table 7, {data.upper()}, Scale, setup {setup.upper()}", f"{_list(spent)} of 1, 2, 3"
            if data != "mnist":
                why = f"Printed is the arithmetic mean, {arithmetic(shares, own):.3f}; clip norms have the harmonic one"
                ours = f"{harmonic(shares, own):.3f}"
                rows.append([f"{where}: σ", f"{shared:.3f}", ours, f"{why}. Used together, the groups spend {uses}"])
                continue
            short, right = (_noises(1 / batches, each * batches) for each in (30, epochs))
            rows.append([f"{where}: σ_p", _list(own), _list(right), f"Printed are those of 30 epochs, {_list(short)}"])
            norms = _list([shared * clip / noise for noise in right])
            of_short = _list([harmonic(shares, short) * clip / noise for noise in short])
            why = f"c σ / σ_p with σ = {shared}; with the σ_p of 30 epochs {of_short}"
            rows.append([f"{where}: c_p", _list(clips), norms, f"{why}. Used as printed, the groups spend {uses}"])
    return rows


def numbers() -> dict[str, str]:
    """The numbers of all other entries, by the names that texts.md has for them."""
    found = {"scale": markdown(["where", "the paper has", "by its own numbers", "why"], scale_rows())}
    for data, (_, records, batch, batches, epochs) in DATA.items():
        (noise,), made = printed(f"{data}-dpsgd", "noise_scale"), round(epochs * records / batch)
        found[f"{data}-text"] = f"{noise_for(1.0, batch / records, made, DELTA, RDP):.5f}"
        found[f"{data}-spent"] = f"{_spent(noise, 1 / batches, made):.4f}"
        noises = _noises(1 / batches, epochs * batches)
        found[f"{data}-mean"] = f"{arithmetic(SHARES['a'], noises) / harmonic(SHARES['a'], noises):.3f}"
    for method in ("sample", "scale"):
        for setup in SHARES:
            found[f"tuned-{method}-{setup}"] = f"{printed(f'mnist-{method}-{setup}', 'noise_scale')[0]:.3f}"
    every = [row.mean for rows in expected("parameters").cells.values() for row in rows if "noise" in row.quantity]
    ends = [rows[0] for name, rows in expected("mix").cells.items() if "mix" not in name]
    test = stats.ttest_ind_from_stats(*(x for row in ends for x in (row.mean, row.sd, 10)))
    return found | {
        "largest": f"{max(every)}",
        "iterations": f"{60 * 50_000 / 1_024:.2f}",
        "rounded": f"{70 * 50_000 / 1_024:.2f}",
        "progression": f"{abs(ends[1].mean - ends[0].mean):.2f}",
        "progression-p": f"{test.pvalue:.2f}",
        "target-p": f"{2 * stats.norm.sf(1.84):.3f}",
        "budgets": " and ".join(f"{arithmetic(shares, (1, 2, 3)):.2f}" for shares in SHARES.values()),
        "rate": f"{_spent(2.024, 1 / 118, 9_440):.2f} at q = 1/118 and {_spent(2.024, 2 / 118, 9_440):.2f} at 2/118",
    }


def _noises(rate: float, steps: int) -> list[float]:
    """getNoise for the three budgets."""
    return [noise_for(epsilon, rate, steps, DELTA, RDP) for epsilon in (1.0, 2.0, 3.0)]


def _spent(noise: float, rate: float, steps: int) -> float:
    return RDP([SampledGaussian(rate, noise, steps)], DELTA)


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{one:.3f}" for one in values)


if __name__ == "__main__":
    for name, number in numbers().items():
        print(f"{name}: {number}")
