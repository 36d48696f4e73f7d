"""`epsilons registry`, and `epsilons train --registry`: every command, bad input, and that no output names anybody."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import old_registries
import program
from epsilons.cli import registry_people, train_config
from epsilons.errors import EpsilonsWarning
from epsilons.ledger.account import NO_LINE, line_hash
from epsilons.ledger.ledger import Ledger
from epsilons.planning import Plan
from epsilons.registry import Registry, Reservation
from program import files
from registries import VISITS, begin, outside, reserve, table

URL = "sqlite:///people.db"
PASSWORD = "xyzzy"
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


@pytest.fixture
def interrupted(people, monkeypatch):
    """runs/people-1, interrupted after three of 140 steps, with a block of 64 charged."""
    fit = train_config.fit

    def stop(private):
        if private.updates == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(train_config, "fit", lambda *a, callbacks, **k: fit(*a, callbacks=[*callbacks, stop], **k))
    train("--share", "0.5", "--set", "training.steps=140").is_refused(130, "--registry URL", "--resume")
    monkeypatch.setattr(train_config, "fit", fit)


# -- people ------------------------------------------------------------------------------------------------------------


def test_an_import_enrols_and_changes_only_when_asked(people):
    registry("import", "wishes.csv", "--person", "id").succeeded("Fewer than 20 people of this list are new")
    before = Path("wishes.csv").read_text()
    Path("wishes.csv").write_text(before.replace(",1\n", ",2\n") + "zz900,1\n")
    registry("import", "wishes.csv", "--person", "id").is_refused(3, "30 of 61", "No budget was written", "--change")
    assert shown()["people"] == "60"
    registry("import", "wishes.csv", "--person", "id", "--change").succeeded("have another budget")
    assert [row["epsilon"] for row in shown()["wishes"]] == [None, 4.0]  # the one new person joins another row
    assert shown()["people"] == "61"


def test_people_who_withdrew_are_not_brought_back_by_an_import(people):
    registry("withdraw", "--person", "zz007").succeeded("Withdrawn")
    Path("wishes.csv").write_text(Path("wishes.csv").read_text().replace(",4\n", ",3\n"))
    registry("import", "wishes.csv", "--person", "id", "--change").succeeded("withdrew")
    with Registry(URL) as opened:
        assert opened.account(IDS).withdrawn.sum() == 1
        assert opened.account(["zz007"]).epsilon == [4.0]
    registry("change", "--person", "zz007", "--epsilon", "3").succeeded("changed")
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
    assert shown()["people"] == "60"


def test_tiers_are_written_either_way(people):
    Path("tiers.csv").write_text("id,tier\nzz901,strict\nzz902,open\n")
    for i, tiers in enumerate(("strict=1,open=8", "strict:1, open:8")):
        epsilons("registry", "create", f"sqlite:///{i}.db").succeeded()
        url, flags = f"sqlite:///{i}.db", ["--person", "id", "--column", "tier", "--tiers", tiers]
        epsilons("registry", "import", url, "tiers.csv", *flags).succeeded()
        with Registry(url) as made:
            assert made.account(["zz901", "zz902"]).epsilon.tolist() == [1.0, 8.0]


def test_a_list_with_strangers_withdraws_the_others_and_says_so(people, monkeypatch):
    Path("leaving.csv").write_text("name,id\nx,zz001\ny,zz999\nz,zz002\n")
    registry("withdraw", "--file", "leaving.csv").is_refused(2, "--column")
    registry("withdraw", "--file", "leaving.csv", "--column", "id").is_refused(3, "Fewer than 20", "others were")
    monkeypatch.setattr("sys.stdin", io.StringIO("zz003\n"))
    registry("withdraw", "--person", "-").succeeded()
    registry("withdraw", "--person", "zz999").is_refused(3, "is enrolled")
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
    registry("quota", "cardiology", "0.5").succeeded("0.5")
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
    assert shown()["wishes"][-1]["people"] == 31


def test_one_persons_account_is_for_a_terminal_or_json(people):
    with Registry(URL) as opened:
        reserve(opened, "one", IDS[:30], [0] * 30, table([20.0]), project="cardiology")
        share = float(opened.account([IDS[4]]).used_share[0])
    registry("show", "--person", IDS[4]).is_refused(2, "terminal")
    outcome = registry("show", "--person", IDS[4], "--json")
    account = json.loads(outcome.out)
    assert "CONFIDENTIAL" in outcome.err
    assert account["epsilon"] == 1.0
    assert account["used"] == pytest.approx(share, abs=1e-6)
    assert [(run["run"], run["used"]) for run in account["runs"]] == [("one", account["used"])]
    assert json.loads(registry("show", "--person", IDS[50], "--json").out)["runs"] == []


# -- evidence ----------------------------------------------------------------------------------------------------------


def test_a_restored_copy_and_a_rewritten_chain_are_found(people):
    shutil.copy("people.db", "backup.db")
    registry("withdraw", "--person", IDS[0])
    registry("export", "-o", "june.json").succeeded()
    registry("export", "-o", "june.json").is_refused(2, "exists")
    registry("withdraw", "--person", IDS[1])
    registry("verify", "--since", "june.json").succeeded("continues the export")
    registry("verify").succeeded("--since")
    now = Path("people.db").read_bytes()
    shutil.copy("backup.db", "people.db")
    registry("verify").succeeded()
    registry("verify", "--since", "june.json").is_refused(3, "restored from an older copy")
    for one in IDS[2:5]:
        registry("withdraw", "--person", one)
    registry("verify", "--since", "june.json").is_refused(3, "rewritten")
    Path("people.db").write_bytes(now)
    outside((URL,), "update wish set epsilon = 9.0 where id = 1")
    registry("verify").is_refused(3, "altered")
    epsilons("registry", "create", "sqlite:///other.db").succeeded()
    epsilons("registry", "verify", "sqlite:///other.db", "--since", "june.json").is_refused(3, "another registry")


def test_a_signed_export_cannot_be_changed(people):
    pytest.importorskip("cryptography")
    from cryptography.hazmat.primitives import serialization as ser
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    for name in ("officer", "other"):
        key = Ed25519PrivateKey.generate()
        private = key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, ser.NoEncryption())
        public = key.public_key().public_bytes(ser.Encoding.PEM, ser.PublicFormat.SubjectPublicKeyInfo)
        Path(f"{name}.pem").write_bytes(private)
        Path(f"{name}-public.pem").write_bytes(public)
    registry("export", "-o", "a.json", "--sign", "officer.pem").succeeded()
    registry("verify", "--since", "a.json", "--signer", "officer-public.pem").succeeded()
    registry("verify", "--since", "a.json", "--signer", "other-public.pem").is_refused(3, "another key")
    values = json.loads(Path("a.json").read_text())
    Path("b.json").write_text(json.dumps(values | {"people": "61"}))
    registry("verify", "--since", "b.json").is_refused(3, "changed after it was signed")
    del values["signature"]
    Path("c.json").write_text(json.dumps(values))
    registry("verify", "--since", "c.json", "--signer", "officer-public.pem").is_refused(3, "not signed")
    registry("export", "-o", "d.json", "--sign", "officer-public.pem").is_refused(2, "private Ed25519 key")


# -- runs --------------------------------------------------------------------------------------------------------------


def test_runs_of_two_folders_share_lifetime_budgets(people):
    train("--share", "0.3", "--project", "cardiology").succeeded()
    registry("withdraw", "--person", IDS[0]).succeeded()
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
    epsilons("train", "people.toml", "--registry", absolute, "--share", "0.25", "--project", "x").succeeded("levels")
    [run] = shown()["runs"]
    run_json = json.loads(Path("runs/people-1/run.json").read_text())
    assert run_json["registry"] == {"id": shown()["registry"], "run": run["run"]}
    assert run["run"].startswith("people-1-")
    for file in files(Path("runs")):
        assert not re.search(rb"zz\d|sqlite:", (Path("runs") / file).read_bytes()), file
    epsilons("report", "runs/people-1").succeeded()
    for name in ("report.json", "report-release.json"):
        report = json.loads(Path(f"runs/people-1/{name}").read_text())
        assert report["registry"] == shown()["registry"]
        assert shown()["registry"] in report["guarantee"]
        assert "level" in " ".join(report["summary"])
        assert "None of it was charged" in " ".join(report["summary"])


def test_an_interrupted_run_resumes_with_the_people_that_it_reserved(interrupted):
    registry("withdraw", "--person", IDS[0])
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


def test_a_run_that_used_everything_up_can_still_resume(people, monkeypatch):
    fit = train_config.fit

    def stop(private):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_config, "fit", lambda *a, callbacks, **k: fit(*a, callbacks=[*callbacks, stop], **k))
    train("--share", "1").is_refused(130)
    monkeypatch.setattr(train_config, "fit", fit)
    train("--resume").succeeded()
    assert shown()["runs"][0]["charged"] == 20


def test_an_abandoned_run_gives_back_whole_blocks_and_never_resumes(interrupted):
    run = Path("runs/people-1")
    registry("settle", run).is_refused(2, "not closed", "--abandon")
    with Registry(URL) as opened:
        reserved = opened.account(IDS).used_share
    assert (run / "secret/key").exists()
    registry("settle", run, "--abandon").succeeded("64 of 140")
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


def test_after_settling_the_message_says_which_commands_come_next(interrupted):
    registry("settle", "runs/people-1", "--abandon").succeeded("epsilons registry verify URL", "export URL -o FILE")
    epsilons("train", "people.toml", "--registry", URL, "--share", "0.2").succeeded("verify URL", "export URL -o FILE")


def test_of_two_copies_only_the_one_that_went_on_settles(interrupted):
    shutil.copytree("runs/people-1", "copy")
    train("--resume", "-o", "copy").succeeded()
    registry("settle", "runs/people-1", "--abandon").is_refused(3, "another key")
    [run] = shown()["runs"]
    assert run["state"] == "settled"
    assert run["charged"] == 140


def test_a_copy_that_lost_its_right_settles_nothing(interrupted, monkeypatch):
    """The copy goes on under a new key and is interrupted; the first folder cannot settle at fewer steps."""
    shutil.copytree("runs/people-1", "copy")
    fit = train_config.fit

    def stop(private):
        if private.updates == 70:
            raise KeyboardInterrupt

    monkeypatch.setattr(train_config, "fit", lambda *a, callbacks, **k: fit(*a, callbacks=[*callbacks, stop], **k))
    train("--resume", "-o", "copy").is_refused(130)
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
    lines, last = [], NO_LINE
    for text in ledger.read_text().splitlines():
        line = json.loads(text) | {"prev": last}
        if line["kind"] == "close" and "charged" in facts:
            line["charged"] = [facts["charged"]]
        if line["kind"] == "open" and "more" in facts:
            line["more"] = facts["more"]
        if line["kind"] == "key" and "key" in facts:
            line["key"] = facts["key"]
        last = line["hash"] = line_hash(line)
        lines.append(json.dumps(line) + "\n")
    return "".join(lines)


def test_migration_and_quarantine_say_what_comes_next(people):
    registry("migrate").succeeded("verify URL")
    registry("quarantine", "--event", "3", "--reason", "why").is_refused(3, "Name every event that is wrong")
    registry("quarantine", "--event", "300", "--reason", "why").is_refused(3, "Name every event that is wrong")
    old_registries.downgrade(URL, [{"kind": "begin", "time": "2026-01-01T00:00:00+00:00", "run": "x", "key": "y"}])
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
    first, second = (json.loads(Path(f"runs/people-{i}/run.json").read_text())["eval_data"]["records"] for i in (1, 2))
    assert second == first - 10


def test_an_attack_on_registered_people_is_refused(people):
    train("--share", "0.2").succeeded()
    epsilons("attack", "runs/people-1", "--shadows", "8").is_refused(2, "cannot charge it")
    epsilons("plan", "people.toml", "--set", "registry.share=0.5").is_refused(2, "--dry-run")


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
    on("withdraw", "--person", IDS[0])
    on("change", "--person", IDS[1], "--epsilon", "5")
    on("settle", "runs/people-1")
    on("export", "-o", "a.json")
    on("verify", "--since", "a.json")
    assert json.loads(on("show", "--json").out)["runs"][0]["state"] == "settled"
    assert json.loads(on("show", "--person", IDS[0], "--json").out)["withdrawn"]


def test_what_a_subject_states_is_carried_out(template, postgres, tmp_path):
    import psycopg

    shutil.copytree(template, ".", dirs_exist_ok=True, ignore=shutil.ignore_patterns("people.db*"))
    url, flags = postgres.place(), ("--pepper", tmp_path / "key")
    epsilons("registry", "create", url, *flags).succeeded()
    epsilons("registry", "import", url, "wishes.csv", "--person", "id", *flags).succeeded()
    with psycopg.connect(url, autocommit=True) as owner:
        owner.execute(epsilons("registry", "roles").out)
        owner.execute("insert into request (role, epsilon, delta) values ('tom', null, null)")
    epsilons("registry", "admit", url, "tom", "--person", IDS[3], *flags).succeeded("Admitted")
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
    "both": (["registry", "withdraw", URL, "--person", "zz001", "--file", "wishes.csv"], 2, "either"),
    "neither": (["registry", "withdraw", URL], 2, "either"),
    "blank id": (["registry", "withdraw", URL, "--person", " "], 2, "needs an id"),
    "stranger": (["registry", "show", URL, "--person", "zz999", "--json"], 3, "not enrolled"),
    "small wish": (["registry", "change", URL, "--person", "zz001", "--epsilon", "0.001"], 2, "too small"),
    "nan": (["registry", "change", URL, "--person", "zz001", "--epsilon", "nan"], 2, "above 0"),
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
