"""Jobs without a person beside them: one line that starts or goes on, however often and wherever it is killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

import program
from epsilons import PlanFolder, cli
from epsilons.cli import registry_command
from epsilons.ledger.ledger import Ledger, read_charges
from epsilons.ledger.run_folder import RunFolder, read_metrics
from epsilons.planning import Plan
from epsilons.registry import Registry, evidence
from epsilons.training import checkpoints
from pages import blocks
from program import CONFIG, change, epsilons, people
from registries import VISITS
from small_runs import lines

URL = "sqlite:///people.db"
STEPS = 150
IDS = [f"zz{i:03d}" for i in range(60)]
TRAIN = ["train", "people.toml", "--run-dir", "runs/one", "--continue"]
JOB = [*TRAIN, "-q"]
CHARGED = [*TRAIN, "--registry", URL, "--share", "0.5", "-q"]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EPSILONS_REGISTRY", raising=False)
    Path("people.csv").write_text(people())
    Path("people.toml").write_text(CONFIG)
    return tmp_path


def job(arguments: list[str], seconds: float | None = None, by: int = signal.SIGKILL) -> int:
    """The exit code of the command in a process that is killed after some seconds; a negative number for a signal."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = 99
        try:
            code = program.epsilons(*arguments).code
        finally:
            os._exit(code)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(pid, by)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def begin_again() -> None:
    """A folder without runs, and, if there is one, with the registry as it was."""
    shutil.rmtree("runs", ignore_errors=True)
    shutil.rmtree("tuning", ignore_errors=True)
    if Path("before.db").exists():
        shutil.copy("before.db", "people.db")


def alone() -> list[str]:
    """One seeded run; its folder."""
    change("steps = 4", f"steps = {STEPS}\nseeds = [7]\ncheckpoint_every = 20\neval_every = 30")
    return ["."]


def counted() -> list[str]:
    """Two seeded runs, which are all that their plan certifies; their folders."""
    change("steps = 4", f"steps = {STEPS}\nseeds = [7, 8]\ncheckpoint_every = 20")
    change('accountant = "rdp"', 'accountant = "rdp"\nruns = 2\nplan_folder = "tuning"')
    return ["seed-7", "seed-8"]


def charged() -> list[str]:
    """A run that is charged to a registry, which takes no seed; its folder."""
    lines = [f"{one},{1 + 3 * (i % 2)}" for i, one in enumerate(IDS)]
    Path("wishes.csv").write_text("id,epsilon\n" + "\n".join(lines) + "\n")
    visits = [f"{one},{20 + i % 50},{('no', 'yes')[i % 3 % 2]}" for i, one in enumerate(IDS * 2)]
    Path("visits.csv").write_text("id,age,label\n" + "\n".join(visits) + "\n")
    Path("people.toml").write_text(VISITS)
    change("steps = 20", f"steps = {STEPS}\ncheckpoint_every = 20")
    epsilons("registry", "create", URL).succeeded()
    epsilons("registry", "import", URL, "wishes.csv", "--person", "id").succeeded()
    shutil.copy("people.db", "before.db")
    return ["."]


def outcome(folders: list[str]) -> list[Any]:
    """What every job must end in: weights, metrics, charges; and that nothing secret or unfinished is left."""
    found: list[Any] = []
    for path in (Path("runs/one") / name for name in folders):
        plan = Plan.load(path / "plan.json")
        assert read_charges(path / "ledger.jsonl", plan) == (STEPS,)
        assert {"secret", "checkpoints", "reservation.json"}.isdisjoint(os.listdir(path))
        metrics = [row["step"] for row in read_metrics(RunFolder(path))]
        found.append((metrics, json.loads((path / "model.json").read_text()), load_file(path / "model.safetensors")))
    if Path("tuning").exists():
        assert PlanFolder("tuning").begun == len(folders)
    if Path("before.db").exists():
        with Registry(URL) as registry:
            assert registry.verify().is_right
            assert registry.account(IDS).used_share == pytest.approx([0.5] * len(IDS), rel=1e-3)
            states = sorted((run.state, run.charged) for run in registry.summary().runs)
            assert [state for state in states if state != ("cancelled", 0)] == [("settled", STEPS)]
    return found


