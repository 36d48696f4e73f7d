"""Signatures: a changed byte, a wrong key, a replay or an altered name is found, and `train` demands a signed plan."""

from __future__ import annotations

import base64
import json
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from epsilons import Budgets, Plan, Recipe, plan
from epsilons.errors import EpsilonsWarning, InputError, PromiseError, RunError
from epsilons.ledger import signatures
from epsilons.ledger.run_folder import RunFolder
from program import CONFIG, change, epsilons, people

pytest.importorskip("torch")

RUN, RELEASE = Path("runs/people-1"), Path("runs/people-1/release")
ROLE = "data protection officer"


@pytest.fixture(scope="module")
def signed(tmp_path_factory) -> Path:
    """A signed plan, a run under it and its release, both signed, and two keys. No test changes it."""
    folder: Path = tmp_path_factory.mktemp("signed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("people.csv").write_text(people())
        public = [signatures.new_key(Path(name)) for name in ("officer.pem", "board.pem")]
        demand = f"[privacy]\nsigned_by = {json.dumps([public[0], signatures.fingerprint(public[1])])}"
        config = CONFIG.replace('drop = ["id"]', 'drop = ["id"]\nread_off = []').replace("[privacy]", demand)
        Path("people.toml").write_text(config)
        epsilons("plan", "people.toml", "-q", "-o", "plan.json").succeeded()
        for key in ("officer.pem", "board.pem"):
            signatures.sign(Path("plan.json"), Path(key), "A. Meyer", ROLE)
        epsilons("train", "people.toml", "-q", "--plan", "plan.json").succeeded()
        signatures.sign(RUN, Path("officer.pem"), "A. Meyer", ROLE)
        epsilons("release", RUN, "-q").succeeded()
        signatures.sign(RELEASE, Path("officer.pem"), "A. Meyer", ROLE)
    return folder


@pytest.fixture
def copy(signed, tmp_path, monkeypatch) -> Path:
    shutil.copytree(signed, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def wrong(path: Path) -> list[str | None]:
    return [one.wrong for one in signatures.signatures(path)]


def flipped(file: Path, step: int = 1) -> Iterator[int]:
    """The file with one other byte at a time; afterwards as it was."""
    content = file.read_bytes()
    for place in range(0, len(content), step):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        yield place
    file.write_bytes(content)


# -- what was signed is as it was --------------------------------------------------------------------------------------


def test_what_is_signed_is_verified_and_named(copy):
    for path, what in ((Path("plan.json"), "plan"), (RUN, "run"), (RELEASE, "release")):
        epsilons("verify", path).succeeded(f"A. Meyer ({ROLE}) signed the {what} on")
    assert epsilons("verify", RUN).out.count("signed the plan") == 2  # before the training, as run.json says


def test_reports_list_who_signed_what_when_and_whether_it_is_valid_now(copy):
    def shown() -> list[list[tuple[Any, ...]]]:
        epsilons("report", RUN, "-q").succeeded()
        made = [json.loads((RUN / f"report{version}.json").read_text()) for version in ("", "-release")]
        times = {len(one["date"]) for one in made[0]["signatures"] if one["date"]}
        assert times == {len("2030-01-31 09:00 UTC")}  # the release has days: compared below
        for one in made[0]["signatures"]:
            one["date"] = one["date"] and one["date"][:10]
        keys = "of", "name", "role", "date", "key", "valid"
        return [[tuple(one[key] for key in keys) for one in values["signatures"]] for values in made]

    public = {
        name: signatures.fingerprint(signatures.private_key(Path(name))[1]) for name in ("officer.pem", "board.pem")
    }
    day = signatures.signatures(RUN)[0].values["date"][:10]
    by = {key: ("A. Meyer", ROLE, day, value) for key, value in public.items()}
    plans = sorted(("plan", *one, True) for one in by.values())
    inside, outside = shown()
    assert inside == outside
    assert (inside[0], sorted(inside[1:3])) == (("run", *by["officer.pem"], True), plans)
    assert inside[3:] == [("release", *by["officer.pem"], True)]
    (RELEASE / "README.md").write_text("x")
    assert shown()[0][3:] == [("release", *by["officer.pem"], False)]
    for page in (RUN / "report.html", RUN / "report-release.html"):
        text = " ".join(re.sub("<.*?>", "", page.read_text()).split())
        assert text.count(f"A. Meyer ({ROLE}) signed the ") == 4
        assert (text.count("The signature is valid"), text.count("NOT valid: the release was changed")) == (3, 1)
        hidden = json.loads(next(RUN.glob("run.*.sig")).read_text())
        assert hidden["signature"] not in text
        assert page.name == "report.html" or hidden["files"]["plan.json"] not in text
    next(RELEASE.glob("*.sig")).write_text("{}")
    assert shown()[1][3:] == [("release", None, None, None, None, False)]
    for file in RELEASE.glob("*.sig"):
        file.unlink()
    assert len(shown()[0]) == 3


def test_the_digest_on_the_page_of_a_plan_is_the_one_that_sign_verify_and_ledger_name(copy):
    epsilons("plan", "people.toml", "-q", "--html", "plan.html").succeeded()
    digest = Plan.load(Path("plan.json")).digest
    shown = re.findall(r"<dt>(digest of .*?)</dt><dd class=.hash.>(.*?)</dd>", Path("plan.html").read_text())
    assert [found for _, found in shown] == [digest]
    assert "that in plan.json is of the whole file" in shown[0][0]
    assert json.loads(Path("plan.json").read_text())["digest"] != digest
    assert json.loads((RUN / "ledger.jsonl").read_text().split("\n")[0])["plan"] == digest
    line = f"{digest} digest of the plan's numbers, as on its page and in the ledger; internal"
    as_me = ("--new-key", "mine.pem", "--name", "B. Berg", "--role", "Chair")
    epsilons("sign", "plan.json", *as_me).succeeded(line)
    assert " ".join(epsilons("verify", "plan.json").out.split()).count(line) == 3
    assert digest not in epsilons("verify", RELEASE).out


def test_a_signature_that_fits_is_not_replaced_and_a_signed_plan_is_not_overwritten(copy):
    for path in (Path("plan.json"), RUN, RELEASE):
        sign = ("sign", path, "--key", "officer.pem", "--name", "B. Berg", "--role", "Chair")
        epsilons(*sign).is_refused(2, "is signed with this key")
    epsilons("plan", "people.toml", "-q", "-o", "plan.json").is_refused(2, "plan.json is signed")
    epsilons("plan", "people.toml", "-q", "-o", "plan").succeeded()  # another file, whose name begins alike
    Path("plan.json").write_bytes(Path("plan.json").read_bytes() + b"\n")
    epsilons("sign", "plan.json", "--key", "officer.pem", "--name", "B. Berg", "--role", "Chair").succeeded()


def test_the_digest_is_what_sha256sum_prints(copy):
    import hashlib

    lines = [f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.name}\n" for f in sorted(RELEASE.glob("*[!g]"))]
    (one,) = signatures.signatures(RELEASE)
    assert one.values["digest"] == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_every_changed_byte_of_a_plan_is_found(copy):
    assert wrong(Path("plan.json")) == [None, None]
    for _ in flipped(Path("plan.json")):
        assert wrong(Path("plan.json")) == ["plan.json was changed since"] * 2
    Path("plan.json").write_bytes(Path("plan.json").read_bytes() + b"\n")
    epsilons("verify", "plan.json").is_refused(3, "plan.json was changed since")


def test_every_changed_byte_of_a_release_is_found(copy):
    for file in RELEASE.glob("*[!g]"):
        for _ in flipped(file):
            assert wrong(RELEASE) == [f"{file.name} was changed since"]
    assert wrong(RELEASE) == [None]


def test_a_changed_byte_of_the_evidence_of_a_run_is_found(copy):
    seen = signatures.seen(RUN).files
    assert {"plan.json", "run.json", "ledger.jsonl", "model.json", "model.safetensors", "metrics.jsonl"} == set(seen)
    for name in seen:
        for _ in flipped(RUN / name, step=17):
            assert wrong(RUN) == [f"{name} was changed since"]


def test_an_audit_of_a_signed_run_warns_before_it_begins(copy):
    from epsilons.auditing import audit

    def begin() -> None:
        with pytest.raises(InputError, match="alpha"):
            audit(RUN, alpha=0.7)

    with pytest.warns(EpsilonsWarning, match=r"is signed, and audit\.json will be new"):
        begin()
    for file in RUN.glob("run.*.sig"):
        file.unlink()
    begin()  # warnings are errors in tests


def test_files_that_come_or_go_are_found_and_those_made_anew_are_not(copy):
    shutil.copytree(copy / "runs", "again")
    epsilons("report", "again/people-1", "-q").succeeded()
    assert wrong(Path("again/people-1")) == [None]
    (RUN / "audit.json").write_text("{}")
    assert wrong(RUN) == ["audit.json is new since"]
    (RUN / "audit.json").unlink()
    (RUN / "metrics.jsonl").unlink()
    assert wrong(RUN) == ["metrics.jsonl is missing since"]
    (RELEASE / "extra").mkdir()
    assert wrong(RELEASE) == [None]
    (RELEASE / "extra/code.sig").write_text("x")
    assert wrong(RELEASE) == ["extra/code.sig is new since"]
    (Path("again/people-1/metrics.jsonl")).write_text((RUN.parent / "people-1/plan.json").read_text())
    assert wrong(Path("again/people-1")) == ["metrics.jsonl was changed since"]


def test_a_signed_plan_that_the_run_is_not_trained_under_is_named(copy):
    change("signed_by = ", "# signed_by = ")
    told = " ".join(epsilons("train", "people.toml", "-q").err.split())
    assert "plan.json is signed, and holds the plan of this run." in told
    assert "give --plan plan.json" in told
    epsilons("verify", "runs/people-2").is_refused(2, "Nobody signed", "epsilons train CONFIG --plan plan.json")
    assert "another plan" in epsilons("train", "people.toml", "-q", "--set", "training.steps=3").err
    assert "is signed" not in epsilons("train", "people.toml", "-q", "--plan", "plan.json").err
    epsilons("verify", "runs/people-4").succeeded("A. Meyer")
    Path("plan.json").write_text(Path("plan.json").read_text() + " ")  # no signature of it fits
    assert "is signed" not in epsilons("train", "people.toml", "-q").err


# -- the signature is what its key signed ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["name", "role", "date", "digest", "public_key", "of", "plan", "files", "schema"])
def test_an_altered_value_of_a_signature_is_found(copy, key):
    file = next(RUN.glob("run.*.sig"))
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {key: "x"}))
    assert wrong(RUN) == [signatures.CHANGED]
    epsilons("verify", RUN).is_refused(3, signatures.CHANGED)
    file.write_text(json.dumps({name: value for name, value in values.items() if name != key}))
    assert wrong(RUN) == [signatures.CHANGED]


