"""Digests of small runs at fixed keys, to show that a change of the code's structure changes no bit.

    python -m tests.bits --record       # before: writes tests/golden/bits.json
    python -m tests.bits                # after: compares; exit code 1 if anything differs
    python -m tests.bits --only registry --only "fit scale ghost"

Cases use what the public packages export, and the command line, so modules can move. Each entry of a case is one
digest, so a difference says what differs. Sums of floats depend on the processor and on the versions of libraries: the
file states those that it was recorded with, and `tests/test_bits.py` skips elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import logging
import os
import platform
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import epsilons
from tests import program
from tests.options import fit_flat, make_flat

RECORDED = Path(__file__).resolve().parent / "golden" / "bits.json"
KEY = bytes(range(32))
#: Fields of JSON documents and of ledgers' lines that differ between two equal runs, wherever they are nested.
VOLATILE = {
    "started", "ended", "date", "time", "seconds", "period",  # times
    "folder", "run_dir", "path",  # paths
    "versions", "epsilons_version", "threads", "host",  # the machine, and what is installed
    "file", "prev", "hash",  # a ledger names the file of its key by inode and time, and its chain rests on the name
    "ledger.jsonl", "last line of the ledger", "plan.json",  # hashes in a report: of such a ledger, and of versions
}  # fmt: skip
#: The same in texts, and what stands in their place: dates and times, hashes of ledgers, the durations of a dry run.
_TIME = r"\d{4}-\d\d-\d\d(?: \d\d:\d\d UTC|T[\d:]+Z)?"
VOLATILE_TEXTS = {
    rf"(from )?{_TIME}( to {_TIME})?": "TIME",
    r"\b[0-9a-f]{64}\b": "HASH",
    r"(?s)about .{1,60}? in all": "DURATION",
}
#: Files that differ between two equal runs: matplotlib's ids are random; a registry has an id, and times.
VOLATILE_FILES = {".svg", ".db"}
TEXTS = {".json", ".jsonl", ".html", ".md", ".csv", ".toml"}

Entries = dict[str, Any]


def stable(value: Any) -> Any:
    """The value without volatile fields."""
    if isinstance(value, Mapping):
        return {key: stable(one) for key, one in value.items() if key not in VOLATILE}
    return [stable(one) for one in value] if isinstance(value, list | tuple) else value


def digest(value: Any) -> str:
    """SHA-256 of bytes, of a text without dates, of a model's tensors in order, or of JSON without volatile fields."""
    if isinstance(value, nn.Module):
        return digest(b"".join(name.encode() + bits_of(tensor) for name, tensor in value.state_dict().items()))
    if isinstance(value, np.ndarray):
        return digest(f"{value.dtype} {value.shape}".encode() + value.tobytes())
    if isinstance(value, str):
        for pattern, replacement in VOLATILE_TEXTS.items():
            value = re.sub(pattern, replacement, value)
        return digest(value.encode())
    return hashlib.sha256(value if isinstance(value, bytes) else json.dumps(stable(value)).encode()).hexdigest()


def bits_of(tensor: Tensor) -> bytes:
    return f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.detach().contiguous().numpy().tobytes()


# -- what is compared of a plan, a run, a folder ----------------------------------------------------------------------


def of_plan(plan: epsilons.Plan) -> Entries:
    return {"plan": plan.to_dict(), "plan digest": plan.digest.encode(), "plan summary": plan.summary()}


def of_private(private: epsilons.Private, model: nn.Module, run: Path | None = None) -> Entries:
    """What remains of a run. In memory, its ledger rests on no file, so the hash of the last line is that of all."""
    entries = of_plan(private.plan) | {"weights": model, "updates": private.updates}
    if run is None:
        return entries | {"ledger head": private.ledger.last_line.encode(), "ledger text": str(private.ledger)}
    text = json.dumps(stable(content(run / "ledger.jsonl")))
    for registry_id in re.findall(r'"registry": {"id": "(\w+)"', text):
        text = text.replace(registry_id, "ID")
    return entries | {"ledger": text.encode()}


def files(folder: Path) -> Entries:
    """The content of each file: JSON values, a text, or bytes."""
    entries: Entries = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.suffix not in VOLATILE_FILES:
            entries[f"file {file.relative_to(folder)}"] = content(file)
    return entries


