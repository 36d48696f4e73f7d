"""`epsilons registry`, and `epsilons train --registry`: every command, bad input, and that no output names anybody."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
import signal
import typing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import program
from epsilons.cli import registry_command, registry_people, train_config
from epsilons.errors import EpsilonsError, EpsilonsWarning, RegistryError
from epsilons.ledger import run_folder, signatures
from epsilons.ledger.account import NO_LINE, line_hash
from epsilons.ledger.ledger import Ledger
from epsilons.ledger.run_folder import RunFolder
from epsilons.planning import Plan
from epsilons.registry import Registry, Reservation, Roster, Table, evidence
from epsilons.reporting.content import make_content
from epsilons.reporting.load_run import load_run
from program import files
from registries import VISITS, begin, downgrade, outside, reserve, table
from small_runs import lines

URL = "sqlite:///people.db"
PASSWORD = "xyzzy"
ONE_PERSON = [URL, "--id", "zz001"]
IDS = [f"zz{i:03d}" for i in range(60)]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EPSILONS_REGISTRY", raising=False)


@pytest.fixture
def people(template):
    """A registry with 60 people, and their visits."""
    shutil.copytree(template, ".", dirs_exist_ok=True)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("people")
    with contextlib.chdir(folder):
        _write_people()
    return folder


def _write_people():
    lines = [f"{one},{1 + 3 * (i % 2)}" for i, one in enumerate(IDS)]
    Path("wishes.csv").write_text("id,epsilon\n" + "\n".join(lines) + "\n")
    visits = [f"{one},{20 + i % 50},{('no', 'yes')[i % 3 % 2]}" for i, one in enumerate(IDS * 2)]
    Path("visits.csv").write_text("id,age,label\n" + "\n".join(visits) + "\n")
    Path("people.toml").write_text(VISITS)
    epsilons("registry", "create", URL).succeeded()
    epsilons("registry", "import", URL, "wishes.csv", "--person", "id").succeeded("60 of 60")


def epsilons(*arguments):
    """The command, of which no output may name anybody or repeat a password."""
    outcome = program.epsilons(*arguments)
    assert not re.search(rf"zz\d|{PASSWORD}", outcome.out + outcome.err), (outcome.out, outcome.err)
    return outcome


def can_take_part(ids):
    with Registry(URL) as registry:
        enrolled = [one for one, is_known in zip(ids, registry.are_enrolled(ids).tolist(), strict=True) if is_known]
        accounts = registry.account(enrolled or ids)
        return [one for one, takes in zip(enrolled, accounts.can_take_part.tolist(), strict=True) if takes]


def test_who_said_no_in_a_list_is_not_enrolled_and_withdrawn_if_they_were():
    epsilons("registry", "create", URL).succeeded()
    said = {one: ("yes", "no", "", "NA")[i % 4] for i, one in enumerate(IDS)}
    lists = {"first.csv": dict.fromkeys(IDS[:30], "yes"), "second.csv": said}
    for name, entries in lists.items():
        Path(name).write_text("id,tier\n" + "".join(f"{one},{what}\n" for one, what in entries.items()))
    with open("second.csv", "a") as file:
        file.write(f"{IDS[0]},no\n")  # beside a yes
    importing = ["registry", "import", URL, "second.csv", "--person", "id", "--column", "tier", "--tiers", "yes=2"]
    epsilons(*importing[:3], "first.csv", *importing[4:]).succeeded("30 of 30 people")
    epsilons(*importing).is_refused(2, "--left-out")
    epsilons(*importing, "--left-out", "no").is_refused(2, '--left-out ""')
    assert can_take_part(IDS) == IDS[:30]
    for _ in range(2):
        done = epsilons(*importing, "--left-out", "no", "--left-out", "")
        done.succeeded("All but fewer than 20 of 60 people of this list are left out")
        assert can_take_part(IDS) == [one for one in IDS[1:] if said[one] == "yes"]
    epsilons("registry", "verify", URL).succeeded()


def test_who_withdrew_or_is_not_in_force_is_not_enrolled_and_withdrawn_if_they_were():
    epsilons("registry", "create", URL).succeeded()
    cells = {"": True, "2026-03-01": False, "2026-10-01": False, "2026-10-02": True}  # by the day of withdrawal
    said = {one: (list(cells)[i % 4], ("", "2026-10-02", "2020-01-01")[i // 4 % 3]) for i, one in enumerate(IDS)}
    ends = {one: ("", "2026-09-30", "2026-10-01")[i // 12 % 3] for i, one in enumerate(IDS)}
    lines = [f"{one},2,{gone},{begins},{ends[one]}\n" for one, (gone, begins) in said.items()]
    again = next(one for one in IDS if ends[one] == "2026-09-30" and said[one] == ("", ""))
    lines += [f"{again},2,,2026-09-30,\n"]  # a new entry beside one that is over
    Path("list.csv").write_text("id,epsilon,withdrawn_on,valid_from,valid_until\n" + "".join(lines))
    Path("first.csv").write_text("id,epsilon\n" + "".join(f"{one},2\n" for one in IDS[::2]))
    epsilons("registry", "import", URL, "first.csv", "--person", "id").succeeded("30 of 30 people")
    importing = ["registry", "import", URL, "list.csv", "--person", "id"]
    stated = ["--withdrawn-on", "withdrawn_on", "--valid-from", "valid_from", "--valid-until", "valid_until"]
    epsilons(*importing).is_refused(2, "'withdrawn_on', 'valid_from', 'valid_until'", "--as-of")
    epsilons(*importing, "--as-of", "2026-10-01").is_refused(2, "--withdrawn-on")
    epsilons(*importing, *stated).is_refused(2, "--as-of")
    epsilons(*importing, *stated[:4], "--as-of", "2026-10-01").is_refused(2, "'valid_until'")
    assert can_take_part(IDS) == IDS[::2]
    epsilons(*importing, *stated, "--as-of", "2026-10-01").succeeded()
    in_force = [one for one in IDS if said[one][1] != "2026-10-02" and ends[one] != "2026-09-30"]
    wanted = {one for one in in_force if cells[said[one][0]]} | {again}
    assert len(wanted) > 10
    assert {*can_take_part(IDS)} == wanted
    epsilons("registry", "verify", URL).succeeded()


def test_who_said_no_is_withdrawn_also_where_the_budgets_of_others_are_refused():
    epsilons("registry", "create", URL).succeeded()
    lists = {"first.csv": ["yes"] * 60, "second.csv": ["no"] * 25 + ["more"] * 35}
    for name, entries in lists.items():
        Path(name).write_text("id,tier\n" + "".join(f"{a},{b}\n" for a, b in zip(IDS, entries, strict=True)))
    tiers = ["--person", "id", "--column", "tier", "--tiers", "yes=2,more=4", "--left-out", "no"]
    epsilons("registry", "import", URL, "first.csv", *tiers).succeeded()
    epsilons("registry", "import", URL, "second.csv", *tiers).is_refused(3, "No budget was written", "--change")
    assert can_take_part(IDS) == IDS[25:]


def test_who_said_no_in_another_spelling_is_not_enrolled_unless_it_is_stated():
    epsilons("registry", "create", URL).succeeded()
    Path("list.csv").write_text("id,tier\n" + "".join(f"{n:03},no\n{n},yes\n" for n in range(1, 31)))
    importing = ["registry", "import", URL, "list.csv", "--person", "id", "--column", "tier", "--tiers", "yes=2"]
    epsilons(*importing, "--left-out", "no").is_refused(2, "60 of 60 ids", "--ids")
    Path("people.db").unlink()
    epsilons("registry", "create", URL, "--ids", "strip leading zeros", "--pepper", "new").succeeded()
    again = epsilons(*importing, "--left-out", "no", "--pepper", "new")
    again.is_refused(2, "All 60 rows of list.csv are left out")


def registry(command, *arguments):
    return epsilons("registry", command, URL, *arguments)


def shown():
    return json.loads(registry("show", "--json").out)


def train(*more):
    return epsilons("train", "people.toml", "--registry", URL, "-q", *more)


def train_until(update, *more):
    """A run that is interrupted after this update."""
    fit = train_config.fit

    def stop(private):
        if private.updates == update:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_config, "fit", lambda *a, callbacks, **k: fit(*a, callbacks=[*callbacks, stop], **k))
        train(*more).is_refused(130, "--registry URL", "--resume")


@pytest.fixture
def interrupted(people):
    """runs/people-1, interrupted after three of 140 steps, with a block of 64 charged."""
    train_until(3, "--share", "0.5", "--set", "training.steps=140")


# -- people ------------------------------------------------------------------------------------------------------------


def test_an_import_enrols_and_changes_only_when_asked(people):
    registry("import", "wishes.csv", "--person", "id").succeeded("Fewer than 20 people of this list are new")
    before = Path("wishes.csv").read_text()
    Path("wishes.csv").write_text(before.replace(",1\n", ",2\n") + "zz900,1\n")
    registry("import", "wishes.csv", "--person", "id").is_refused(3, "30 of 61", "No budget was written", "--change")
    with Registry(URL) as opened:
        assert opened.verify().people == 60
    registry("import", "wishes.csv", "--person", "id", "--change").succeeded("have another budget")
    assert [row["epsilon"] for row in shown()["wishes"]] == [None, 4.0]  # the one new person joins another row
    with Registry(URL) as opened:
        assert opened.verify().people == 61


def test_a_slip_of_a_factor_of_ten_is_asked_about_in_numbers_that_reveal_nobody(people):
    def changed(**of):
        lines = [f"{one},{of.get(one, 1 + 3 * (i % 2))}\n" for i, one in enumerate(IDS)]
        Path("wishes.csv").write_text("id,epsilon\n" + "".join(lines))
        return registry("import", "wishes.csv", "--person", "id", "--change", *(["--yes"] if of.get("yes") else []))

    asked = [changed(**dict.fromkeys(IDS[: 2 * few : 2], 10)) for few in (1, 19)]
    for outcome in asked:
        outcome.is_refused(3, "Fewer than 20 people of this list would have more than 5 times the epsilon", "--yes")
    assert asked[0].err == asked[1].err
    changed(**dict.fromkeys(IDS[:50:2], 10)).is_refused(3, "20 or more people of this list would have", "--yes")
    with Registry(URL) as opened:
        opened.withdraw(IDS[2:3])
        assert set(opened.account(IDS).epsilon) == {1.0, 4.0}, "nothing was written"
    changed(zz000=5, zz002=50).succeeded("have another budget")  # 5 times is no more than 5 times; zz002 withdrew
    changed(zz000=26, yes=True).succeeded("have another budget")
    with Registry(URL) as opened:
        assert opened.account(IDS[:1]).epsilon == [26.0]
    changed(zz000=3).succeeded("have another budget")  # a lower one is not asked about


def test_people_who_withdrew_are_not_brought_back_by_an_import(people):
    registry("withdraw", "--id", "zz007").succeeded("Withdrawn")
    Path("wishes.csv").write_text(Path("wishes.csv").read_text().replace(",4\n", ",3\n"))
    registry("import", "wishes.csv", "--person", "id", "--change").succeeded("withdrew")
    with Registry(URL) as opened:
        assert opened.account(IDS).withdrawn.sum() == 1
        assert opened.account(["zz007"]).epsilon == [4.0]
    registry("change", "--id", "zz007", "--epsilon", "3").succeeded("changed")
    with Registry(URL) as opened:
        assert not opened.account(IDS).withdrawn.any()


def test_an_import_of_many_goes_on_where_it_was_interrupted(people, monkeypatch):
    monkeypatch.setattr(registry_people, "AT_ONCE", 7)
    epsilons("registry", "create", "sqlite:///other.db").succeeded()
    enrol, calls = Registry.enrol, []

    def failing(self, *arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return enrol(self, *arguments)

    monkeypatch.setattr(Registry, "enrol", failing)
    for code in (130, 0):
        assert epsilons("registry", "import", "sqlite:///other.db", "wishes.csv", "--person", "id").code == code
    with Registry("sqlite:///other.db") as other:
        assert sorted(set(other.account(IDS).epsilon)) == [1.0, 4.0]
        assert other.verify().people == 60


def test_one_wish_that_no_account_can_keep_refuses_the_whole_list(people, monkeypatch):
    monkeypatch.setattr(registry_people, "AT_ONCE", 2)
    Path("more.csv").write_text("id,epsilon\nzz901,1\nzz902,1\nzz903,0.001\n")
    registry("import", "more.csv", "--person", "id").is_refused(2, "too small")
    with Registry(URL) as opened:
        assert opened.verify().people == 60


def test_tiers_are_written_either_way(people):
    Path("tiers.csv").write_text("id,tier\nzz901,strict\nzz902,open\n")
    for i, tiers in enumerate(("strict=1,open=8", "strict:1, open:8")):
        epsilons("registry", "create", f"sqlite:///{i}.db").succeeded()
        url, flags = f"sqlite:///{i}.db", ["--person", "id", "--column", "tier", "--tiers", tiers]
        epsilons("registry", "import", url, "tiers.csv", *flags).succeeded()
        with Registry(url) as made:
            assert made.account(["zz901", "zz902"]).epsilon.tolist() == [1.0, 8.0]


def test_a_list_that_is_withdrawn_is_counted(people):
    Path("leaving.csv").write_text("id\n" + "".join(f"{one}\n" for one in [*IDS[:25], IDS[0]]))
    registry("withdraw", "--file", "leaving.csv").succeeded("Withdrawn: all 25 people of leaving.csv.")


def test_a_list_with_strangers_withdraws_the_others_and_says_so(people, monkeypatch):
    Path("leaving.csv").write_text("name,id\nx,zz001\ny,zz999\nz,zz002\n")
    registry("withdraw", "--file", "leaving.csv").is_refused(2, "--person")
    registry("withdraw", "--file", "leaving.csv", "--person", "id").is_refused(3, "Fewer than 20", "others were")
    monkeypatch.setattr("sys.stdin", io.StringIO("zz003\n"))
    registry("withdraw", "--id", "-").succeeded()
    registry("withdraw", "--id", "zz999").is_refused(3, "is enrolled")
    with Registry(URL) as opened:
        assert opened.account(IDS).withdrawn.nonzero()[0].tolist() == [1, 2, 3]


def test_ids_with_leading_zeros_are_other_people(people):
    Path("one.csv").write_text("id\n007\n")
    with Registry(URL) as opened:
        opened.enrol(["7", "007"], 1.0)
    registry("withdraw", "--file", "one.csv").succeeded()
    with Registry(URL) as opened:
        assert opened.account(["7", "007"]).withdrawn.tolist() == [False, True]


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_what_is_shown_follows_the_rule_of_20(people):
    registry("quota", "cardiology", "0.5").succeeded("50% of each lifetime budget")
    with Registry(URL) as opened:
        reserve(opened, "few", IDS[:10], [0] * 10, table([20.0]), project="small")
        reserve(opened, "many", IDS[:45], [0] * 45, table([20.0]), project="cardiology")
        opened.withdraw(IDS[:3])
    found = shown()
    assert [row["can_take_part"] for row in found["wishes"]] == ["all, or all but fewer than 20"] * 2
    assert {p["project"]: (p["people"], p["used"] is None) for p in found["projects"]} == {
        "small": ("fewer than 20", True),
        "cardiology": ("40 or more", False),
    }
    assert {run["run"]: run["people"] for run in found["runs"]} == {"few": "fewer than 20", "many": "40 or more"}
    registry("show").succeeded("cardiology", "not settled", "reserved")
    registry("show", "--run", "many").succeeded("40 or more", "cardiology")
    registry("show", "--run", "none").is_refused(2, "no run 'none'")
    used = found["wishes"][0]["used"]
    with Registry(URL) as opened:
        assert used == pytest.approx(opened.account(IDS[::2]).used_share.mean(), abs=0.006)


def test_a_small_wish_is_merged_in_what_is_shown_and_exported(people):
    with Registry(URL) as opened:
        opened.enrol(["zz800"], 7.125)
    registry("export", "-o", "a.json").succeeded()
    assert "7.125" not in Path("a.json").read_text() + registry("show").out
    assert shown()["wishes"][-1]["people"] == 20, "31, rounded down"


def test_one_person_who_withdrew_is_not_the_difference_of_what_is_shown_and_a_report(people):
    """The report counts those who took part; what is shown is the same with and without one who withdrew."""
    texts = []
    for gone in ((), IDS[4:5]):
        with Registry(URL) as opened:
            if gone:
                opened.withdraw([*gone])
        found = shown()
        texts.append((found["people"], found["wishes"]))
    assert texts[0] == texts[1]
    assert (found["people"], [wish["people"] for wish in found["wishes"]]) == ("60 or more", [20, 20])
    train("--share", "0.4").succeeded()
    assert make_content(load_run("runs/people-1"), release=False).groups[0].records == 29
    registry("show").succeeded("60 or more people", "20 or more")


def test_one_persons_account_is_for_a_terminal_or_json(people):
    with Registry(URL) as opened:
        reserve(opened, "one", IDS[:30], [0] * 30, table([20.0]), project="cardiology")
        share = float(opened.account([IDS[4]]).used_share[0])
    registry("show", "--id", IDS[4]).is_refused(2, "terminal")
    outcome = registry("show", "--id", IDS[4], "--json")
    account = json.loads(outcome.out)
    assert "CONFIDENTIAL" in outcome.err
    assert account["epsilon"] == 1.0
    assert account["used"] == pytest.approx(share, abs=1e-6)
    assert [(run["run"], run["used"]) for run in account["runs"]] == [("one", account["used"])]
    assert json.loads(registry("show", "--id", IDS[50], "--json").out)["runs"] == []


# -- evidence ----------------------------------------------------------------------------------------------------------


def test_a_restored_copy_and_a_rewritten_chain_are_found(people):
    shutil.copy("people.db", "backup.db")
    registry("withdraw", "--id", IDS[0])
    registry("export", "-o", "june.json").succeeded()
    registry("export", "-o", "june.json").is_refused(2, "exists")
    registry("withdraw", "--id", IDS[1])
    registry("verify", "--since", "june.json").succeeded("continues the export")
    registry("verify").succeeded("--since")
    now = Path("people.db").read_bytes()
    shutil.copy("backup.db", "people.db")
    registry("verify").succeeded()
    registry("verify", "--since", "june.json").is_refused(3, "restored from an older copy")
    for one in IDS[2:5]:
        registry("withdraw", "--id", one)
    registry("verify", "--since", "june.json").is_refused(3, "rewritten")
    Path("people.db").write_bytes(now)
    outside((URL,), "update wish set epsilon = 9.0 where id = 1")
    registry("verify").is_refused(3, "altered")
    epsilons("registry", "create", "sqlite:///other.db").succeeded()
    epsilons("registry", "verify", "sqlite:///other.db", "--since", "june.json").is_refused(3, "another registry")


# -- runs --------------------------------------------------------------------------------------------------------------


def test_runs_of_two_folders_share_lifetime_budgets(people):
    train("--share", "0.3", "--project", "cardiology").succeeded()
    registry("withdraw", "--id", IDS[0]).succeeded()
    Path("elsewhere").mkdir()
    for file in ("visits.csv", "people.toml"):
        shutil.copy(file, "elsewhere")
    epsilons("train", "elsewhere/people.toml", "--registry", URL, "-q", "--share", "0.5", "-o", "elsewhere/run")
    train("--share", "1", "--project", "cardiology").succeeded()
    with Registry(URL) as opened:
        accounts = opened.account(IDS)
    assert (accounts.used_share[1:] > 0.999).all()
    assert (accounts.used_share <= 1).all()
    assert accounts.used_share[0] == pytest.approx(0.3, rel=1e-3)
    assert [run["state"] for run in shown()["runs"]] == ["settled"] * 3
    train("--share", "1").is_refused(3, "nothing left")
    registry("verify").succeeded("3 runs")


def test_a_run_states_its_registry_and_no_url(people):
    absolute = f"sqlite:///{Path('people.db').resolve()}"
    epsilons("train", "people.toml", "--registry", absolute, "--share", "0.25", "--project", "x").succeeded(
        "levels", "verify URL", "export URL -o FILE"
    )
    [run] = shown()["runs"]
    run_json = json.loads(Path("runs/people-1/run.json").read_text())
    assert run_json["registry"] == {"id": shown()["registry"], "run": run["run"]}
    with Registry(URL) as opened:
        assert {epsilon for epsilon, _ in run_json["lifetimes"]} == {*opened.account(IDS).epsilon.tolist()}
    assert run["run"].startswith("people-1-")
    for file in files(Path("runs")):
        assert not re.search(rb"zz\d|sqlite:", (Path("runs") / file).read_bytes()), file
    epsilons("report", "runs/people-1").succeeded()
    for name in ("report.json", "report-release.json"):
        report = json.loads(Path(f"runs/people-1/{name}").read_text())
        assert report["registry"] == shown()["registry"]
        assert shown()["registry"] in report["guarantee"]
        assert "one lifetime budget there" in " ".join(report["summary"])
        assert "It is not charged, and this report does not know of it" in " ".join(report["summary"])


def test_an_interrupted_run_resumes_with_the_people_that_it_reserved(interrupted):
    registry("withdraw", "--id", IDS[0])
    with Registry(URL) as opened:
        opened.change(IDS[1:2], 2.0)
    before = shown()["runs"]
    assert before[0]["state"] == "running"
    epsilons("train", "people.toml", "-q", "--resume").is_refused(2, "--registry URL")
    train("--resume").succeeded()
    [run] = shown()["runs"]
    assert (run["state"], run["charged"], run["run"]) == ("settled", 140, before[0]["run"])
    registry("settle", "runs/people-1").succeeded("140 of 140")
    registry("verify").succeeded()


def test_a_run_that_used_everything_up_can_still_resume(people):
    train_until(1, "--share", "1")
    train("--resume").succeeded()
    assert shown()["runs"][0]["charged"] == 20


def test_an_abandoned_run_gives_back_whole_blocks_and_never_resumes(interrupted):
    run = Path("runs/people-1")
    registry("settle", run).is_refused(2, "not closed", "--abandon")
    with Registry(URL) as opened:
        reserved = opened.account(IDS).used_share
    assert (run / "secret/key").exists()
    next_commands = ("epsilons registry verify URL", "export URL -o FILE")
    registry("settle", run, "--abandon").succeeded("64 of 140", *next_commands)
    for _ in range(2):
        registry("settle", run).succeeded("64 of 140")
    assert not (run / "secret/key").exists()
    with Registry(URL) as opened:
        assert opened.account(IDS).used_share == pytest.approx(reserved * 64 / 140, rel=1e-6)
    again = train("--resume")
    assert shown()["runs"][0]["charged"] == 64, again


@pytest.fixture
def failing_disk(monkeypatch):
    """While it is open, no key can be removed."""
    unlink = os.unlink

    def failing(path, *arguments, **options):
        if str(path).endswith("secret/key"):
            raise OSError(errno.EIO, "Input/output error")
        return unlink(path, *arguments, **options)

    @contextlib.contextmanager
    def opened():
        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", failing)
            yield

    return opened


def test_a_key_that_cannot_be_destroyed_is_one_line_and_settling_is_repeated(interrupted, failing_disk):
    run = Path("runs/people-1")
    with failing_disk():
        registry("settle", run, "--abandon").is_refused(2, "cannot be destroyed", "Input/output error", "secret/key")
    assert (run / "secret/key").exists()
    registry("settle", run, "--abandon").succeeded("64 of 140")
    assert not (run / "secret/key").exists()


def test_a_run_that_ends_on_a_failing_disk_is_one_line_and_resumes(people, failing_disk):
    with failing_disk():
        train("--share", "0.2").is_refused(2, "cannot be destroyed")
    train("--resume").succeeded()
    assert not Path("runs/people-1/secret").exists()
    assert shown()["runs"][0]["state"] == "settled"


def test_of_two_copies_only_the_one_that_went_on_settles(interrupted):
    shutil.copytree("runs/people-1", "copy")
    train("--resume", "-o", "copy").succeeded()
    registry("settle", "runs/people-1", "--abandon").is_refused(3, "another key")
    [run] = shown()["runs"]
    assert run["state"] == "settled"
    assert run["charged"] == 140


def test_a_copy_that_lost_its_right_settles_nothing(interrupted):
    """The copy goes on under a new key and is interrupted; the first folder cannot settle at fewer steps."""
    shutil.copytree("runs/people-1", "copy")
    train_until(70, "--resume", "-o", "copy")
    registry("settle", "runs/people-1", "--abandon").is_refused(3, "another key")
    assert shown()["runs"][0]["state"] == "running"
    registry("settle", "copy", "--abandon").succeeded("140 of 140")


def test_a_refund_above_the_limit_is_settled_once_an_officer_approved_it(interrupted):
    registry("limit", "0.25").succeeded("0.25")
    registry("settle", "runs/people-1", "--abandon").is_refused(3, "An officer approves it", "registry approve URL RUN")
    assert shown()["runs"][0]["state"] == "running"
    registry("approve", "runs/people-1").succeeded("approved", "registry settle URL RUN")
    registry("verify", "--run", "runs/people-1").succeeded()
    registry("settle", "runs/people-1").succeeded("64 of 140")
    registry("verify", "--run", "runs/people-1").succeeded()
    with Registry(URL) as opened:
        reserve(opened, "lost", IDS, [0] * 60, table([200.0]))
    registry("settle", "--cancel", "lost").is_refused(3, "An officer approves it")
    registry("approve", "lost").succeeded("lost: approved")
    registry("settle", "--cancel", "lost").succeeded("never began")
    registry("approve", "lost").is_refused(3)
    registry("verify").succeeded()


def test_a_run_that_ends_below_its_plan_says_who_approves_the_refund(interrupted, monkeypatch):
    registry("limit", "0").succeeded()
    registry("approve", "runs/people-1").is_refused(2, "not closed")
    registry("verify", "--run", "runs/people-1").succeeded()
    plan = Plan.load(Path("runs/people-1/plan.json"))
    with Registry(URL) as opened:
        ended = Ledger.resume(plan, Path("runs/people-1/ledger.jsonl"))
        ended.tie(Reservation(opened, shown()["runs"][0]["run"], plan.digest, "", np.arange(60)))
        with pytest.warns(EpsilonsWarning, match="An officer approves it"):
            ended.close()
    assert shown()["runs"][0]["state"] == "running"


def test_a_folder_is_compared_with_what_was_settled_by_its_name(interrupted, tmp_path):
    """A copy with a shorter ledger, which was closed and settled; and a ledger that was begun elsewhere."""
    shutil.copytree("runs/people-1", "copy")
    registry("settle", "runs/people-1", "--abandon").succeeded("64 of 140")
    registry("verify", "--run", "runs/people-1").succeeded()
    registry("verify", "--run", "copy").is_refused(3, "steps", "copy")
    short = rewritten(Path("runs/people-1/ledger.jsonl"), charged=0)
    Path("copy/ledger.jsonl").write_text(short)
    registry("verify", "--run", "copy").is_refused(3, "steps", "by another ledger")
    Path("copy/ledger.jsonl").write_text(rewritten(Path("runs/people-1/ledger.jsonl"), more=1))
    registry("verify", "--run", "copy").is_refused(3, "first line", "by another ledger")
    Path("copy/ledger.jsonl").write_text(rewritten(Path("runs/people-1/ledger.jsonl"), key="0" * 64))
    registry("verify", "--run", "copy").is_refused(3, "key", "by another ledger")
    registry("verify", "--run", "runs/none").is_refused(2, "no run")
    registry("verify", "--run", "runs/people-1").succeeded()


def rewritten(ledger, **facts):
    """The lines with these facts in place of their own, or in the first line, under right hashes."""
    written, last = [], NO_LINE
    for line in lines(ledger.parent):
        line["prev"] = last
        if line["kind"] == "close" and "charged" in facts:
            line["charged"] = [facts["charged"]]
        if line["kind"] == "open" and "more" in facts:
            line["more"] = facts["more"]
        if line["kind"] == "key" and "key" in facts:
            line["key"] = facts["key"]
        last = line["hash"] = line_hash(line)
        written.append(json.dumps(line) + "\n")
    return "".join(written)


def test_migration_and_quarantine_say_what_comes_next(people):
    registry("migrate").succeeded("verify URL")
    registry("quarantine", "--event", "3", "--reason", "why").is_refused(3, "Name every event that is wrong")
    registry("quarantine", "--event", "300", "--reason", "why").is_refused(3, "Name every event that is wrong")
    downgrade(URL, [{"kind": "begin", "time": "2026-01-01T00:00:00+00:00", "run": "x", "key": "y"}])
    registry("show").is_refused(2, "epsilons registry migrate URL")
    registry("verify").is_refused(2, "epsilons registry migrate URL")
    registry("migrate").succeeded("verify URL")
    number = re.search(r"event (\d+) \(begin\)", registry("verify").err).group(1)
    registry("quarantine", "--event", number, "--reason", "written by hand").succeeded("Quarantined")
    registry("verify").succeeded(f"Event {number} is in quarantine", "written by hand")


def test_foreign_and_altered_ledgers_settle_nothing(interrupted):
    epsilons("registry", "create", "sqlite:///other.db").succeeded()
    epsilons("registry", "settle", "sqlite:///other.db", "runs/people-1", "--abandon").is_refused(3, "this is")
    ledger = Path("runs/people-1/ledger.jsonl")
    text = ledger.read_text()
    ledger.write_text(text.replace('"to": 64', '"to": 1'))
    registry("settle", "runs/people-1", "--abandon").is_refused(3, "altered")
    ledger.write_text(text)
    settings_ = Path("runs/people-1/run.json")
    before = settings_.read_text()
    settings_.write_text(before.replace('"run": "people-1-', '"run": "people-2-'))
    registry("settle", "runs/people-1", "--abandon").is_refused(2, "contradicts the ledger")
    settings_.write_text(before)
    assert shown()["runs"][0]["state"] == "running"
    outside((URL,), """update run set plan = replace(plan, '"steps": [140]', '"steps": [100]')""")
    registry("settle", "runs/people-1", "--abandon").is_refused(3, "another plan")
    assert '"close"' not in ledger.read_text(), "a refused settlement closes no ledger"


def test_a_run_that_fails_before_it_begins_gives_everything_back(people, monkeypatch):
    def failing(*arguments, **options):
        raise train_config.ModelError("No such model.")

    monkeypatch.setattr(train_config, "fit", failing)
    train("--share", "0.5").is_refused(2, "No such model")
    assert [(run["state"], run["charged"]) for run in shown()["runs"]] == [("cancelled", 0)]
    with Registry(URL) as opened:
        assert (opened.account(IDS).spent == 0).all()


def test_only_a_run_that_never_began_is_cancelled(interrupted):
    registry("settle", "--cancel", shown()["runs"][0]["run"]).is_refused(3, "has begun")
    with Registry(URL) as opened:
        reserve(opened, "lost", IDS, [0] * 60, table([20.0]))
    registry("settle", "--cancel", "lost").succeeded("never began")
    with Registry(URL) as opened, pytest.raises(Exception, match="cancelled"):
        begin(opened, "lost")


def test_no_advice_to_sign_a_plan_leads_into_a_refusal(people):
    wishes = ("--set", 'budgets.file="wishes.csv"', "--set", "budgets.delta=1e-3")
    epsilons("plan", "people.toml", *wishes, "-q", "-o", "plan.json").succeeded()
    epsilons("sign", "plan.json", "--new-key", "officer.pem", "--name", "A. Meyer", "--role", "officer").succeeded()
    for dry in (["--dry-run"], []):
        told = train("--share", "0.5", "-q", *dry)
        told.succeeded()
        said = " ".join(told.err.split())
        assert "plan.json is signed, and holds another plan" in said
        assert "epsilons plan CONFIG --registry URL -o FILE" in said
        assert "--plan plan.json" not in said
    train("--share", "0.5", "--plan", "plan.json").is_refused(2, "Nothing was charged", "epsilons plan CONFIG")
    epsilons("sign", "runs/people-1", "--key", "officer.pem", "--name", "A. Meyer", "--role", "officer").succeeded()


def test_a_plan_says_that_it_read_no_registry(people, monkeypatch):
    wishes = ("--set", 'budgets.file="wishes.csv"', "--set", "budgets.delta=1e-3")
    assert "Registry:" not in epsilons("plan", "people.toml", *wishes).out
    monkeypatch.setenv("EPSILONS_REGISTRY", URL)
    said = "EPSILONS_REGISTRY is set, but the config has no [registry]"
    epsilons("plan", "people.toml", *wishes, "--html", "plan.html").succeeded(f"Registry: {said}")
    assert said in Path("plan.html").read_text()


def test_a_report_gives_the_use_of_a_runs_people_and_the_registry_that_of_all_enrolled(people, capsys):
    """22 of the 30 who are enrolled in each tier take part."""
    rows = Path("visits.csv").read_text().splitlines()
    Path("visits.csv").write_text("\n".join([rows[0], *(row for row in rows[1:] if row < "zz044")]) + "\n")
    train("--share", "0.4").succeeded()
    groups = make_content(load_run("runs/people-1"), release=False).groups
    assert [row.records for row in groups] == [22, 22]
    parts = [row.lifetime.used_by_run for row in groups]
    assert all(least == most > 0.3 for least, most in parts)
    levels = Plan.load("runs/people-1/plan.json").epsilons / [1, 4]
    assert (levels > [part + 0.1 for part, _ in parts]).all()  # another scale, as the plan says
    assert [one["used"] for one in shown()["wishes"]] == pytest.approx([p * 22 / 30 for p, _ in parts], abs=0.006)
    registry("show").succeeded("on average over all who are enrolled, also those in no run", "share used")
    epsilons("report", "runs/people-1", "-q").succeeded()
    page = " ".join("".join(file.read_text() for file in Path("runs/people-1").glob("report*.html")).split())
    assert "epsilons registry show gives the average over all who are enrolled, also those in no run" in page
    assert "share used before this run" in page
    assert "ε used" not in page, "the chart shows shares of lifetime budgets"
    more = epsilons("train", "people.toml", "--registry", URL, "--share", "0.1", "-o", "runs/more")
    assert re.search(r"left  level ε 0\.\d+/", more.err), "what is no share is called a level"
    assert "level charged so far" in more.out + more.err
    with Registry(URL) as opened:
        registry_people.show_person(opened, "zz000", False)
        share = opened.account(["zz000"]).used_share[0]
    assert f"share used     {share:.0%}" in capsys.readouterr().out


def test_a_dry_run_charges_nothing(people):
    train("--share", "0.5", "--dry-run").succeeded()
    assert shown()["runs"] == []
    assert not Path("runs").exists()


def test_who_is_tested_on_stays_the_same_when_others_withdraw(people):
    program.change('target = "label"', 'target = "label"\ntest_share = 0.5')
    train("--share", "0.2").succeeded()
    with Registry(URL) as opened:
        first = opened.account(IDS).used_share > 0
        opened.withdraw([IDS[i] for i in first.nonzero()[0][:5]])
    train("--share", "0.2").succeeded()
    with Registry(URL) as opened:
        assert ((opened.account(IDS).used_share > 0) == first).all()
    assert first.sum() == 30


@pytest.mark.parametrize("split", ["by share", "in a file"])
def test_nobody_who_withdrew_is_tested_on(people, split):
    new = 'test = "other.csv"' if split == "in a file" else "test_share = 0.5"
    program.change('target = "label"', f'target = "label"\n{new}')
    Path("other.csv").write_text(Path("visits.csv").read_text() + "zz999,30,no\n")
    train("--share", "0.2").succeeded()
    with Registry(URL) as opened:
        tested = IDS if split == "in a file" else [IDS[i] for i in (opened.account(IDS).used_share == 0).nonzero()[0]]
        opened.withdraw(tested[:5])
    train("--share", "0.2").succeeded()
    first, second = (json.loads(Path(f"runs/people-{i}/run.json").read_text())["eval_data"] for i in (1, 2))
    assert second["records"] == first["records"] - 10
    if split == "by share":
        assert (first["persons"], second["persons"]) == (30, 25)
        epsilons("report", "runs/people-2").succeeded()
        page, released = (Path(f"runs/people-2/report{name}.html").read_text() for name in ("", "-release"))
        assert "of 25 persons" in page
        assert "of 25 persons" not in released


def test_an_attack_on_registered_people_is_refused(people):
    train("--share", "0.2").succeeded()
    epsilons("attack", "runs/people-1", "--shadows", "8").is_refused(2, "cannot charge it")
    epsilons("plan", "people.toml", "--set", "registry.share=0.5").is_refused(2, "--registry URL")


def test_every_command_works_on_both_databases(template, place):
    shutil.copytree(template, ".", dirs_exist_ok=True, ignore=shutil.ignore_patterns("people.db*"))
    url, pepper = place
    flags = ("--pepper", pepper)

    def on(command, *more):
        outcome = epsilons("registry", command, url, *more, *flags)
        outcome.succeeded()
        assert str(url) not in outcome.out + outcome.err
        return outcome

    on("create")
    on("import", "wishes.csv", "--person", "id")
    on("quota", "cardiology", "0.9")
    charged = ("--registry", url, *flags, "--share", "0.25", "--project", "cardiology", "-q")
    epsilons("train", "people.toml", *charged).succeeded()
    on("withdraw", "--id", IDS[0])
    on("change", "--id", IDS[1], "--epsilon", "5")
    on("settle", "runs/people-1")
    on("export", "-o", "a.json")
    on("verify", "--since", "a.json")
    assert json.loads(on("show", "--json").out)["runs"][0]["state"] == "settled"
    assert json.loads(on("show", "--id", IDS[0], "--json").out)["withdrawn"]


def test_what_a_subject_states_is_carried_out(template, postgres, tmp_path):
    import psycopg

    shutil.copytree(template, ".", dirs_exist_ok=True, ignore=shutil.ignore_patterns("people.db*"))
    url, flags = postgres.place(), ("--pepper", tmp_path / "key")
    epsilons("registry", "create", url, *flags).succeeded()
    epsilons("registry", "import", url, "wishes.csv", "--person", "id", *flags).succeeded()
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute(epsilons("registry", "roles").out)
        owner.execute("insert into request (role, epsilon, delta) values ('tom', null, null)")
    epsilons("registry", "admit", url, "tom", "--id", IDS[3], *flags).succeeded("Admitted")
    epsilons("registry", "carry-out", url).succeeded("carried out")
    with Registry(url, tmp_path / "key") as opened:
        assert opened.account(IDS).withdrawn.nonzero()[0].tolist() == [3]


# -- bad input ---------------------------------------------------------------------------------------------------------

BAD_CONFIGS = {
    "no person": ('person = "id"', 'person = "each row is one person"'),
    "seeds": ("steps = 20", "steps = 20\nseeds = [1]"),
    "shares": ("[model]", '[budgets]\nshares = {"1" = 1.0}\n[model]'),
    "several runs of one plan": ("[model]", '[privacy]\nruns = 3\nplan_folder = "tuning"\n[model]'),
    "a URL in the file": ("[model]", f'[registry]\nshare = 0.5\nurl = "postgresql://u:{PASSWORD}@db/x"\n[model]'),
}


@pytest.mark.parametrize(("old", "new"), BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_configs_that_do_not_fit_a_registry_are_refused(people, old, new):
    program.change(old, new)
    train("--share", "0.5").is_refused(2)
    assert shown()["runs"] == []


BAD = {
    "no share": (["train", "people.toml", "--registry", URL], 2, "--share 0.25"),
    "no URL": (["train", "people.toml", "--share", "0.5"], 2, "--registry URL"),
    "no config": (["train", "--registry", URL], 2, "config"),
    "share 0": (["train", "people.toml", "--registry", URL, "--share", "0"], 2, "share"),
    "no file": (["registry", "show", "sqlite:///none.db"], 2, "no registry"),
    "other scheme": (["registry", "show", f"mysql://u:{PASSWORD}@db/x"], 2, "URL is"),
    "no host": (
        ["registry", "show", f"postgresql://u:{PASSWORD}@127.0.0.1:1/x", "--pepper", "people.db.pepper"],
        2,
        "",
    ),
    "extra argument": (["registry", "show", URL, f"postgresql://u:{PASSWORD}@db/x"], 2, "unexpected"),
    "no pepper": (["registry", "show", URL, "--pepper", "none"], 2, "pepper"),
    "other pepper": (["registry", "show", URL, "--pepper", "wishes.csv"], 2, "not the pepper"),
    "made twice": (["registry", "create", URL], 2, "exists already"),
    "no wishes": (["registry", "import", URL, "none.csv", "--person", "id"], 2, "none.csv"),
    "no column": (["registry", "import", URL, "wishes.csv", "--person", "name"], 2, "'name'"),
    "both": (["registry", "withdraw", URL, "--id", "zz001", "--file", "wishes.csv"], 2, "either"),
    "neither": (["registry", "withdraw", URL], 2, "either"),
    "blank id": (["registry", "withdraw", URL, "--id", " "], 2, "needs an id"),
    "stranger": (["registry", "show", URL, "--id", "zz999", "--json"], 3, "not enrolled"),
    "small wish": (["registry", "change", *ONE_PERSON, "--epsilon", "0.001"], 2, "too small"),
    "nan": (["registry", "change", *ONE_PERSON, "--epsilon", "nan"], 2, "above 0"),
    "quota": (["registry", "quota", URL, "x", "1.5"], 2, "at most 1"),
    "limit": (["registry", "limit", URL, "1.5"], 2, "from 0 to 1"),
    "limit nan": (["registry", "limit", URL, "nan"], 2, "from 0 to 1"),
    "approve none": (["registry", "approve", URL, "nothing"], 2, "No run"),
    "approve a folder": (["registry", "approve", URL, "."], 2, "no run"),
    "no reason": (["registry", "quarantine", URL, "--event", "3", "--reason", ""], 2, "A reason"),
    "no migration": (["registry", "migrate", "sqlite:///none.db"], 2, "no registry"),
    "roles of a file": (["registry", "carry-out", URL], 2, "PostgreSQL"),
    "no run": (["registry", "settle", URL, "runs/none"], 2, "no run"),
    "a file for a run": (["registry", "settle", URL, "wishes.csv"], 2, "no run"),
    "no export": (["registry", "verify", URL, "--since", "wishes.csv"], 2, "no export"),
    "signer alone": (["registry", "verify", URL, "--signer", "wishes.csv"], 2, "--since"),
    "no key": (["registry", "export", URL, "-o", "x.json", "--sign", "wishes.csv"], 2, "wishes.csv"),
}


@pytest.mark.parametrize(("arguments", "code", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_in_one_sentence_and_changes_nothing(people, arguments, code, words):
    before = shown()
    epsilons(*arguments).is_refused(code, words)
    assert shown() == before


CELLS = st.sampled_from(["1", "4", "", " ", "0", "-1", "inf", "nan", "x", "0.001", "1e9", "1,5", '"'])
NAMES = st.sampled_from(["zz001", " zz001", "zz900", "zz901", "", " ", "NA", '"'])


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(NAMES, CELLS), min_size=1, max_size=4))
def test_strange_wishes_are_enrolled_or_refused_whole(people, rows):
    with Registry(URL) as opened:
        before = opened.verify()
    Path("odd.csv").write_text("id,epsilon\n" + "".join(f"{name},{cell}\n" for name, cell in rows))
    outcome = registry("import", "odd.csv", "--person", "id")
    with Registry(URL) as opened:
        after = opened.verify()
    assert after.is_right
    assert (outcome.code == 0) or (outcome.code in (2, 3) and after == before), outcome


# -- numbers beyond every range: one line, and nothing changes -------------------------------------------------------


IMPORT = ["registry", "import", URL]
TRAIN = ["train", "--registry", URL, "--dry-run"]
#: Texts of numbers that no option can use, or that are at the end of what it can.
ODD_TEXTS = ["1e30", "-1e30", "1e309", "nan", "inf", "-inf", "0", "-0", "-1", "5e-324", "9" * 400, "1e", "", "0x10"]
ODD_TEXTS += ["1,5", "1_000"]
#: (command, option) -> the arguments around the number.
CALLS = {
    ("import", "delta"): lambda text: [*IMPORT, cells_file(), "--person", "id", "--delta", text],
    ("change", "epsilon"): lambda text: ["registry", "change", *ONE_PERSON, "--epsilon", text],
    ("change", "delta"): lambda text: [
        "registry",
        "change",
        URL,
        "--person",
        "zz001",
        "--epsilon",
        "1",
        "--delta",
        text,
    ],
    ("quota", "share"): lambda text: ["registry", "quota", URL, "reading", "--", text],
    ("limit", "share"): lambda text: ["registry", "limit", URL, "--", text],
    ("quarantine", "event"): lambda text: ["registry", "quarantine", URL, "--reason", "x", f"--event={text}"],
}
#: What is in range all the same.
LEGAL = {
    ("change", "epsilon", "1_000"),
    ("quota", "share", "5e-324"),
    *(("limit", "share", text) for text in ("0", "-0", "5e-324")),
}
#: Other places of numbers: in texts, files and configs.
ELSEWHERE = {
    "tiers": lambda text: [*IMPORT, tiers_file(), "--person", "id", "--column", "tier", "--tiers", f"a={text}"],
    "a cell of epsilon": lambda text: [*IMPORT, cells_file(epsilon=text), "--person", "id"],
    "a cell of delta": lambda text: [*IMPORT, cells_file(delta=text), "--person", "id", "--delta-column", "delta"],
    "train --share": lambda text: [*TRAIN, "people.toml", f"--share={text}"],
    "registry.share": lambda text: [*TRAIN, config(text)],
    "registry.share, set": lambda text: [*TRAIN, "people.toml", "--set", f"registry.share={text}"],
    "a day": lambda text: ["registry", "export", URL, "-o", "x.json", f"--excluded={text}"],
    "a day's year": lambda text: ["registry", "export", URL, "-o", "x.json", f"--excluded={text}-01-01"],
    "a person": lambda text: ["registry", "show", URL, "--json", f"--id={text}"],
    "a run": lambda text: ["registry", "settle", URL, f"--cancel={text}"],
}


def cells_file(epsilon="1", delta="1e-5"):
    Path("cells.csv").write_text(f'id,epsilon,delta\nnew1,"{epsilon}","{delta}"\n')
    return "cells.csv"


def config(share):
    Path("share.toml").write_text(f"{VISITS}[registry]\nshare = {share or '0.5'}\n")
    return "share.toml"


def tiers_file():
    Path("tiers.csv").write_text("id,tier\nnew1,a\n")
    return "tiers.csv"


def is_numeric(hint):
    kinds = [hint]
    while kinds:
        one = kinds.pop()
        if one in (int, float):
            return True
        kinds += [kind for kind in typing.get_args(one) if isinstance(kind, type) or typing.get_args(kind)]
    return False


def test_every_numeric_option_of_the_registrys_commands_is_tried_here():
    found = set()
    for info in registry_command.app.registered_commands:
        hints = typing.get_type_hints(info.callback, include_extras=True)
        found |= {(info.name, name) for name, hint in hints.items() if is_numeric(hint)}
    assert found == set(CALLS)


def is_refused_or_changes_one_thing(arguments):
    with Registry(URL) as opened:
        before = opened.head
    outcome = program.epsilons(*arguments)
    assert outcome.code in (0, 2, 3), outcome
    if outcome.code:
        outcome.is_refused(outcome.code)
    with Registry(URL) as opened:
        assert opened.verify().is_right
        assert outcome.code == 0 or opened.head == before
        assert np.isfinite(opened.account(["zz001"]).epsilon).all()
    return outcome.code == 0


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
def test_a_number_of_a_command_out_of_range_is_one_line(people, call):
    for text in ODD_TEXTS:
        assert is_refused_or_changes_one_thing(CALLS[call](text)) == ((*call, text) in LEGAL), text


@pytest.mark.parametrize("call", ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_number_elsewhere_out_of_range_is_one_line(people, call):
    for text in ODD_TEXTS:
        is_refused_or_changes_one_thing(call(text))


ONE = Roster(np.array([1]), np.array([0]))
ODD_NUMBERS = [10**30, -(10**30), 2**63, -1, True, 1.5, float("nan"), float("inf"), "1", None]


@pytest.mark.parametrize(
    "call",
    [
        lambda registry, n: registry.set_quota("x", n),
        lambda registry, n: registry.change(["zz001"], n),
        lambda registry, n: registry.change(["zz001"], 1.0, n),
        lambda registry, n: registry.enrol(["new"], n),
        lambda registry, n: registry.reserve_table("r", Table(np.ones((1, 1)), np.full((1, 1), 9.0), (n,)), ONE),
        lambda registry, n: registry.reserve_table("r", Table(np.array([[n]]), np.full((1, 1), 9.0), (1,)), ONE),
        lambda registry, n: registry.reserve_table("r", Table(np.ones((1, 1)), np.array([[n]]), (1,)), ONE),
        lambda registry, n: registry.release("r", 1.0, ids=["zz001"], sensitivity=n, noise_multiplier=9.0),
        lambda registry, n: registry.release("r", 1.0, ids=["zz001"], sensitivity=1.0, noise_multiplier=n),
    ],
)
def test_a_number_of_python_out_of_range_is_one_error_or_a_wrong_type(people, call):
    with Registry(URL) as opened:
        for number in ODD_NUMBERS:
            before = opened.head
            try:
                call(opened, number)
            except (EpsilonsError, TypeError, ValueError):
                assert opened.head == before
            assert opened.verify().is_right
            json.dumps(opened.summary().to_dict(), allow_nan=False)


# -- a worker is killed at each point from folder to settlement ------------------------------------------------------


HALF = ["train", "people.toml", "--registry", URL, "--share", "0.5", "-q", "-o", "runs/one"]

#: where the worker is killed -> (object, its function, whether right before or right after)
NOT_BEGUN = {
    "before the note": (evidence, "note", "before"),
    "after the note": (Registry, "reserve", "before"),
    "after the reservation": (Registry, "reserve", "after"),
    "after plan.json": (run_folder, "write_json", "before"),
}
NO_LEDGER = {"after run.json": (RunFolder, "create", "after"), "after the key": (RunFolder, "write_key", "after")}
BEGUN = {
    "after the ledger": (Ledger, "__init__", "after"),
    "before it begins": (Registry, "begin", "before"),
    "after it began": (Registry, "begin", "after"),
    "before it is settled": (Registry, "settle", "before"),
    "after it is settled": (Registry, "settle", "after"),
}


def kill(target, name, when):
    """Train in a process that is killed there."""
    pid = os.fork()
    if pid == 0:
        function = getattr(target, name)

        def dies(*arguments, **options):
            if when == "after":
                function(*arguments, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(target, name, dies)
        try:
            program.epsilons(*HALF)
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "the worker never got there"


def used():
    with Registry(URL) as registry:
        assert registry.verify().is_right
        return registry.account(IDS).used_share


def states():
    with Registry(URL) as registry:
        return sorted((run.state, run.charged) for run in registry.summary().runs)


#: These are in every run of the tests.
SOME = ("after the reservation", "after the key", "before it begins", "before it is settled")
POINTS = [
    pytest.param(point, id=name, marks=[] if name in SOME else [pytest.mark.slow])
    for name, point in (NOT_BEGUN | NO_LEDGER | BEGUN).items()
]


@pytest.mark.parametrize("point", POINTS)
def test_a_run_that_was_killed_goes_on_and_is_charged_once(people, point):
    kill(*point)
    outcome = program.epsilons(*HALF, "--resume")
    assert outcome.code == 0, outcome
    assert used() == pytest.approx([0.5] * 60, rel=1e-3)
    assert [run for run in states() if run != ("cancelled", 0)] == [("settled", 20)]
    assert not Path("runs/one/reservation.json").exists()
    assert not Path("runs/one/secret").exists()


@pytest.mark.slow
@pytest.mark.parametrize("point", (FEW := NOT_BEGUN | NO_LEDGER).values(), ids=FEW)
def test_a_run_that_was_killed_before_it_began_is_given_up_without_a_charge(people, point):
    kill(*point)
    outcome = program.epsilons("registry", "settle", URL, "runs/one", "--abandon")
    assert outcome.code == 0 or "holds no run" in outcome.err, outcome
    assert (used() == 0).all()
    assert [run for run in states() if run != ("cancelled", 0)] == []


def test_a_run_that_never_began_says_what_to_do(people):
    kill(*NOT_BEGUN["after the reservation"])
    assert states() == [("reserved", None)]
    program.epsilons(*HALF).is_refused(2, "never began", "--resume", "--abandon")
    program.epsilons("registry", "settle", URL, "runs/one").is_refused(2, "never began", "--resume", "--abandon")
    program.epsilons("registry", "show", URL).succeeded("--cancel NAME")
    program.epsilons("train", "people.toml", "-o", "runs/one", "--resume").is_refused(2, "--registry URL")
    assert states() == [("reserved", None)]


def test_a_reservation_of_a_copy_that_began_is_not_given_back(people):
    kill(*NOT_BEGUN["after the reservation"])
    name = re.search(r'"run": "(.*?)"', Path("runs/one/reservation.json").read_text()).group(1)
    with Registry(URL) as registry:
        begin(registry, name)
    program.epsilons(*HALF, "--resume").is_refused(3, "has begun")
    assert states() == [("running", None)]


def test_an_error_of_the_registry_while_it_reserves_leaves_the_note_that_names_it(people, monkeypatch):
    """The answer of the database is lost: the reservation was made, and cannot be given back now."""
    reserve_ = Registry.reserve

    def lost(*arguments, **options):
        reserve_(*arguments, **options)
        raise RegistryError("The registry's database failed.")

    def away(*arguments, **options):
        raise RegistryError("The registry's database cannot be reached.")

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "reserve", lost)
        patch.setattr(Registry, "cancel", away)
        program.epsilons(*HALF).is_refused(2, "database failed")
    assert states() == [("reserved", None)]
    program.epsilons(*HALF, "--resume").succeeded()
    assert used() == pytest.approx([0.5] * 60, rel=1e-3)


def test_a_refused_reservation_leaves_no_folder(people):
    with Registry(URL) as registry:
        reserve(registry, "all", IDS, [0] * 60, table([3.0], steps=20), project="other")
        registry.set_quota("x", 0.01)
    program.epsilons(*HALF, "--project", "x").is_refused(3, "quota")
    assert not Path("runs/one").exists()


def test_an_officer_signs_the_plan_on_accounts_before_the_training_and_no_other_is_charged(people):
    epsilons("sign", "--new-key", "officer.pem").succeeded()
    public = signatures.private_key(Path("officer.pem"))[1]
    config = Path("people.toml")
    config.write_text(config.read_text() + f'[privacy]\nsigned_by = ["{public}"]\n')
    making = ("plan", "people.toml", "--registry", URL, "--share", "0.5", "-q", "-o")
    epsilons(*making, "plan.json", "--html", "plan.html").succeeded()
    before = shown()
    asked = ("--share", "0.5", "-o", "runs/one", "--plan", "plan.json", "--continue")
    train(*asked).is_refused(3, "is not signed with the key")
    sign = ("sign", "plan.json", "--key", "officer.pem", "--name", "A. Meyer", "--role", "board")
    epsilons(*sign).succeeded("signed the plan")
    train("--share", "0.5", "--dry-run").is_refused(3, "must be saved")
    train("--share", "0.25", *asked[2:]).is_refused(2, "not the plan that this run would be charged for")
    assert shown() == before
    train(*asked).succeeded()
    epsilons("verify", "runs/one").succeeded("A. Meyer (board) signed the plan on")
    assert Plan.load(Path("runs/one/plan.json")).digest == Plan.load(Path("plan.json")).digest
    train(*asked).succeeded()  # it is finished
    spent = shown()
    refused = "what they have left, settings or versions changed since it was made. Nothing was charged."
    train("--share", "0.5", "-o", "runs/two", "--plan", "plan.json").is_refused(2, refused)
    assert (shown(), Path("runs/two").exists()) == (spent, False)
    assert spent != before
    epsilons(*making, "plan.json").is_refused(2, "plan.json is signed")
    epsilons(*making, "next.json").succeeded()
    epsilons(sign[0], "next.json", *sign[2:]).succeeded()
    train_until(2, "--share", "0.5", "-o", "runs/two", "--plan", "next.json")
    goes_on = ("--share", "0.5", "-o", "runs/two", "--continue", "--plan")
    train(*goes_on, "plan.json").is_refused(2, "not the plan that this run")
    train(*goes_on, "next.json").succeeded()


def test_one_person_who_withdraws_makes_a_signed_plan_another(people):
    asked = ("people.toml", "--registry", URL, "--share", "0.5", "-q")
    epsilons("plan", *asked, "-o", "plan.json").succeeded()
    registry("withdraw", "--id", IDS[0]).succeeded()
    epsilons("train", *asked, "-o", "runs/one", "--plan", "plan.json").is_refused(2, "who takes part")
    epsilons("plan", "people.toml", "--registry", "sqlite:///none.db", "--share", "0.5").is_refused(2, "none.db")
    epsilons("plan", "--share", "0.5").is_refused(2, "need a config")
