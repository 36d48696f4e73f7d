"""The ledger: exactly the certified steps, each durable before it is allowed, and tampering is detected.

A killed process does not test fsync, because the page cache survives it: these tests record what was durable at each
fsync, and cut the file back to that.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pickle
import random
import sys
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from by_hand import a_phase, by_hand
from epsilons import Plan
from epsilons.errors import BudgetExceededError, EpsilonsError, LedgerError
from epsilons.ledger.ledger import BLOCK, Ledger, line_hash, read_account, read_charges


@functools.cache
def plan_of(*steps: int, noise_std: float = 4.0) -> Plan:
    """A plan by hand with one phase per number of steps, and loose budgets."""
    phases = [a_phase(steps=count, noise_std=noise_std) for count in steps]
    return by_hand(*phases, epsilons=(5.0, 9.0)).verify()


class Disk:
    """Replaces os.fsync, and keeps the content of each file when it was last made durable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.durable: dict[str, bytes] = {}
        self.real = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, handle: int) -> None:
        self.real(handle)
        path = os.readlink(f"/proc/self/fd/{handle}")
        if os.path.isdir(path):
            self.events.append(f"folder {path}")
        else:
            self.events.append(f"file {path}")
            self.durable[path] = Path(path).read_bytes()

    def crash(self, path: Path, folder: Path) -> Path:
        """The file after a power cut."""
        left = folder / "after-the-crash.jsonl"
        left.write_bytes(self.durable[str(path)])
        return left


@pytest.fixture
def disk(monkeypatch) -> Disk:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc to see which file is made durable")
    return Disk(monkeypatch)


def a_hash(text: str) -> str:
    """In the form of an update's."""
    return hashlib.md5(text.encode()).hexdigest()


def advance(ledger: Ledger, steps: int, records: bool = False) -> Ledger:
    """Charge the first steps of the first phase, and record the hashes of their updates."""
    for step in range(steps):
        ledger.charge(0, step)
        if records:
            ledger.record(0, step, f"{step:032x}")
    return ledger


# -- how many ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_on_disk", [True, False], ids=["on disk", "in memory"])
@pytest.mark.parametrize("steps", [1, BLOCK - 1, BLOCK, BLOCK + 1, 200])
def test_exactly_the_certified_steps_are_allowed_and_not_one_more(tmp_path, steps, is_on_disk):
    ledger = Ledger(plan_of(steps), tmp_path / "ledger.jsonl" if is_on_disk else None)
    assert ledger.allowed == (steps,)
    for step in range(steps):
        assert ledger.charged == (step,)
        ledger.charge(0, step)
    for _ in range(3):
        with pytest.raises(BudgetExceededError, match=f"All {steps} steps") as caught:
            ledger.charge(0, steps)
        assert caught.value.exit_code == 3
    assert ledger.charged == (steps,)
    ledger.close()
    if is_on_disk:
        assert read_charges(tmp_path / "ledger.jsonl", plan_of(steps)) == (steps,)


def test_each_phase_has_its_own_allowance(tmp_path):
    ledger = Ledger(plan_of(5, 3), tmp_path / "ledger.jsonl")
    for phase, steps in ((0, 5), (1, 3)):
        for step in range(steps):
            ledger.charge(phase, step)
        with pytest.raises(BudgetExceededError, match=f"phase {phase + 1}"):
            ledger.charge(phase, steps)
    assert ledger.charged == ledger.allowed == (5, 3)
    assert read_charges(tmp_path / "ledger.jsonl", plan_of(5, 3)) == (5, 3)


def test_a_step_that_was_charged_costs_nothing_again(tmp_path):
    ledger = Ledger(plan_of(100), tmp_path / "ledger.jsonl")
    for step in (0, 1, 2, 2, 1, 0, 2):
        ledger.charge(0, step)
    assert ledger.charged == (3,)
    assert read_charges(tmp_path / "ledger.jsonl", plan_of(100)) == (BLOCK,)