def content(file: Path) -> Any:
    if file.suffix not in TEXTS:
        return file.read_bytes()
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text) if file.suffix == ".json" else text


def of_folder(run: Path) -> Entries:
    """The files of a run's folder, the reports that are made of it, and a release, which no guarantee covers."""
    entries = files(run)
    for version in ("internal", "release"):
        made = epsilons.report(run, release=version == "release")
        entries |= {f"report {version}": made.to_dict(), f"page {version}": made.to_html()}
    released = files(epsilons.release(run, run.with_name("released"), undeclared=True))
    return entries | {f"released {name}": value for name, value in released.items()}


# -- data, budgets, models --------------------------------------------------------------------------------------------


@cache
def digits(records: int = 96) -> tuple[Tensor, Tensor]:
    train = epsilons.data.load("digits", "train")
    return torch.from_numpy(train.inputs[:records]), torch.from_numpy(train.targets[:records])


def images() -> tuple[Tensor, Tensor]:
    return digits()[0].reshape(-1, 1, 8, 8), digits()[1]


def words() -> tuple[Tensor, Tensor]:
    """Sentences of ids, with one id that occurs often."""
    make = torch.Generator().manual_seed(2)
    return torch.randint(20, (96, 7), generator=make) // 2, torch.randint(3, (96,), generator=make)


#: (records,) one epsilon per record, in no order.
EPSILONS = np.random.default_rng(1).permutation(np.resize([1.0, 2.0, 4.0], 96))


@cache
def budgets() -> epsilons.Budgets:
    return epsilons.Budgets(EPSILONS, delta=1e-3)


@cache
def a_plan(strategy: str = "scale", accountant: str = "rdp", steps: int = 5) -> epsilons.Plan:
    return epsilons.plan(budgets(), epsilons.Recipe(steps=steps, batch_size=12, clip_norm=0.5), strategy, accountant)


class LastState(nn.Module):
    """An LSTM over embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(10, 4), nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0][:, -1])


def mlp(inputs: int = 64, classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, classes))


def cnn() -> nn.Module:
    layers = nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(64, 10))


def new(make: Callable[..., Any], *arguments: Any) -> Any:
    """A model with the same initial values at each call."""
    torch.manual_seed(3)
    return make(*arguments)


def performance(engine: str = "auto", largest: int = 5) -> epsilons.Performance:
    """A draw of about twelve records is computed in several physical batches."""
    return epsilons.Performance(engine=engine, max_physical_batch=largest, allocator=False)


def trained(model: nn.Module, data: Any, plan: Any, **options: Any) -> Entries:
    """A loop of one's own, to its end."""
    usual = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.6), "budgets": budgets()}
    with make_flat(model, data=data, plan=plan, **usual | options) as private:
        for inputs, targets in private.batches:
            private.backward(F.cross_entropy(model(inputs), targets, reduction="none"))
            private.step()
    return of_private(private, model, options.get("run_dir"))


# -- the cases --------------------------------------------------------------------------------------------------------


def fitted(strategy: str, engine: str, accountant: str, optimizer: str, folder: Path) -> Entries:
    model, plan = new(mlp), a_plan(strategy, accountant)
    momentum = 0.5 if optimizer == "sgd" else None
    options = {"optimizer": optimizer, "lr": 0.05, "momentum": momentum, "eval_data": digits(50), "eval_every": 2}
    run = fit_flat(
        model, digits(), plan, budgets=budgets(), key=KEY, run_dir=folder / "run", performance=performance(engine),
        device="cpu", **options,
    )  # fmt: skip
    return of_plan(plan) | {"weights": model, "metrics": list(run.metrics)} | of_folder(folder / "run")


def own_loop(kind: str, engine: str, strategy: str, folder: Path) -> Entries:
    model, data = (new(cnn), images()) if kind == "cnn" else (new(LastState), words())
    options = {"optimizer": torch.optim.Adam(model.parameters(), lr=0.01)} if kind == "lstm" else {}
    return trained(model, data, a_plan(strategy), key=KEY, performance=performance(engine), **options)