@pytest.mark.parametrize("kind", [alone, counted, charged])
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_a_job_that_is_killed_and_started_again_ends_as_one_that_was_not(kind, kills):
    """Killed at random times, by SIGKILL and by SIGTERM in turn."""
    folders, rng, left = kind(), random.Random(kills), kills
    arguments = CHARGED if kind is charged else JOB
    began = time.monotonic()
    assert job(arguments) == 0
    seconds, expected = time.monotonic() - began, outcome(folders)
    while left > 0:
        begin_again()
        for start in range(1000):
            by = (signal.SIGKILL, signal.SIGTERM)[left % 2]
            code = job(arguments, rng.uniform(0.02, seconds) if left > 0 else None, by)
            if code == 0:
                break
            assert code in ((-signal.SIGKILL,) if by == signal.SIGKILL else (75, -signal.SIGTERM)), (start, code)
            left -= 1
        for (steps, model, weights), (steps_, model_, weights_) in zip(outcome(folders), expected, strict=True):
            assert (steps, model) == (steps_, model_)
            if kind is not charged:  # without a seed, each run has a key of its own
                assert all(torch.equal(weights[name], weights_[name]) for name in weights_)
        done = epsilons(*arguments[:-1])
        assert (done.code, done.err) == (0, "")
        assert done.out == "runs/one is finished: nothing was done.\n"


def dying(target: Any, name: str, when: str) -> Any:
    """This function, which kills the process."""
    function = getattr(target, name)

    def dies(*arguments: Any, **options: Any) -> None:
        if when == "after":
            function(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    return dies


#: where the process is killed -> (object, its function, whether right before or right after)
POINTS = {
    "before the slot is claimed": (PlanFolder, "claim", "before"),
    "after the slot is claimed": (PlanFolder, "claim", "after"),
    "after run.json": (RunFolder, "create", "after"),
    "after the key": (RunFolder, "write_key", "after"),
    "after the ledger": (Ledger, "__init__", "after"),
    "before the ledger": (Ledger, "__init__", "before"),
}


@pytest.mark.parametrize("point", POINTS.values(), ids=POINTS)
def test_a_run_that_is_killed_as_it_begins_costs_no_slot_of_its_plan(point, monkeypatch):
    folders = counted()
    with monkeypatch.context() as patched:
        patched.setattr(*point[:2], dying(*point))
        for _ in range(2):
            assert job(JOB) == -signal.SIGKILL
    epsilons(*JOB).succeeded()
    outcome(folders)


def test_a_run_that_was_moved_away_keeps_its_slot():
    """Otherwise its slot would pay for two runs."""
    counted()
    epsilons(*JOB, "--set", "training.seeds=[7]").succeeded()
    shutil.move("runs/one", "kept")
    epsilons(*JOB, "--set", "training.seeds=[7]").succeeded()
    shutil.move("runs/one", "kept too")
    epsilons(*JOB, "--set", "training.seeds=[7]").is_refused(2, "2 have begun")


def test_sigterm_saves_a_checkpoint_and_ends_with_code_75_and_how_to_go_on(here):
    change("steps = 4", "steps = 200000")
    command = [sys.executable, "-m", "epsilons", *JOB]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    ledger = here / "runs/one/ledger.jsonl"
    deadline = time.monotonic() + 120
    while not (ledger.exists() and ledger.read_text().count('\n"') > 1) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert err.count("\n") == 1
    assert err.startswith("epsilons: terminated after ")
    assert "epsilons train people.toml --run-dir runs/one --continue" in err
    charged = int(err.split()[3].replace(",", ""))
    updates = [line for line in lines(ledger.parent) if line["kind"] == "update"]
    assert len(updates) == charged  # the step was finished
    state = checkpoints.latest(here / "runs/one/checkpoints")
    assert state is not None
    assert state["updates"] == charged


def test_the_folder_of_a_job_is_always_the_same_one():
    change("steps = 4", "steps = 2")
    for _ in range(2):
        epsilons("train", "people.toml", "-q").succeeded()
    epsilons("train", "people.toml", "--continue").succeeded("runs/people-1 is finished: nothing was done.")
    other = epsilons("train", "people.toml", "--continue", "--set", "training.lr=0.3")
    other.succeeded("finished", "trained by another config", "--run-dir")
    values = json.loads(epsilons("train", "people.toml", "--continue", "--json").out)
    assert values == {"path": "runs/people-1", "finished": True}
    epsilons("train", "people.toml", "--continue", "--set", 'output.folder="elsewhere"').succeeded(
        "Saved in elsewhere/"
    )
    assert sorted(os.listdir("runs")) == ["people-1", "people-2"]
    for more in (["--resume"], ["--dry-run"]):
        epsilons("train", "people.toml", "--continue", *more).is_refused(2, "leave out")
    epsilons("train", "--continue").is_refused(2, "--continue")
    Path("notes").mkdir()
    Path("notes/mine.txt").write_text("mine")
    epsilons("train", "people.toml", "--continue", "-o", "notes").is_refused(2, "notes holds no run")


def test_a_job_under_a_saved_plan_keeps_to_it(monkeypatch):
    change("steps = 4", f"steps = {STEPS}\ncheckpoint_every = 20")
    epsilons("plan", "people.toml", "-o", "plan.json", "-q").succeeded()
    arguments = [*JOB, "--plan", "plan.json"]
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "charge", dying(Ledger, "charge", "after"))
        assert job(arguments) == -signal.SIGKILL
    epsilons("plan", "people.toml", "-o", "plan.json", "-q", "--set", "training.batch_size=11").succeeded()
    epsilons(*arguments).is_refused(3, "belongs to another plan")
    epsilons("plan", "people.toml", "-o", "plan.json", "-q").succeeded()
    epsilons(*arguments).succeeded()
    outcome(["."])