@pytest.mark.parametrize(("phase", "step"), [(0, BLOCK + 1), (0, 99), (0, 1000), (0, -1), (1, 0), (-1, 0), (-2, 0)])
def test_a_step_out_of_order_or_an_unknown_phase_is_refused_and_not_charged(tmp_path, phase, step):
    ledger = Ledger(plan_of(100), tmp_path / "ledger.jsonl")
    ledger.charge(0, 0)
    with pytest.raises(LedgerError, match="got"):
        ledger.charge(phase, step)
    assert ledger.charged == (1,)
    assert read_charges(tmp_path / "ledger.jsonl", plan_of(100)) == (BLOCK,)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(-2, 12)), max_size=60), st.integers(1, 20), st.booleans())
def test_no_step_is_allowed_that_was_not_charged(tmp_path_factory, requests, block, is_on_disk):
    plan = plan_of(7, 9)
    path = tmp_path_factory.mktemp("run") / "ledger.jsonl" if is_on_disk else None
    ledger = Ledger(plan, path, block=block)
    charged = [0, 0]  # up to the last step that was allowed
    for phase, step in requests:
        try:
            ledger.charge(phase, step)
        except (LedgerError, BudgetExceededError):
            continue
        charged[phase] = max(charged[phase], step + 1)
        assert 0 <= step < ledger.allowed[phase]
        assert list(ledger.charged) == charged
        if path:
            assert all(used <= paid for used, paid in zip(charged, read_charges(path, plan), strict=True))


@pytest.mark.parametrize("block", [0, -1])
def test_a_block_of_no_steps_is_refused(tmp_path, block):
    with pytest.raises(LedgerError, match="at least one step at a time, got"):
        Ledger(plan_of(7), tmp_path / "ledger.jsonl", block=block).charge(0, 0)


def test_a_closed_ledger_charges_nothing_more(tmp_path):
    ledger = Ledger(plan_of(100), tmp_path / "ledger.jsonl")
    ledger.charge(0, 0)
    ledger.close()
    ledger.close()
    for step in (0, 1):
        with pytest.raises(LedgerError, match="closed"):
            ledger.charge(0, step)


def test_a_ledger_in_memory_says_that_it_is_not_durable(tmp_path):
    assert not Ledger(plan_of(10)).durable
    assert "not durable" in str(Ledger(plan_of(10)))
    kept = Ledger(plan_of(10), tmp_path / "ledger.jsonl")
    assert kept.durable
    assert "not durable" not in str(kept)


# -- durable before use -----------------------------------------------------------------------------------------


def test_a_step_is_durable_before_it_is_allowed(tmp_path, disk):
    plan, path = plan_of(20), tmp_path / "ledger.jsonl"
    ledger = Ledger(plan, path, block=3)
    for step in range(20):
        ledger.charge(0, step)
        disk.events.append(f"update {step}")
        # From here on, the disk holds this step.
        (left,) = read_charges(disk.crash(path, tmp_path), plan)
        assert step < left <= 20
    order = [event.split()[0] for event in disk.events]
    # The opening lines and the folder, then one fsync before each block of three updates.
    assert order == ["file", "folder", *(["file", *["update"] * 3] * 6), "file", "update", "update"]


def test_the_file_s_name_is_durable_before_the_first_charge(tmp_path, disk):
    ledger = Ledger(plan_of(20), tmp_path / "ledger.jsonl")
    assert f"folder {tmp_path}" in disk.events
    assert read_charges(disk.crash(tmp_path / "ledger.jsonl", tmp_path), plan_of(20)) == (0,)
    ledger.charge(0, 0)


def test_after_a_crash_all_reserved_steps_count_as_charged(tmp_path, disk):
    plan, path = plan_of(150), tmp_path / "ledger.jsonl"
    ledger = Ledger(plan, path)
    expected = {0: 64, 63: 64, 64: 128, 127: 128, 128: 150, 149: 150}
    for step in range(150):
        ledger.charge(0, step)
        if step in expected:
            assert read_charges(disk.crash(path, tmp_path), plan) == (expected[step],)
    assert ledger.charged == (150,)