def seeded(folder: Path) -> Entries:
    """The key is a hash of the seed and of what is computed. The data set is read record by record."""
    data = [(inputs, int(target)) for inputs, target in zip(*digits(), strict=True)]
    return trained(new(mlp), data, a_plan("mix"), seed=5)


def persons(engine: str, folder: Path) -> Entries:
    ids = np.random.default_rng(5).permutation(np.arange(96) ** 2 // 480)
    owners = epsilons.Budgets(np.resize([1.0, 4.0], 20), delta=1e-3, unit="person")
    plan = epsilons.plan(owners, epsilons.Recipe(steps=5, batch_size=6, clip_norm=0.5), accountant="rdp")
    options = {"persons": ids, "rows_per_person": 3, "views": 2, "performance": performance(engine, 12)}
    return trained(new(mlp), digits(), plan, budgets=owners, key=KEY, **options)


def resumed(folder: Path) -> Entries:
    """Two runs of one key: one is interrupted after five of eight updates and resumed, the other is not."""

    def interrupt(private: epsilons.Private) -> None:
        if private.updates == 5:
            raise KeyboardInterrupt

    def train(name: str, **options: Any) -> nn.Module:
        model = new(lambda: nn.Sequential(nn.Linear(64, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 10)))
        fit_flat(
            model, digits(), a_plan("sample", steps=8), budgets=budgets(), key=KEY, run_dir=folder / name, momentum=0.5,
            checkpoint_every=2, performance=performance(), device="cpu", **options,
        )  # fmt: skip
        return model

    with contextlib.suppress(KeyboardInterrupt):
        train("run", callbacks=[interrupt])
    states = sorted(str(file.relative_to(folder)) for file in (folder / "run").rglob("*") if file.is_file())
    model = train("run", resume=True)
    entries = {"files when interrupted": states, "weights": model, "uninterrupted weights": train("whole")}
    assert digest(entries["weights"]) == digest(entries["uninterrupted weights"])
    return entries | of_folder(folder / "run")


def registry(folder: Path) -> Entries:
    """The id of a registry and the times of its events are fresh, so sums of charges are compared, and no event."""
    (folder / "pepper").write_bytes(KEY)
    ids = [f"p{i}" for i in range(40)]
    with epsilons.Registry.create(f"sqlite:///{folder}/people.db", pepper=folder / "pepper") as made:
        made.enrol(ids, [1.0, 3.0] * 20)
        accounts = made.account(ids)
        charged = accounts.budgets(0.5)
        plan = epsilons.plan(charged, epsilons.Recipe(steps=8, batch_size=8, clip_norm=1.0), accountant="filter")
        reservation = made.reserve("one", plan, accounts, budgets=charged)
        options = {"persons": ids, "reservation": reservation, "run_dir": folder / "run", "key": KEY}
        entries = trained(new(mlp), digits(40), plan, budgets=charged, **options)
        made.withdraw(ids[:3])
        after = made.account(ids)
        return entries | {"spent": after.spent, "used": after.used_share, "verdict": str(made.verify())}


#: A config of two tiers, with every value that differs from `tests/program.py`.
TIERS = {
    "[data]": "[data]\nread_off = []",
    "[budgets]": "[budgets]\ntiers = { strict = 1, open = 4 }",
    "lr = 0.2": "lr = 0.2\neval_every = 2\nseeds = [3]",
    '"rdp"': '"pld"',
}
COMMANDS = """
init people.csv -o drafted.toml
plan people.toml
plan people.toml --compare sample --json
plan people.toml --html plan.html
advise --shares 1:50%,4:50% --records 600 --batch-size 60 --steps 20 --accountant rdp
train people.toml --dry-run
train people.toml
report runs/people-1
release runs/people-1 --undeclared -o released
predict released people.csv -o scored.csv
audit runs/people-1 --canaries 40 --groups 0,1 --seed 1
attack runs/people-1 --shadows 8 --jobs 1
"""


def command_line(folder: Path) -> Entries:
    """What each command prints, and the files that are there in the end. The stream of errors has durations."""
    config, entries = program.CONFIG, {}
    for old, replacement in TIERS.items():
        config = config.replace(old, replacement, 1)
    with contextlib.chdir(folder):
        Path("people.csv").write_text(program.people().replace(",1\n", ",strict\n").replace(",4\n", ",open\n"))
        Path("people.toml").write_text(config)
        for line in COMMANDS.strip().splitlines():
            outcome = program.epsilons(*line.split())
            assert outcome.code == 0, f"{line}: {outcome.err}"
            entries[f"output of {line}"] = outcome.out
    return entries | files(folder)


def opacus(mode: str, folder: Path) -> Entries:
    from epsilons.opacus import PrivacyEngine

    model, criterion = new(mlp), nn.CrossEntropyLoss()
    engine = PrivacyEngine(accountant="rdp", most_epochs=4)
    made = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), criterion=criterion,
        data_loader=DataLoader(TensorDataset(*digits()), batch_size=24), target_epsilon=EPSILONS,
        target_delta=1e-3, epochs=2, max_grad_norm=0.7, seed=3, grad_sample_mode=mode,
    )  # fmt: skip
    module, optimizer, loader = made[0], made[1], made[-1]
    criterion = made[2] if len(made) == 4 else criterion
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(module(inputs), targets).backward()
            optimizer.step()
    engine.close()
    return of_private(loader.private, model)