def test_a_selection_ends_on_sigterm_and_goes_on():
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # its first use imports much, in every job otherwise
    change("steps = 4", "steps = 700\ncheckpoint_every = 50")
    tuning = ["tune", "people.toml", "--grid", "lr=0.1,1", "--select", "poisson:2", "-q", "-o", "runs/tuned"]
    codes = [job(tuning, 1.0, signal.SIGTERM)]
    while codes[-1] != 0 and len(codes) < 100:
        codes.append(job(tuning, 1.2 * 1.02 ** len(codes), signal.SIGTERM))  # a busy machine gets further, too
    assert {*codes[:-1]} <= {75, -signal.SIGTERM}
    assert codes[-1] == 0
    assert json.loads(Path("runs/tuned/selection.json").read_text())["is_finished"]


# -- keys of a config in the environment ---------------------------------------------------------------------------


def test_keys_of_a_config_are_set_by_the_environment_and_set_wins_over_it(monkeypatch):
    monkeypatch.setenv("EPSILONS_SET_TRAINING__LR", "0.5")
    monkeypatch.setenv("EPSILONS_SET_TRAINING__EPOCHS", "1")  # in the place of steps
    monkeypatch.setenv("EPSILONS_SET_MODEL__OPTIONS__hidden", "[3]")
    monkeypatch.setenv("EPSILONS_SET_PRIVACY__STRATEGY", "uniform")
    epsilons("train", "people.toml", "-o", "one", "--set", "training.lr=0.7", "--set", "training.momentum=0.5")
    found = RunFolder(Path("one")).read_settings()["metadata"]
    config = found["config"]
    assert (config["training"]["lr"], config["training"]["momentum"]) == (0.7, 0.5)
    assert (config["training"]["steps"], config["training"]["epochs"]) == (None, 1)
    assert config["model"]["options"] == {"hidden": [3]}
    assert found["set"] == {
        "model.options.hidden": [3],
        "privacy.strategy": "uniform",
        "training.epochs": 1,
        "training.lr": 0.7,
        "training.momentum": 0.5,
    }
    assert json.loads(epsilons("plan", "people.toml", "--json").out)["strategy"] == "uniform"
    assert json.loads(epsilons("plan", "people.toml", "--json", "--strategy", "sample").out)["strategy"] == "sample"
    tuned = epsilons("tune", "people.toml", "--grid", "lr=1", "--select", "poisson:2", "--dry-run")
    tuned.succeeded("uniform")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("EPSILONS_SET_LR", "0.1", "EPSILONS_SET_LR is not in the form"),
        ("EPSILONS_SET_TRAINING__LR", " ", "EPSILONS_SET_TRAINING__LR is not in the form"),
        ("EPSILONS_SET_TRAINING____LR", "1", "is not in the form"),
        ("EPSILONS_SET_TRAINING__LRR", "1", "no key 'lrr'; did you mean 'lr'?"),
        ("EPSILONS_SET_TRAINING__LR", "fast", "training.lr"),
    ],
)
def test_a_variable_that_sets_no_key_is_refused(name, value, words, monkeypatch):
    monkeypatch.setenv(name, value)
    for command in ("train", "plan"):
        epsilons(command, "people.toml").is_refused(2, words)
    assert not Path("runs").exists()