@pytest.mark.parametrize("lost", [True, False], ids=["power cut", "killed"])
def test_a_ledger_resumed_after_a_crash_charges_all_that_may_have_been_made(tmp_path, disk, lost):
    """60 updates were applied and 64 reserved; the lines of updates may be lost."""
    plan, path = plan_of(200), tmp_path / "ledger.jsonl"
    advance(Ledger(plan, path), 60, records=True)
    left = disk.crash(path, tmp_path)
    if not lost:
        left.write_bytes(path.read_bytes())
    again = Ledger.resume(plan, left)
    assert again.charged == (64,)
    again.close()
    assert read_account(left, plan).closed == (64,)
    assert Ledger.resume(plan, left).charged == (64,)
    assert "64 of 200 steps charged" in str(Ledger.resume(plan, left))


def test_steps_replayed_after_a_crash_are_charged_once(tmp_path, disk):
    plan, path = plan_of(200), tmp_path / "ledger.jsonl"
    advance(Ledger(plan, path), 60)
    left = disk.crash(path, tmp_path)
    again = Ledger.resume(plan, left)
    for step in range(20, 70):
        again.charge(0, step)
        assert again.charged == (max(64, step + 1),)
    again.close()
    assert read_account(left, plan).closed == (70,)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_process_that_is_killed_leaves_the_hash_of_every_update(tmp_path):
    """Without the hash, a replay with another sum under the same noise would reveal the difference."""
    plan, path = plan_of(200), tmp_path / "ledger.jsonl"
    child = os.fork()
    if child == 0:
        ledger = advance(Ledger(plan, path), 60, records=True)  # noqa: F841  # open until the process ends
        os._exit(9)  # without writing buffers
    os.waitpid(child, 0)
    again = Ledger.resume(plan, path)
    for step in range(60):
        assert again.record(0, step, f"{step:032x}")
        assert not again.record(0, step, "another")
    again.close()
    assert read_account(path, plan).closed == (64,)


@pytest.mark.parametrize("hashed", [lambda text: text, a_hash], ids=["other texts", "hashes"])
@pytest.mark.parametrize("is_resumed", [True, False], ids=["resumed", "in one process"])
@pytest.mark.parametrize("is_mirror", [False, True], ids=["on disk", "mirror"])
def test_the_hash_of_every_update_is_remembered_under_every_key(tmp_path, is_resumed, is_mirror, hashed):
    """In every epoch, another sum under a noise that was used already must not be applied."""
    plan, path = plan_of(60, 40), tmp_path / "ledger.jsonl"
    ledger = Ledger(plan, path, key="key 0", block=5)
    for epoch in range(4):
        start = [3 * epoch, 2 * epoch]
        if epoch:
            ledger.new_epoch(f"key {epoch}", start)
        steps = [(phase, start[phase] + i) for phase in (0, 1) for i in range(7)]
        for phase, step in steps:
            ledger.charge(phase, step)
            # What an earlier key gave does not count.
            assert ledger.record(phase, step, hashed(f"{epoch} {phase} {step}"))
        if is_resumed:
            ledger.suspend()
            ledger = Ledger.resume(plan, path, block=5)
        asked = ledger.mirror() if is_mirror else ledger
        for phase, step in steps:
            assert asked.record(phase, step, hashed(f"{epoch} {phase} {step}")), (epoch, phase, step)
            assert not asked.record(phase, step, hashed("another")), (epoch, phase, step)
            assert not asked.record(phase, step, hashed(f"{epoch - 1} {phase} {step}")), (epoch, phase, step)


def test_the_file_of_each_key_is_remembered(tmp_path):
    plan, path = plan_of(60), tmp_path / "ledger.jsonl"
    ledger = Ledger(plan, path, key="key 0", key_file="file 0")
    assert ledger.key_file == "file 0"
    ledger.new_epoch("key 1", [0], "file 1")
    assert (ledger.key_file, ledger.mirror().key_file) == ("file 1", "file 1")
    ledger.suspend()
    ledger = Ledger.resume(plan, path)
    assert ledger.key_file == "file 1"
    ledger.new_epoch("key 2", [0])
    assert ledger.key_file == ""