def hugging_face(folder: Path) -> Entries:
    import transformers

    from epsilons.huggingface import PrivateTrainer

    sizes = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_labels": 3}
    config = transformers.BertConfig(num_attention_heads=2, **sizes)
    model = new(transformers.BertForSequenceClassification, config)
    rows = [{"input_ids": ids, "labels": label} for ids, label in zip(*words(), strict=True)]
    records = [row | {"epsilon": float(one)} for row, one in zip(rows, EPSILONS, strict=True)]
    arguments = transformers.TrainingArguments(
        str(folder / "hf"), per_device_train_batch_size=8, gradient_accumulation_steps=2, num_train_epochs=1,
        learning_rate=1e-3, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    options = {"budgets": "epsilon", "delta": 1e-3, "accountant": "rdp", "private_seed": 5}
    trainer = PrivateTrainer(model, arguments, train_dataset=records, **options)
    trainer.train()
    return of_private(trainer.private, model, next(folder.rglob("ledger.jsonl")).parent)


def lightning(folder: Path) -> Entries:
    import lightning as L

    from epsilons.lightning import PrivateStrategy

    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.5)

    strategy = PrivateStrategy(
        budgets(), clip_norm=0.5, accountant="rdp", seed=epsilons.Randomness.with_key(KEY), performance=performance()
    )
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    module = new(Module)
    trainer = L.Trainer(strategy=strategy, max_epochs=2, accelerator="cpu", default_root_dir=folder, **quiet)
    trainer.fit(module, DataLoader(TensorDataset(*digits()), batch_size=24))
    return of_private(strategy.private, module)


def scikit_learn(folder: Path) -> Entries:
    from epsilons.sklearn import PrivateClassifier, PrivateRegressor

    (inputs, targets), options = digits(), {"epochs": 2, "batch_size": 24, "accountant": "rdp", "bounds": (0, 1)}
    X, y = inputs.numpy(), targets.numpy()
    classifier = PrivateClassifier(**options, classes=tuple(range(10)), hidden=(4,), random_state=3)
    regressor = PrivateRegressor(**options, target_bounds=(0, 9), random_state=4)
    with warnings.catch_warnings(action="ignore", category=epsilons.errors.EpsilonsWarning):  # the same rows again
        classifier.fit(X, y, epsilon=EPSILONS)
        regressor.fit(X, y, epsilon=EPSILONS)
    predictions = {"probabilities": classifier.predict_proba(X), "predictions": regressor.predict(X)}
    return predictions | {"classifier weights": classifier.module_, "regressor weights": regressor.module_}


def audit(folder: Path) -> Entries:
    result = epsilons.audit(a_plan("sample"), canaries=60, seed=1, performance=performance("ghost"))
    return {"audit": result.to_dict(), "text": str(result)}


def attacked(method: str, folder: Path) -> Entries:
    from epsilons.auditing import membership

    population = epsilons.data.load("digits", "test")
    result = membership.attack(
        model=new(mlp), dataset=digits(), plan=a_plan("sample"), budgets=budgets(), shadows=8, lr=0.5, jobs=1,
        population=(population.inputs[:30], population.targets[:30]), method=method, device="cpu",
    )  # fmt: skip
    return {"attack": result.to_dict(), "text": str(result)}