# -- --json --------------------------------------------------------------------------------------------------------

SCHEMAS = json.loads(epsilons("docs", "--schemas").out)
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None)}


def problems(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """What is wrong with a value by a JSON Schema, as far as schemas.json uses the language."""
    known = {"type", "properties", "required", "additionalProperties", "items", "anyOf", "allOf", "const", "$ref"}
    assert schema.keys() <= known | {"description"}, schema
    found: list[str] = []
    if "$ref" in schema:
        found += problems(value, SCHEMAS["$defs"][schema["$ref"].removeprefix("#/$defs/")], where)
    if "const" in schema and value != schema["const"]:
        found.append(f"{where}: {value!r}")
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    fits = [isinstance(value, bool) if one == "boolean" else isinstance(value, TYPES[one]) for one in types]
    if isinstance(value, bool) and types and "boolean" not in types:
        fits = []
    if types and not any(fits):
        return [*found, f"{where}: {value!r} is not of {types}"]
    if isinstance(value, dict):
        inner, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [f"{where} lacks {name}" for name in schema.get("required", ()) if name not in value]
        found += [f"{where}.{name}" for name in value if name not in inner and others is False]
        for name, one in value.items():
            found += problems(one, inner.get(name, others if isinstance(others, dict) else {}), f"{where}.{name}")
    if isinstance(value, list):
        found += [text for one in value for text in problems(one, schema.get("items", {}), f"{where}[]")]
    for one in schema.get("allOf", ()):
        found += problems(value, one, where)
    if "anyOf" in schema and all(problems(value, one, where) for one in schema["anyOf"]):
        found.append(f"{where}: none of anyOf")
    return found


SIZES = ["--shares", "1:50%,3:50%", "--records", "500", "--batch-size", "50", "--steps", "5"]
OUTPUTS = """
init people.csv -o new.toml
plan SIZES -o a.json
plan SIZES --strategy sample -o b.json
plan people.toml --risk
compare a.json b.json
advise SIZES
train people.toml -o runs/one
train people.toml -o runs/one --continue
train people.toml --dry-run
train visits.toml --registry URL --share 0.5 -o runs/two
tune people.toml --grid lr=0.1,1 --select logarithmic:2 -o tuned
report runs/one
predict runs/one people.csv -o scored.csv
release runs/one --undeclared
sign --new-key key.pem
sign a.json --key key.pem --name A --role officer
sign runs/one --key key.pem --name A --role officer
verify a.json
verify runs/one
audit runs/one --canaries 50 --seed 0
attack people.toml --shadows 8 -o attacks/one --jobs 1
docs
docs operate
consent check people.toml
consent check visits.toml --registry URL
registry create URL
registry import URL wishes.csv --person id
registry change URL --id zz001 --epsilon 3
registry withdraw URL --id zz002
registry quota URL cardiology 0.5
registry limit URL 0.5
registry approve URL runs/two
registry quarantine URL --event 3 --reason wrong
registry migrate URL
registry settle URL runs/two
registry show URL
registry show URL --run RUN
registry show URL --id zz001
registry verify URL
registry export URL -o export.json
registry backup URL -o backup.db
registry restore backup.db sqlite:///other.db --since export.json
registry repair URL
registry roles
registry admit postgresql://o@db/p sue --id zz001
registry carry-out postgresql://o@db/p
"""


def commands() -> set[str]:
    """All commands, with those of groups."""
    found = {}
    for name in cli.COMMANDS:
        made = cli.loaded(name)
        found |= {f"{name} {inner}": one for inner, one in getattr(made, "commands", {"": made}).items()}
    return {name.strip() for name in found}


@pytest.mark.filterwarnings("ignore::epsilons.errors.EpsilonsWarning")
def test_what_a_command_prints_with_json_is_as_its_schema_says(monkeypatch):
    charged()
    shutil.move("people.toml", "visits.toml")
    Path("people.toml").write_text(CONFIG)
    Path("people.db").unlink()
    Path("people.db.pepper").unlink()
    # What needs PostgreSQL, or something wrong, is replaced; what is printed is not.
    monkeypatch.setattr(evidence, "approve", lambda registry, run: run)
    monkeypatch.setattr(Registry, "quarantine", lambda *given: None)
    lines = OUTPUTS.strip().split("\n")
    lines.sort(key=lambda line: not line.startswith(("registry create", "registry import")))  # first
    seen = set()
    for line in lines:
        words = line.split(" ")
        name = " ".join(words[: 2 if words[0] in ("registry", "consent") else 1])
        if "postgresql" in line:
            monkeypatch.setattr(registry_command, "opened", lambda *given: contextlib.nullcontext(Mock()))
        run = [json.loads(epsilons("registry", "show", URL, "--json").out)["runs"][0]["run"]] if "RUN" in words else []
        given = [part for word in words for part in {"SIZES": SIZES, "URL": [URL], "RUN": run}.get(word, [word])]
        outcome = epsilons(*given, "--json")
        assert outcome.code == 0, (line, outcome.err)
        assert problems(json.loads(outcome.out), SCHEMAS["properties"][name]) == [], line
        seen.add(name)
    assert seen == commands() == set(SCHEMAS["properties"])


def test_the_check_of_schemas_finds_what_is_wrong():
    plan = json.loads(epsilons("plan", *SIZES, "--json").out)
    schema = SCHEMAS["properties"]["plan"]
    assert problems(plan, schema) == []
    assert problems(plan | {"steps": "5"}, schema)
    assert problems(plan | {"steps": True}, schema)
    assert problems(plan | {"groups": [{"epsilon": 1}]}, schema)
    assert problems({name: value for name, value in plan.items() if name != "digest"}, schema)
    assert problems({"said": "x", "more": 1}, {"$ref": "#/$defs/said"})
    assert problems({"path": "x", "finished": False}, SCHEMAS["properties"]["train"])


# -- the URL of the registry ---------------------------------------------------------------------------------------


def test_commands_about_a_registry_read_its_url_in_the_environment(monkeypatch):
    charged()
    monkeypatch.setenv("EPSILONS_REGISTRY", URL)
    registry = lambda *given: epsilons("registry", *given)  # noqa: E731
    registry("import", "wishes.csv", "--person", "id").succeeded("people of this list are new")
    registry("change", "--id", "zz001", "--epsilon", "3").succeeded("changed")
    registry("quota", "cardiology", "0.5").succeeded("cardiology: at most 50%")
    registry("show").succeeded("60 or more people")
    registry("show", "sqlite:///other.db").is_refused(2, "other.db")
    registry("backup", "-o", "copy.db").succeeded("Copied")
    registry("export", "-o", "e.json").succeeded()
    monkeypatch.setenv("EPSILONS_REGISTRY", "sqlite:///restored.db")
    registry("restore", "copy.db", "--since", "e.json").succeeded("Restored")
    assert Path("restored.db").exists()
    monkeypatch.setenv("EPSILONS_REGISTRY", URL)
    epsilons("train", "people.toml", "-q", "--share", "0.5", "--continue").succeeded()
    epsilons("consent", "check", "people.toml", "--set", 'registry.project="x"').succeeded()
    monkeypatch.delenv("EPSILONS_REGISTRY")
    registry("show").is_refused(2, "URL")


# -- docs/operate.md -----------------------------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[1]
CRON, SLURM = (block.text for block in blocks(ROOT / "docs/operate.md", "text"))


@pytest.fixture
def shell(here, monkeypatch):
    """A function that runs a script with `epsilons`, and stand-ins for programs of Slurm, on its PATH."""
    programs = {
        "epsilons": f'exec {sys.executable} -m epsilons "$@"',
        "srun": 'exec "$@"',
        "scontrol": 'echo "$@" >> requeued',
    }
    for name, text in programs.items():
        (here / "bin").mkdir(exist_ok=True)
        (here / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (here / "bin" / name).chmod(0o755)

    def run(script: str, **environment: str) -> int:
        path = f"{here / 'bin'}:{os.environ['PATH']}"
        given = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **environment}
        return subprocess.run(["sh", "-c", script], env=given, check=False).returncode

    return run


def test_the_line_for_cron_trains_and_then_does_nothing(shell, here):
    command = CRON.strip().split("  ", 1)[1].replace("/srv/people", str(here))
    assert shell(command) == 0
    done = RunFolder(Path("runs/june")).read_settings()
    assert "done" in done
    assert shell(command) == 0
    assert RunFolder(Path("runs/june")).read_settings() == done


def test_the_script_for_slurm_trains_every_task_and_is_queued_again_after_sigterm(shell, here):
    change('accountant = "rdp"', 'accountant = "rdp"\nruns = 3\nplan_folder = "tuning"')
    epsilons("plan", "people.toml", "-o", "tuning").succeeded("which counts the runs")
    assert [shell(SLURM, SLURM_ARRAY_TASK_ID=str(task)) for task in range(3)] == [0, 0, 0]
    found = [RunFolder(Path(f"runs/array-{task}")).read_settings()["metadata"]["set"] for task in range(3)]
    assert found == [{"training.lr": 0.1}, {"training.lr": 0.3}, {"training.lr": 1}]
    assert (PlanFolder("tuning").begun, Path("requeued").exists()) == (3, False)
    for code in (75, 2):
        (here / "bin/epsilons").write_text(f"#!/bin/sh\nexit {code}\n")
        assert shell(SLURM, SLURM_ARRAY_TASK_ID="0", SLURM_JOB_ID="77") == code
    assert Path("requeued").read_text() == "requeue 77\n"


def test_the_container_begins_with_the_command_of_the_package():
    lines = (ROOT / "deploy/Containerfile").read_text().splitlines()
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ((entry,),) = [json.loads(line.removeprefix("ENTRYPOINT ")) for line in lines if line.startswith("ENTRYPOINT")]
    assert entry in setup["scripts"]
    (install,) = [line for line in lines if "pip install" in line]
    assert "RUN --mount=type=bind,source=wheels,target=/wheels \\" in lines
    assert '--no-index --find-links /wheels "epsilons[app]"' in install
    assert setup["name"] == "epsilons"
    assert "app" in setup["optional-dependencies"]
    assert [line for line in lines if line.startswith(("USER", "COPY"))] == ["USER trainer"]