def test_an_incomplete_last_line_charges_nothing(tmp_path):
    plan, path = plan_of(100), tmp_path / "ledger.jsonl"
    advance(Ledger(plan, path, block=10), 25)
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    assert read_charges(path, plan) == (30,)
    for end in (start, start + 1, (start + len(whole)) // 2, len(whole) - 2):
        path.write_bytes(whole[:end])
        assert read_charges(path, plan) == (20,)


@pytest.mark.parametrize("failing", ["fsync", "write"])
def test_when_the_disk_fails_no_step_is_allowed(tmp_path, monkeypatch, failing):
    ledger = advance(Ledger(plan_of(20), tmp_path / "ledger.jsonl", block=3), 3)
    where = os if failing == "fsync" else ledger._file
    monkeypatch.setattr(where, failing, Mock(side_effect=OSError(28, "No space left on device")), raising=False)
    with pytest.raises(LedgerError, match="No space left"):
        ledger.charge(0, 3)
    assert ledger.charged == (3,)
    monkeypatch.undo()
    with pytest.raises(LedgerError, match="closed"):  # what reached the disk is unknown
        ledger.charge(0, 3)


# -- tampering ---------------------------------------------------------------------------------------------------


def written(tmp_path, *steps: int, block: int = 10, close: bool = False) -> Path:
    """A ledger on disk for a plan of two phases, with so many steps charged in each."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(plan_of(100, 50), path, key="a commitment", block=block, settings={"randomness": "chacha20"})
    for phase, count in enumerate(steps):
        for step in range(count):
            ledger.charge(phase, step)
    if close:
        ledger.close()
    return path


def test_a_complete_ledger_is_read_back(tmp_path):
    assert read_charges(written(tmp_path, 25, 12, close=True), plan_of(100, 50)) == (30, 20)


@pytest.mark.parametrize(
    "key", ["kind", "schema", "plan", "allowed", "rests_on", "epoch", "key", "phase", "from", "to", "prev", "hash"]
)
def test_a_line_with_any_key_altered_is_detected(tmp_path, key):
    path = written(tmp_path, 25, 12, close=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    touched = 0
    for number, line in enumerate(lines):
        if key not in line:
            continue
        altered = line | {key: line[key] - 1 if isinstance(line[key], int) else "something else"}
        path.write_text("".join(json.dumps(row) + "\n" for row in [*lines[:number], altered, *lines[number + 1 :]]))
        with pytest.raises(LedgerError):
            read_charges(path, plan_of(100, 50))
        touched += 1
    assert touched


def test_lines_left_out_inserted_or_exchanged_are_detected(tmp_path):
    path = written(tmp_path, 45, 12)
    lines = path.read_text().splitlines(keepends=True)
    for number in range(len(lines) - 1):
        for altered in (
            lines[:number] + lines[number + 1 :],
            [*lines[: number + 1], *lines[number:]],
            [*lines[:number], lines[number + 1], lines[number], *lines[number + 2 :]],
        ):
            path.write_text("".join(altered))
            with pytest.raises(LedgerError):
                read_charges(path, plan_of(100, 50))


def test_a_line_altered_with_its_hash_breaks_the_chain(tmp_path):
    path = written(tmp_path, 45)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    cheaper = lines[3] | {"to": lines[3]["to"] - 5}
    lines[3] = cheaper | {"hash": line_hash(cheaper)}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(LedgerError, match="line 5"):
        read_charges(path, plan_of(100, 50))


def forged(path: Path, change) -> None:
    """Change the ledger's lines and recompute every hash."""
    last, lines = "0" * 64, []
    for line in change([json.loads(line) for line in path.read_text().splitlines()]):
        body = {key: value for key, value in line.items() if key != "hash"} | {"prev": last}
        last = line_hash(body)
        lines.append(json.dumps(body | {"hash": last}) + "\n")
    path.write_text("".join(lines))


FORGERIES = {
    "beyond the allowance": lambda lines: [*lines, lines[-1] | {"from": 40, "to": 200}],
    "backwards": lambda lines: [*lines, lines[-1] | {"from": 40, "to": 20}],
    "unknown phase": lambda lines: [*lines, lines[-1] | {"phase": 7}],
    "negative phase": lambda lines: [*lines, lines[-1] | {"phase": -1}],
    "refund": lambda lines: [*lines, {"kind": "refund", "epoch": 0, "steps": 10}],
    "no opening": lambda lines: lines[1:],
    "no kinds": lambda lines: [{key: value for key, value in line.items() if key != "kind"} for line in lines],
    "rests on words": lambda lines: [lines[0] | {"rests_on": "sand"}, *lines[1:]],
    "another epoch": lambda lines: [*lines, lines[-1] | {"epoch": 1, "from": 40, "to": 50}],
    "after the end": lambda lines: [
        *lines,
        {"kind": "close", "epoch": 0, "charged": [40, 0]},
        lines[-1] | {"from": 40, "to": 50},
    ],
}


@pytest.mark.parametrize("change", FORGERIES.values(), ids=FORGERIES.keys())
def test_a_complete_chain_of_lines_that_no_ledger_writes_is_refused(tmp_path, change):
    path = written(tmp_path, 35)
    forged(path, change)
    with pytest.raises(LedgerError):
        read_charges(path, plan_of(100, 50))


@pytest.mark.parametrize("content", ["", "\n", "{}\n", "null\n", "[]\n", "3\n", "not json\n", "\ufeff{}\n"])
def test_a_file_that_is_no_ledger_is_refused(tmp_path, content):
    path = tmp_path / "ledger.jsonl"
    path.write_text(content)
    with pytest.raises(LedgerError):
        read_charges(path, plan_of(100))


def test_a_missing_or_binary_file_is_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    for path in (tmp_path / "nowhere.jsonl", tmp_path / "binary", tmp_path):
        with pytest.raises(LedgerError):
            read_charges(path, plan_of(100))


def test_a_ledger_of_another_plan_is_refused(tmp_path):
    path = written(tmp_path, 25)
    for other in (plan_of(100), plan_of(100, 51), plan_of(100, 50, noise_std=4.000001)):
        with pytest.raises(LedgerError, match="another plan"):
            read_charges(path, other)


def test_a_ledger_never_replaces_another(tmp_path):
    path = written(tmp_path, 25)
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="new ledger"):
        Ledger(plan_of(100, 50), path)
    assert path.read_bytes() == before
    with pytest.raises(LedgerError):
        Ledger(plan_of(100), tmp_path / "no folder" / "ledger.jsonl")