def several_runs(folder: Path) -> Entries:
    made = epsilons.plan(budgets(), epsilons.Recipe(steps=4, batch_size=12, clip_norm=0.5), accountant="pld", runs=2)
    plans, entries = epsilons.PlanFolder.create(folder / "plan", made), {}
    for number in range(2):
        model = new(mlp)
        run = folder / f"run-{number}"
        fit_flat(model, digits(), plans, budgets=budgets(), seed=5, lr=0.1, run_dir=run, performance=performance())
        entries |= {f"weights of run {number}": model, f"metrics of run {number}": content(run / "ledger.jsonl")[2:]}
    return entries | of_plan(made) | {"runs begun": plans.begun, "slots": sorted(files(folder / "plan"))}


STRATEGIES = ("uniform", "sample", "scale", "scale-arithmetic", "mix", "exclude", "sequential")
ENGINES = ("ghost", "vmap", "loop")
CASES: dict[str, Callable[[Path], Entries]] = {}
for _i, _strategy in enumerate(STRATEGIES):
    for _j, _engine in enumerate(ENGINES):
        _choice = ("pld", "rdp")[(_i + _j) % 2], ("sgd", "adam")[_i % 2]
        CASES[f"fit {_strategy} {_engine}"] = partial(fitted, _strategy, _engine, *_choice)
for _engine, _strategy in zip(ENGINES, ("sample", "scale", "mix"), strict=True):
    CASES |= {f"own loop {kind} {_engine}": partial(own_loop, kind, _engine, _strategy) for kind in ("cnn", "lstm")}
CASES |= {f"persons {engine}": partial(persons, engine) for engine in ENGINES}
CASES |= {f"opacus {mode}": partial(opacus, mode) for mode in ("hooks", "ghost")}
CASES |= {f"attack {method}": partial(attacked, method) for method in ("stacked", "alone")}
SINGLE = seeded, resumed, registry, command_line, hugging_face, lightning, scikit_learn, audit, several_runs
CASES |= {case.__name__.replace("_", " "): case for case in SINGLE}
#: A share of the cases that takes few seconds.
FAST = ("fit scale ghost", "persons vmap", "resumed")


# -- record and compare -----------------------------------------------------------------------------------------------


def environment() -> dict[str, str]:
    """What the bits may depend on."""
    versions = {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
    return versions | {"processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"}


def digests(name: str) -> dict[str, str]:
    """Run one case: in an empty folder, on one thread, with no run counted at home, and lines of one length."""
    threads, settings = torch.get_num_threads(), {"EPSILONS_COUNT_RUNS": "0", "COLUMNS": "100"}
    quiet = patch.dict(os.environ, settings), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO())
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        for one in quiet:
            stack.enter_context(one)
        warnings.simplefilter("ignore")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        return {entry: digest(value) for entry, value in CASES[name](folder).items()}


def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def differences(name: str) -> list[str]:
    """The entries of a case that are not as they were recorded."""
    now, then = digests(name), recorded()["cases"].get(name, {})
    return [entry for entry in then | now if now.get(entry) != then.get(entry)]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare digests of small runs with those that were recorded.")
    parser.add_argument("--record", action="store_true", help="write the digests in place of comparing them")
    parser.add_argument("--only", action="append", choices=list(CASES), metavar="NAME", help="a case; may be repeated")
    options = parser.parse_args()
    names, is_same = options.only or list(CASES), True
    if options.record:
        kept = recorded()["cases"] if options.only and RECORDED.exists() else {}
        cases = kept | {name: digests(name) for name in names}
        RECORDED.write_text(json.dumps({"environment": environment(), "cases": cases}, indent=1) + "\n")
        return 0
    if recorded()["environment"] != environment():
        print(f"recorded with {recorded()['environment']}, and this is {environment()}", file=sys.stderr)
    for name in names:
        wrong = differences(name)
        is_same = is_same and not wrong
        print(f"DIFFERENT {name}: {', '.join(wrong)}" if wrong else f"ok {name}", flush=True)
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
