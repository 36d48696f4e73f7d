"""Three hospitals that keep their data: alone, federated, and pooled, under the same budget for every person.

    python examples/08_federated.py [--seeds 5]

The people are those of the Adult census table (EPSILONS_DATA), divided among the sites by years of school, so that
sites differ in what they see. Their tiers are SIMULATED. Each site trains under its own budgets, plan and ledger, and
the server averages what they send, as FedAvg does; docs/federated.md runs the same sites under Flower. "Alone" makes
the same draws without a server, "pooled" is one run over all people in one place, which federated training avoids.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from pyarrow import parquet
from torch.nn import functional as F

import epsilons
from epsilons.flower import Site

TINY = bool(os.environ.get("EPSILONS_TINY"))  # two rounds, as a test
TIERS, SHARES = (0.5, 1.0, 3.0), (0.5, 0.3, 0.2)
SITES = {"north": (0, 9), "east": (10, 12), "south": (13, 16)}  # years of school
PEOPLE, ROUNDS, DRAWS = 1_500, 2 if TINY else 20, 4
NUMBERS = {"age": 100, "education_num": 16, "hours_per_week": 100, "capital_gain": 1e5, "capital_loss": 1e4}
WORDS = {
    "sex": ["Male"],
    "relationship": ["Husband", "Wife", "Own-child", "Unmarried", "Not-in-family"],
    "marital_status": ["Married-civ-spouse", "Never-married", "Divorced"],
    "occupation": ["Exec-managerial", "Prof-specialty", "Sales", "Craft-repair", "Adm-clerical", "Other-service"],
}


def people() -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    """Inputs with bounds from the census form, targets, years of school."""
    table = parquet.read_table(Path(os.environ.get("EPSILONS_DATA", "nowhere")) / "adult-train.parquet")
    columns = {name: np.array(table[name].to_pylist()) for name in [*NUMBERS, *WORDS, "label"]}
    inputs = [np.clip(columns[name] / most, 0, 1) for name, most in NUMBERS.items()]
    inputs += [columns[name] == word for name, words in WORDS.items() for word in words]
    x = torch.tensor(np.stack(inputs, axis=1), dtype=torch.float32)
    return x, torch.tensor(columns["label"], dtype=torch.long), columns["education_num"]


def model() -> torch.nn.Module:
    linear = torch.nn.Linear(len(NUMBERS) + sum(map(len, WORDS.values())), 2)
    torch.nn.init.zeros_(linear.weight)
    torch.nn.init.zeros_(linear.bias)
    return linear


def losses(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def site(folder: Path, x: torch.Tensor, y: torch.Tensor, epsilon: np.ndarray, draws: int) -> Site:
    budgets = epsilons.Budgets(epsilon, delta=1e-5)
    recipe = epsilons.Recipe(steps=ROUNDS * DRAWS, batch_size=len(x) / 5, clip_norm=1.0)
    plan = epsilons.plan(budgets, recipe, accountant="rdp" if TINY else "pld")
    return Site(folder, model, losses, lambda p: torch.optim.SGD(p, lr=0.5), (x, y), plan, budgets, draws=draws)


def accuracy(weights: dict[str, np.ndarray], x: torch.Tensor, y: torch.Tensor) -> float:
    score = x @ torch.tensor(weights["weight"]).T + torch.tensor(weights["bias"])
    return float((score.argmax(1) == y).float().mean())


def one_seed(seed: int, folder: Path) -> dict[str, float]:
    """Accuracy on people of all three sites who are in none of them."""
    x, y, school = people()
    rng = np.random.default_rng(seed)
    held: dict[str, np.ndarray] = {}
    for name, (least, most) in SITES.items():
        held[name] = rng.permutation(np.flatnonzero((school >= least) & (school <= most)))[: PEOPLE + 1_000]
    epsilon = {name: rng.choice(TIERS, PEOPLE, p=SHARES) for name in SITES}
    test = np.concatenate([rows[PEOPLE:] for rows in held.values()])
    start = {name: p.detach().numpy().copy() for name, p in model().named_parameters()}
    own = {name: rows[:PEOPLE] for name, rows in held.items()}

    found = {}
    for name, rows in own.items():  # all draws in one round
        alone = site(folder / f"{name} alone", x[rows], y[rows], epsilon[name], ROUNDS * DRAWS)
        found[f"{name} alone"] = accuracy(alone.answer("alone", 1, start).weights, x[test], y[test])

    sites = [site(folder / name, x[rows], y[rows], epsilon[name], DRAWS) for name, rows in own.items()]
    weights = start
    for number in range(1, ROUNDS + 1):
        answers = [one.answer("federated", number, weights) for one in sites]
        total = sum(answer.num_examples for answer in answers)
        weights = {name: sum(a.weights[name] * (a.num_examples / total) for a in answers) for name in start}
    found["federated"] = accuracy(weights, x[test], y[test])

    rows, everyone = np.concatenate(list(own.values())), np.concatenate(list(epsilon.values()))
    pooled = site(folder / "pooled", x[rows], y[rows], everyone, ROUNDS * DRAWS)
    found["pooled"] = accuracy(pooled.answer("pooled", 1, start).weights, x[test], y[test])
    found["one class for all"] = max(float((y[test] == k).float().mean()) for k in (0, 1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1 if TINY else 5)
    seeds = parser.parse_args().seeds
    if not (Path(os.environ.get("EPSILONS_DATA", "nowhere")) / "adult-train.parquet").is_file():
        print("skipped: Adult is not on this machine. Set EPSILONS_DATA to a folder with adult-train.parquet.")
        return
    results = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            results.append(one_seed(seed, Path(folder)))
    print("accuracy on people of all sites, in %")
    for name in results[0]:
        values = [100 * result[name] for result in results]
        print(f"{name:>18}: {statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