# -- many steps --------------------------------------------------------------------------------------------------


def test_a_step_takes_at_most_60_bytes_and_a_ledger_is_read_in_little_memory(tmp_path):
    plan, path, steps = plan_of(50_000), tmp_path / "ledger.jsonl", 50_000
    ledger = advance(Ledger(plan, path), steps, records=True)
    ledger.sync()
    assert ledger.has_line(ledger.last_line)
    ledger.suspend()
    assert path.stat().st_size <= 60 * steps
    tracemalloc.start()
    again = Ledger.resume(plan, path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= 40 * steps
    for step in range(0, steps, 997):
        assert again.record(0, step, f"{step:032x}")
        assert not again.record(0, step, f"{step + 1:032x}")


def updates(path: Path, steps: int, block: int = 10) -> list[bytes]:
    """The lines of a ledger after so many updates."""
    advance(Ledger(plan_of(100), path, block=block), steps, records=True).suspend()
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("change", ["left out", "doubled", "exchanged", "altered", "in capitals"])
def test_updates_altered_before_another_line_are_detected(tmp_path, change):
    path = tmp_path / "ledger.jsonl"
    lines = updates(path, 25)
    at = next(number for number, line in enumerate(lines) if line.startswith(b'"')) + 3
    before, this, after = lines[:at], lines[at], lines[at + 1 :]
    altered = {
        "left out": [],
        "doubled": [this, this],
        "exchanged": [after[0], this],
        "altered": [this.replace(b"3", b"4")],
        "in capitals": [a_hash("another").upper().encode()],
    }[change]
    path.write_bytes(b"".join([*before, *altered, *after[change == "exchanged" :]]))
    with pytest.raises(LedgerError, match="was altered"):
        read_charges(path, plan_of(100))


def test_an_altered_last_update_is_not_replayed(tmp_path):
    """No later line continues it. What comes out otherwise than the file says is not applied."""
    path = tmp_path / "ledger.jsonl"
    lines = updates(path, 25)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1].replace(b"18", b"19"))
    again = Ledger.resume(plan_of(100), path)
    assert again.record(0, 23, f"{23:032x}")
    assert not again.record(0, 24, f"{24:032x}")