def test_every_changed_byte_of_a_signature_is_found_or_changes_no_value(copy):
    file = next(RELEASE.glob("release.*.sig"))
    values = json.loads(file.read_text())
    for _ in flipped(file):
        if wrong(RELEASE) == [None]:
            assert json.loads(file.read_text()) == values


@pytest.mark.parametrize("key", ["document", "name", "role", "date", "of", "files"])
@pytest.mark.parametrize("value", [None, 3, [["a", "b"]], "x"])
def test_a_signer_who_signs_values_of_another_form_breaks_nothing(copy, key, value):
    file = next(RUN.glob("run.*.sig"))
    own, _ = signatures.private_key(Path("officer.pem"))
    values = json.loads(file.read_text()) | {key: value}
    values["signature"] = signatures.as_text(own.sign(signatures.body(values)))
    file.write_text(json.dumps(values))
    done = epsilons("verify", RUN)
    if value == "x" and key in ("name", "role", "date"):
        done.succeeded("x")
    else:
        done.is_refused(3)


def test_a_signature_of_another_key_under_a_stolen_name_is_found(copy):
    """The signer keeps the public key of somebody else in the file."""
    file = next(RUN.glob("run.*.sig"))
    values = json.loads(file.read_text())
    own, _ = signatures.private_key(Path("board.pem"))
    values["signature"] = signatures.as_text(own.sign(signatures.body(values)))
    file.write_text(json.dumps(values))
    assert wrong(RUN) == [signatures.CHANGED]