def test_half_a_line_of_an_update_is_removed(tmp_path):
    path = tmp_path / "ledger.jsonl"
    whole = b"".join(updates(path, 25))
    for cut in (1, 2, 20, 34):
        path.write_bytes(whole[:-cut])
        again = Ledger.resume(plan_of(100), path)
        assert again.charged == (30,)
        assert again.record(0, 24, f"{24:032x}")
        again.suspend()
        assert path.read_bytes() == whole


@pytest.mark.parametrize("where", ["before a block", "beyond the block", "after the end", "first", "no hash", "a list"])
def test_updates_that_no_ledger_writes_are_refused(tmp_path, where):
    path = tmp_path / "ledger.jsonl"
    lines, update = updates(path, 30), json.dumps(a_hash("another")).encode() + b"\n"
    if where == "after the end":
        Ledger.resume(plan_of(100), path).close()
        lines = path.read_bytes().splitlines(keepends=True)
    forged = {
        "before a block": [*lines[:2], update],
        "beyond the block": [*lines, update],
        "after the end": [*lines, update],
        "first": [update, *lines],
        "no hash": [*lines[:-1], b'"something else that is no update."\n'],
        "a list": [*lines, b"[" + update.strip() + b"]\n"],
    }
    path.write_bytes(b"".join(forged[where]))
    with pytest.raises(LedgerError, match="was altered"):
        read_charges(path, plan_of(100))


def test_a_ledger_of_an_earlier_version_is_continued(tmp_path):
    """Its updates have lines with all keys."""
    path = tmp_path / "ledger.jsonl"
    updates(path, 25)
    written, last, step = [], "0" * 64, 0
    for line in map(json.loads, path.read_text().splitlines()):
        if isinstance(line, str):
            line, step = {"kind": "update", "epoch": 0, "phase": 0, "step": step, "update": line}, step + 1
        body = {key: value for key, value in line.items() if key != "hash"} | {"prev": last}
        last = line_hash(body)
        written.append(json.dumps(body | {"hash": last}) + "\n")
    path.write_text("".join(written))
    ledger = Ledger.resume(plan_of(100), path, block=10)
    assert ledger.last_line == last
    advance(ledger, 45, records=True).close()
    assert path.read_text().startswith("".join(written))
    again = Ledger.resume(plan_of(100), path)
    assert again.charged == (45,)
    for step in range(45):
        assert again._account.update(0, step) == f"{step:032x}"


@pytest.mark.parametrize("seed", range(8))
def test_no_damage_in_the_middle_of_a_ledger_is_read(tmp_path, seed):
    """Bytes, parts and lines are changed, removed, doubled or exchanged, but for what follows the last chained line."""
    coins, path = random.Random(seed), tmp_path / "ledger.jsonl"
    ledger = advance(Ledger(plan_of(100), path, block=4, settings={"randomness": "chacha20"}), 30, records=True)
    if seed % 2:
        ledger.sync()
    ledger.new_epoch("another", [10])
    for step in range(10, 40):
        ledger.charge(0, step)
        ledger.record(0, step, a_hash(str(step)))
    ledger.sync()
    ledger.suspend()
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    for _ in range(150):
        a, b = sorted(coins.sample(range(len(lines) - 1), 2))
        at = coins.randrange(len(whole) - len(lines[-1]) - 1)
        damaged = coins.choice(
            [
                whole[:at] + bytes([coins.choice([whole[at] ^ 1, whole[at] ^ 32, 10, 34])]) + whole[at + 1 :],
                whole[:at] + whole[at + coins.randrange(1, 80) :],
                b"".join([*lines[:a], *lines[b:]]),
                b"".join([*lines[:b], *lines[a:]]),
                b"".join([*lines[:a], lines[b], *lines[a + 1 : b], lines[a], *lines[b + 1 :]]),
            ]
        )
        path.write_bytes(damaged)
        if damaged != whole:
            with pytest.raises(LedgerError):
                read_charges(path, plan_of(100))