def test_a_signature_does_not_hold_for_another_plan_or_kind(copy):
    other = plan(Budgets([1.0] * 60), Recipe(3, 20, 1.0), accountant="rdp")
    other.save("other.json")
    file = next(Path().glob("plan.json.*.sig"))
    shutil.copy(file, file.name.replace("plan.json", "other.json"))
    assert wrong(Path("other.json")) == ["other.json was changed since"]
    shutil.copy(file, RUN / file.name.replace("plan.json", "run"))
    assert "is new since" in " ".join(map(str, wrong(RUN)))
    assert wrong(Path("plan.json")) == [None, None]


def test_a_signer_can_be_demanded(copy):
    public = {name: signatures.private_key(Path(name))[1] for name in ("officer.pem", "board.pem")}
    epsilons("verify", RUN, "--signer", public["officer.pem"]).succeeded()
    epsilons("verify", RUN, "--signer", signatures.fingerprint(public["officer.pem"])).succeeded()
    epsilons("verify", RUN, "--signer", public["board.pem"]).is_refused(3, "not signed with the key")
    for name in ("officer.pem", "board.pem"):
        file = Ed25519PublicKey.from_public_bytes(base64.b64decode(public[name]))
        Path(f"public-{name}").write_bytes(file.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    epsilons("verify", RUN, "--signer", "public-officer.pem").succeeded()
    epsilons("verify", RUN, "--signer", "public-board.pem").is_refused(3, "not signed with the key")
    epsilons("verify", RUN, "--signer", "officer.pem").is_refused(2, "no public Ed25519 key")
    shown: list[dict[str, Any]] = json.loads(epsilons("verify", RELEASE, "--json").out)
    assert [(one["name"], one["wrong"]) for one in shown] == [("A. Meyer", None)]


# -- signing -----------------------------------------------------------------------------------------------------------


def test_a_new_key_is_for_its_owner_and_replaces_no_file(copy):
    epsilons("sign", "--new-key", "mine.pem").succeeded("public key", "fingerprint", "keep it secret")
    assert stat.S_IMODE(Path("mine.pem").stat().st_mode) == 0o600
    epsilons("sign", "--new-key", "mine.pem").is_refused(2, "needs a new file")
    epsilons("sign", "plan.json", "--key", "mine.pem", "--name", "B", "--role", "board").succeeded("B (board) signed")
    assert len(signatures.signatures(Path("plan.json"))) == 3


def test_what_cannot_be_signed_is_refused(copy):
    as_me = ("--key", "officer.pem", "--name", "A", "--role", "b")
    epsilons("sign", "plan.json", "--key", "officer.pem", "--name", " ", "--role", "b").is_refused(2, "--name NAME")
    epsilons("sign", "plan.json", "--key", "people.csv", "--name", "A", "--role", "b").is_refused(2, "Ed25519")
    epsilons("sign", "plan.json", "--key", "none.pem", "--name", "A", "--role", "b").is_refused(2, "cannot be read")
    epsilons("sign", "runs", *as_me).is_refused(2, "no plan, run or release")
    epsilons("sign", "people.csv", *as_me).is_refused(2, "people.csv")
    epsilons("verify", "people.csv").is_refused(2, "Nobody signed people.csv")
    RunFolder(RUN).write_key(bytes(32))
    epsilons("sign", RUN, *as_me).is_refused(2, "not finished")
    (RELEASE / "README.md").write_text("x")
    with pytest.raises(RunError, match="not as it was released"):
        signatures.sign(RELEASE, Path("officer.pem"), "A", "b")


def test_keys_of_openssl_can_be_used_and_encrypted_ones_are_named(copy):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    key = ed25519.Ed25519PrivateKey.generate()
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    Path("locked.pem").write_bytes(key.private_bytes(*form, serialization.BestAvailableEncryption(b"x")))
    with pytest.raises(InputError, match="without a password"):
        signatures.private_key(Path("locked.pem"))


# -- train demands a signed plan ---------------------------------------------------------------------------------------


def test_a_plan_that_is_not_signed_as_demanded_is_not_trained(copy):
    def refused(*words: str, plan: bool = True) -> None:
        for dry in ((), ("--dry-run",)):
            given = ("--plan", "plan.json") if plan else ()
            epsilons("train", "people.toml", "-q", "-o", "new", *given, *dry).is_refused(3, *words)
        assert not Path("new").exists()

    refused("must be saved", plan=False)
    last = sorted(Path().glob("plan.json.*.sig"))[-1]
    aside = last.rename("aside")
    refused("plan.json is not signed with the key")
    aside.rename(last)
    Path("plan.json").write_text(Path("plan.json").read_text() + " ")
    refused("plan.json was changed since")
    change("signed_by", "signed_by = []\n#")
    epsilons("train", "people.toml", "-q", "-o", "new", "--plan", "plan.json").succeeded()


def test_a_run_goes_on_under_the_plan_that_was_signed(copy):
    epsilons("train", "people.toml", "-q", "--run-dir", RUN, "--resume").succeeded()
    settings = json.loads((RUN / "run.json").read_text())
    records = settings["metadata"]["signatures"]
    (RUN / "run.json").write_text(
        json.dumps(settings | {"metadata": settings["metadata"] | {"signatures": records[:1]}})
    )
    epsilons("train", "people.toml", "-q", "--run-dir", RUN, "--resume").is_refused(3, "is not signed with the key")
    records[1]["plan"] = "0" * 64
    (RUN / "run.json").write_text(json.dumps(settings))
    epsilons("train", "people.toml", "-q", "--run-dir", RUN, "--resume").is_refused(3, signatures.CHANGED)


def test_a_true_signature_of_another_plan_in_run_json_is_found(copy):
    other = plan(Budgets([1.0] * 60), Recipe(3, 20, 1.0), accountant="rdp")
    with pytest.raises(PromiseError, match="another plan"):
        signatures.check_signed(signatures.of_run(RunFolder(RUN), other), [], "the plan")
    settings = json.loads((RUN / "run.json").read_text())
    settings["metadata"]["signatures"] = [json.loads(next(RUN.glob("run.*.sig")).read_text())]
    (RUN / "run.json").write_text(json.dumps(settings))
    (found,) = signatures.of_run(RunFolder(RUN), Plan.load(RUN / "plan.json"))
    assert found.wrong == signatures.OTHER  # it is of a run, and nobody saw the plan before


def test_the_folder_that_counts_runs_can_be_signed(copy):
    change("[privacy]", '[privacy]\nruns = 2\nplan_folder = "tuning"')
    epsilons("train", "people.toml", "-q").is_refused(3, "tuning is not signed with the key")
    epsilons("plan", "people.toml", "-q", "-o", "tuning").succeeded()
    for key in ("officer.pem", "board.pem"):
        epsilons("sign", "tuning", "--key", key, "--name", "A", "--role", "b").succeeded("tuning/plan.json.")
    epsilons("train", "people.toml", "-q", "-o", "one").succeeded()
    epsilons("verify", "one").succeeded("A (b) signed the plan on")


@pytest.mark.parametrize("key", ["x", "A" * 44, "0" * 31, "0" * 64])
def test_what_is_no_key_is_refused_in_a_config(copy, key):
    Path("people.toml").write_text(CONFIG.replace("[privacy]", f'[privacy]\nsigned_by = ["{key}"]'))
    epsilons("train", "people.toml").is_refused(2, "privacy.signed_by.0")