# -- what it shows -------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    before=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 7)), max_size=20),
    after=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 7)), max_size=20),
    block=st.integers(1, 4),
)
def test_a_mirror_allows_what_the_ledger_does_and_writes_nothing(tmp_path_factory, before, after, block):
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    ledger = Ledger(plan_of(5, 3), path, key="first", block=block)
    for phase, step in before:
        outcome(ledger, phase, step)
    mirror = pickle.loads(pickle.dumps(ledger.mirror()))  # as it travels to another process
    for phase, step in after:
        assert outcome(ledger, phase, step) == outcome(mirror, phase, step)
        assert (mirror.charged, mirror.end(phase)) == (ledger.charged, ledger.end(phase))
    for one in (ledger, mirror):
        one.new_epoch("second", [1, 0])
    assert (mirror.epoch, mirror.key, mirror.charged) == (ledger.epoch, ledger.key, ledger.charged)
    assert [mirror.end(0), mirror.end(1)] == [ledger.end(0), ledger.end(1)]

    ledger.suspend()
    content = path.read_bytes()
    for step in range(5):
        outcome(mirror, 0, step)
    mirror.close()
    assert path.read_bytes() == content


def outcome(ledger: Ledger, phase: int, step: int) -> tuple[str, bool]:
    """The outcome of a charge, and of recording its update."""
    try:
        ledger.charge(phase, step)
        return "charged", ledger.record(phase, step, f"{phase}/{step}/{ledger.charged}")
    except EpsilonsError as error:
        return type(error).__name__, False


def test_it_shows_what_is_charged_and_what_to_claim(tmp_path):
    ledger = advance(Ledger(plan_of(100), tmp_path / "ledger.jsonl"), 30)
    text = str(ledger)
    assert "30 of 100 steps charged" in text
    assert "certified for the whole plan" in text
    assert "Claim the last column" in text
    rows = [line.split() for line in text.splitlines()[2:4]]
    for row, so_far, whole in zip(rows, plan_of(100).spent_after([30]), plan_of(100).epsilon_spent(), strict=True):
        assert float(row[2]) >= so_far * (1 - 1e-12)
        assert float(row[3]) >= whole * (1 - 1e-12)
    assert repr(ledger) == "Ledger(30 of 100 steps charged)"


def interrupted(work, at: int) -> int:
    """Number of lines of ledger.py and account.py that `work` runs. At line `at` it is interrupted, as by Ctrl-C."""
    count = 0

    def follow(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.endswith(("ledger.py", "account.py")):
            return None
        if event == "line":
            count += 1
            if count == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return follow

    before = sys.gettrace()
    sys.settrace(follow)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ending", ["close", "suspend"])
def test_an_interrupt_at_any_line_leaves_a_ledger_that_can_be_closed_and_read(tmp_path, ending, stride):
    plan = plan_of(6)

    def made(ledger: Ledger, steps: list[int], then: str) -> None:
        for step in range(6):
            ledger.charge(0, step)
            steps.append(step)
            assert ledger.record(0, step, f"{step:032x}")
        getattr(ledger, then)()

    complete = Ledger(plan, tmp_path / "complete", block=2)
    lines = interrupted(lambda: made(complete, [], ending), at=0)
    assert lines > 200
    for at in range(1, lines + 1, stride):
        path, steps = tmp_path / f"{at}", []
        ledger = Ledger(plan, path, block=2)
        interrupted(lambda: made(ledger, steps, ending), at)  # noqa: B023
        if not ledger.is_closed and at % 2:
            made(ledger, steps, ending)  # the program goes on: the same updates again
        getattr(ledger, ending)()
        charged = read_charges(path, plan)
        assert charged[0] >= len(set(steps)), f"interrupted at line {at} of {lines}"
        if ending == "suspend":
            made(Ledger.resume(plan, path), steps, "close")
            assert read_charges(path, plan) == (6,)
