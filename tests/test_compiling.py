"""Compiled chunks: the definition's sum by a program that was proved once; what it cannot do is left to the engine."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from epsilons.errors import InputError, ModelError
from epsilons.training import clipper
from epsilons.training.clipping.compiled import program as compiling
from epsilons.training.clipping.compiled.program import Compiled, check_compiler
from epsilons.training.clipping.ghost.engine import Ghost
from epsilons.training.clipping.loop import Loop
from options import compiled as compiled_run
from options import split
from ranked import Processes
from sums import away, doubled, in_double, length
from zoo import ZOO, Case, Doubled, build
from zoo_more import MORE

CLOSE = 4e-6  # relative to the clipped sum, against the definition in 64 bits
RECORDS = 33

#: Models that leave all chunks to the engine, and what the reason says. Torch compiles no backward pass through an LSTM
#: of oneDNN's own, which is needed where paths lead around one.
LEFT = {
    "two-layer lstm, hidden state": "mkldnn_rnn_layer",
    "a way around two lstms": "mkldnn_rnn_layer",
}


def has_compiler() -> bool:
    try:
        check_compiler(torch.device("cpu"))
    except InputError:
        return False
    return True


pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif("not has_compiler()", reason="NO C++ COMPILER HERE: nothing of compiled chunks was tested"),
]


def compiled(case: Case, records: int = RECORDS) -> Compiled:
    def losses(model: nn.Module, batch: tuple[tuple[Tensor, ...], Tensor]) -> Tensor:
        inputs, targets = batch
        return case.losses(model(*inputs), targets)

    return Compiled(case.model, case.parameters, losses, records)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Those of the library."""
    found = [r for r in caplog.records if r.name.startswith("epsilons.") and r.levelno >= logging.WARNING]
    return [r.getMessage() for r in found]


def animal(name: str) -> Case:
    if name in ZOO:
        return build(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        case = MORE[name]()
        case.loss_of(*case.batch(2, 9))  # lazy layers
    return case


# -- the definition's sum -----------------------------------------------------------------------------------


def check_sums(case: Case, made: Compiled) -> None:
    for records in (RECORDS, 2, 20):
        inputs, targets = case.batch(records, seed=records)
        clip_norm = torch.linspace(0.05, 1.5, records, dtype=torch.float64)
        weight = torch.linspace(1.5, 0.5, records, dtype=torch.float64)
        torch.manual_seed(records)
        ours = made.sums((inputs, targets), records, clip_norm, weight)
        exact = doubled(case)
        loop = Loop()
        loop.attach(exact.model, exact.parameters)
        torch.manual_seed(records)
        theirs = loop.clipped_sum(exact.loss_of(in_double(inputs), targets), clip_norm, weight)
        assert ours is not None, made.refused
        assert length(theirs) > 0
        assert away(ours, theirs) <= CLOSE * length(theirs)
        assert [a.shape for a in ours] == [p.shape for p in case.parameters]


@pytest.mark.parametrize("name", ["two layers", "embedding", "lstm, last output", "conv"])
def test_a_program_gives_the_definitions_sum(name):
    """Gradients of every parameter, clip norms and weights per record, chunks that are full and that are filled up."""
    case = animal(name)
    check_sums(case, compiled(case))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ZOO, *MORE])
def test_the_whole_zoo_is_compiled_or_says_why_not(name, caplog):
    case = animal(name)
    if case.random:
        pytest.skip("the definition's masks are in 64 bits; see the tests of dropout")
    made = compiled(case)
    if name not in LEFT:
        check_sums(case, made)
        assert not warnings(caplog)
        return
    inputs, targets = case.batch(RECORDS, seed=0)
    ones = torch.ones(RECORDS, dtype=torch.float64)
    assert made.sums((inputs, targets), RECORDS, ones, ones) is None
    assert LEFT[name] in made.refused
    assert any(message.startswith("Chunks are not compiled") for message in warnings(caplog))


class Cancelling(nn.Module):
    """A linear layer over 64 steps whose outputs are summed with alternating signs: nearly everything cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256)
        self.register_buffer("sign", torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(0.01 * self.layer(x)) * self.sign).sum((1, 2))


def test_no_contribution_is_above_its_clip_norm_however_much_cancels():
    """256 records, 64 steps, 256 features with a common mode and noise 1e-4; each contribution is looked at alone."""
    records = 256
    generator = torch.Generator().manual_seed(0)
    shared = torch.randn(records, 1, 256, generator=generator).expand(-1, 64, -1)
    features = shared + 1e-4 * torch.randn(records, 64, 256, generator=generator)
    torch.manual_seed(1)
    model = Cancelling()
    made = Compiled(model, list(model.parameters()), lambda model, batch: model(batch), records)
    bound = torch.full((records,), 1e-6, dtype=torch.float64)
    for record in [0, 77, 131, 255]:
        only = torch.zeros(records, dtype=torch.float64)
        only[record] = 1.0
        found = made.sums(features, records, bound, only)
        assert found is not None, made.refused
        assert 0.99e-6 <= length(found) <= 1e-6
    assert not made.refused


def test_a_chunk_with_a_record_that_is_not_finite_is_left_to_the_engine_and_only_that_chunk():
    case = build("two layers")
    made = compiled(case)
    ones = torch.ones(5, dtype=torch.float64)
    inputs, targets = case.batch(5, seed=0)
    broken = (inputs[0].clone(),)
    broken[0][3, 1] = float("nan")
    assert made.sums((broken, targets), 5, ones, ones) is None  # the first chunk of all: nothing to compare yet
    ours = made.sums((inputs, targets), 5, ones, ones)
    assert ours is not None
    broken[0][3, 1] = float("inf")
    broken[0][0, 0] = float("nan")  # the one that shorter chunks are filled up with
    assert made.sums((broken, targets), 5, ones, ones) is None
    again = made.sums((inputs, targets), 5, ones, ones)
    assert again is not None
    assert all(torch.equal(a, b) for a, b in zip(again, ours, strict=True))
    assert not made.refused


def test_what_norms_and_sums_are_taken_of_is_stored_by_the_program():
    """As an output, so that it is computed once: activations and gradients, not the views that are multiplied."""
    case = build("two layers")
    made = compiled(case, records=4)
    ones = torch.ones(4, dtype=torch.float64)
    assert made.sums(case.batch(4, seed=0), 4, ones, ones) is not None
    (program,) = made._programs.values()
    (output,) = program._graph.graph.find_nodes(op="output")
    sums, stored = output.args[0][: len(case.parameters) + 1], output.args[0][len(case.parameters) + 1 :]
    assert len(sums) == len(case.parameters) + 1
    operators = [str(node.target) for node in stored]
    assert {"aten.tanh.default", "aten.tanh_backward.default", "aten._log_softmax_backward_data.default"} <= {
        *operators
    }
    assert not any("view" in operator or ".t." in operator or "detach" in operator for operator in operators)
    given = [*case.model.parameters(), *case.batch(4, seed=0)[0], case.batch(4, seed=0)[1], ones, ones]
    with torch.no_grad():
        assert len(program._compiled(*[t.detach() for t in given])) == len(sums) + len(stored)


def test_filling_up_a_chunk_adds_nothing():
    """The same records alone and among fillings; and records at clip norm 0 do not count, whatever they hold."""
    case = build("two layers")
    made = compiled(case, records=8)
    inputs, targets = case.batch(8, seed=0)
    ones = torch.ones(8, dtype=torch.float64)
    three = (torch.arange(8) < 3).double()
    short = made.sums(((inputs[0][:3],), targets[:3]), 3, ones[:3], ones[:3])
    whole = made.sums((inputs, targets), 8, three, three)
    assert away(short, whole) <= 1e-7 * length(whole)
    assert not made.takes(0)
    assert not made.takes(1)
    assert not made.takes(9)


# -- randomness, repetition ---------------------------------------------------------------------------------


def test_dropout_is_drawn_anew_for_each_chunk_as_the_engine_draws_it():
    case = build("dropout in transformer")
    made = compiled(case)
    batch = case.batch(RECORDS, seed=0)
    ones = torch.full((RECORDS,), 0.1, dtype=torch.float64)

    def ours(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        found = made.sums(batch, RECORDS, ones, ones)
        assert found is not None, made.refused
        return found

    engine = Ghost()
    engine.attach(case.model, case.parameters)
    first, second, again = ours(1), ours(2), ours(1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert away(first, second) > 0.01 * length(first)
    for seed, sums in [(1, first), (2, second)]:
        torch.manual_seed(seed)
        engine.begin(RECORDS)
        theirs = engine.clipped_sum(case.loss_of(*batch), ones, ones)
        assert away(sums, theirs) <= 1e-6 * length(theirs)


def digest() -> str:
    """Of two chunks' sums, on two threads; with a table, which threads add into, and dropout."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 40), nn.Dropout(0.3), nn.Linear(40, 2))
    tokens = torch.randint(50, (64, 12))
    made = Compiled(model, list(model.parameters()), lambda m, b: m(b).square().mean((1, 2)), 64)
    found = hashlib.sha256()
    for n in (64, 9):
        torch.manual_seed(n)
        sums = made.sums(tokens[:n], n, torch.full((n,), 0.01), torch.ones(n))
        assert sums is not None, made.refused
        for t in sums:
            found.update(t.numpy().tobytes())
    return found.hexdigest()


def test_two_processes_that_compile_for_themselves_find_the_same_bits(tmp_path):
    own = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": "7"}
    here = str(Path(__file__).parent)
    script = f"import sys; sys.path.insert(0, {here!r}); import test_compiling; print(test_compiling.digest())"
    other = subprocess.run([sys.executable, "-c", script], env=own, stdout=subprocess.PIPE, text=True, check=True)
    assert other.stdout.strip() == digest()


def test_batches_of_many_shapes_are_compiled_one_by_one_and_that_is_said(caplog):
    case = Case(nn.Sequential(nn.Linear(6, 3), nn.Tanh()), lambda n: (torch.randn(n, 2, 6),))
    made = Compiled(case.model, case.parameters, lambda m, b: m(b).sum((1, 2)), 4)
    bound = torch.full((4,), 0.3, dtype=torch.float64)
    for time in (1, 2, 3, 4, 5, 2, 1):
        assert made.sums(torch.randn(4, time, 6), 4, bound, bound) is not None
    assert [message.startswith("Batches came in 4 shapes") for message in warnings(caplog)] == [True]


# -- in a run -----------------------------------------------------------------------------------------------


class Words(nn.Module):
    """Tokens and numbers per record; dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.table, self.head, self.dropout = nn.Embedding(9, 4), nn.Linear(6, 2), nn.Dropout(dropout)

    def forward(self, tokens: Tensor, numbers: Tensor) -> Tensor:
        return self.head(self.dropout(torch.cat([self.table(tokens).mean(1), self.dropout(numbers)], 1)))


def batch_loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    tokens, numbers, targets = batch
    return F.cross_entropy(model(tokens, numbers), targets, reduction="none")


BUDGETS = epsilons.Budgets(np.resize([1.0, 4.0], 60), delta=1e-3)
STEPS, UNTIL = 8, 5


def made(run_dir: Path | None = None, nan: int | None = None, dropout: float = 0.2, **options):
    plan = epsilons.plan(BUDGETS, epsilons.Recipe(steps=STEPS, batch_size=12, clip_norm=0.5), "sample", "rdp")
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(60, 2, generator=generator)
    if nan is not None:
        numbers[nan] = float("nan")
    targets = torch.randint(0, 2, (60,), generator=generator)
    data = (torch.randint(0, 9, (60, 5), generator=generator), numbers, targets)
    torch.manual_seed(0)
    model = Words(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"seed": 3, "budgets": BUDGETS, "run_dir": run_dir, **options}
    if options.pop("is_compiled", True):
        return model, compiled_run(model, optimizer, data, plan, loss=batch_loss, **options)
    return model, epsilons.make_private(model, optimizer, data, plan, **split(options))


def trained(**options) -> list[Tensor]:
    model, private = made(**options)
    with private:
        for batch in private.batches:
            if options.get("is_compiled", True):
                private._clip(batch)
            else:
                private.backward(batch_loss(model, batch))
            private.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.fixture
def counted(monkeypatch) -> list[int]:
    """How many records each chunk had that was not left to the engine."""
    found: list[int] = []
    real = Compiled.sums

    def sums(self, batch, count, *bounds):
        result = real(self, batch, count, *bounds)
        if result is not None:
            found.append(count)
        return result

    monkeypatch.setattr(Compiled, "sums", sums)
    return found


@pytest.mark.parametrize("largest", [None, 5])
def test_a_compiled_run_learns_what_an_eager_one_does(largest, counted):
    # Without dropout: masks are drawn for the chunk as it is filled up.
    theirs = trained(is_compiled=False, max_physical_batch=largest, dropout=0.0)
    assert not counted
    ours = trained(max_physical_batch=largest, dropout=0.0)
    assert len(counted) >= STEPS - 1  # all but draws of one record, or of none
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_a_record_that_is_not_finite_adds_nothing_in_a_compiled_run_either(counted):
    # Without dropout: which chunks are replayed record by record, with masks of their own, is not the same in both.
    ours, theirs = trained(nan=7, dropout=0.0), trained(nan=7, dropout=0.0, is_compiled=False)
    assert counted
    for a, b in zip(ours, theirs, strict=True):
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def killed(run_dir: Path) -> None:
    """A run whose process is gone after an update between two checkpoints."""
    torch.set_num_threads(1)
    _, private = made(run_dir=run_dir, checkpoint_every=3)
    private.on_update(lambda p: os.kill(os.getpid(), signal.SIGKILL) if p.updates == UNTIL else None)
    for batch in private.batches:
        private._clip(batch)
        private.step()


def test_a_run_that_is_killed_and_taken_up_again_is_the_same_to_the_bit(tmp_path, counted):
    """By another process, which compiles for itself, and replays what came after the last checkpoint under one key."""
    process = multiprocessing.get_context("spawn").Process(target=killed, args=(tmp_path / "run",))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    whole = trained()
    before = len(counted)
    resumed = trained(run_dir=tmp_path / "run", resume=True, checkpoint_every=3)
    assert len(counted) > before
    for a, b in zip(resumed, whole, strict=True):
        assert torch.equal(a, b)
    settings = json.loads((tmp_path / "run" / "run.json").read_text())
    assert settings["performance"]["compile"] is True
    lines = [json.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()]
    epochs = [line["epoch"] for line in lines if line.get("kind") in ("key", "update")]
    assert len(epochs) > STEPS
    assert set(epochs) == {0}  # no other key: what was replayed had the hashes of the first time


def test_a_run_that_goes_on_without_its_compiler_begins_another_key(tmp_path):
    _, private = made(run_dir=tmp_path / "run")
    described = private._checkpointer.fingerprint
    private.close()
    _, other = made(run_dir=tmp_path / "other", is_compiled=False)
    assert described == {**other._checkpointer.fingerprint, "compile": True} != other._checkpointer.fingerprint
    other.close()


def compiled_values() -> tuple[list[np.ndarray], int]:
    """What a run of this rank comes to, and how many chunks were compiled."""
    torch.set_num_threads(1)
    model, private = made(dropout=0.0)
    with private:
        for batch in private.batches:
            private._clip(batch)
            private.step()
    return [p.detach().numpy() for p in model.parameters()], sum(
        p.runs for p in private._clipper._compiled._programs.values()
    )


@pytest.mark.slow
def test_two_processes_train_one_model_compiled():
    processes = Processes()
    try:
        (first, runs), (second, more) = processes.together(compiled_values)
    finally:
        processes.end()
    alone, _ = compiled_values()
    assert min(runs, more) >= STEPS // 2
    for a, b, c in zip(first, second, alone, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, rtol=1e-5, atol=1e-6)


def test_fit_compiles(tmp_path, counted):
    plan = epsilons.plan(BUDGETS, epsilons.Recipe(steps=3, batch_size=12, clip_norm=0.5), "sample", "rdp")
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(60, 4, generator=generator), torch.randint(0, 2, (60,), generator=generator)
    found = []
    for number, compile in enumerate([True, False]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        epsilons.fit(
            model, data, plan, budgets=BUDGETS, seed=1, **split({"compile": compile}), run_dir=tmp_path / str(number)
        )
        found.append(list(model.parameters()))
        assert json.loads((tmp_path / str(number) / "run.json").read_text())["performance"]["compile"] is compile
    assert len(counted) >= 2
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_chunks_are_no_larger_than_draws():
    """512 records at once would be filled up from a dozen."""
    _, private = made(max_physical_batch=512)
    assert private._clipper._compiled.records == int(np.ceil(12 + clipper.ROOTS * np.sqrt(12)))
    private.close()
    _, private = made(max_physical_batch=7)
    assert private._clipper._compiled.records == 7
    private.close()


# -- what is frozen, and what is refused --------------------------------------------------------------------


class Tempered(nn.Module):
    """Plain attributes, a hook, a mode: whatever a recording freezes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout, self.temperature = nn.Linear(6, 3), nn.Dropout(0.5), 1.0
        self.shift = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.layer(x)) / self.temperature + self.shift


def test_a_program_does_not_outlive_what_it_was_recorded_with(caplog):
    torch.manual_seed(0)
    model = Tempered()
    case = Case(model, lambda n: (torch.randn(n, 6),))
    made = compiled(case, records=4)
    batch = case.batch(4, seed=1)
    bound = torch.full((4,), 0.3, dtype=torch.float64)

    def hold() -> None:
        engine = Ghost()
        engine.attach(model, case.parameters)
        torch.manual_seed(5)
        engine.begin(4)
        theirs = engine.clipped_sum(case.loss_of(*batch), bound, bound)
        for _ in range(2):
            torch.manual_seed(5)
            ours = made.sums(batch, 4, bound, bound)
            assert away(ours, theirs) <= 1e-6 * length(theirs)

    with caplog.at_level(logging.INFO, logger=compiling.__name__):
        hold()
        model.temperature = 3.0
        hold()
        model.eval()
        hold()
        model.shift.add_(torch.tensor([0.0, 2.0, 0.0]))
        hold()
        model.layer.register_forward_hook(lambda module, inputs, output: output * 2)
        hold()
        with torch.no_grad():  # parameters are given, not frozen
            model.layer.weight.mul_(0.5)
        hold()
        assert sum("Compiling" in r.message for r in caplog.records) == 5
        model.train()  # with the hook; and back to what is known
        hold()
        model.eval()
        hold()
    assert sum("Compiling" in r.message for r in caplog.records) == 6
    assert "Batches came in 4 shapes" not in caplog.text


def test_a_tensor_that_the_loss_brings_along_may_change():
    model, weights = nn.Linear(6, 3), torch.tensor([1.0, 2.0, 3.0])
    case = Case(
        model, lambda n: (torch.randn(n, 6),), lambda run_dir, y: F.cross_entropy(run_dir, y, weights, reduction="none")
    )
    made = compiled(case, records=4)
    batch = case.batch(4, seed=1)
    bound = torch.full((4,), 1e3, dtype=torch.float64)
    before = made.sums(batch, 4, bound, bound)
    weights.mul_(2)
    after = made.sums(batch, 4, bound, bound)
    assert away(after, [2 * t for t in before]) <= 1e-6 * length(after)


class Odd(nn.Module):
    """A linear layer, and something that cannot be compiled."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.what, self.calls = nn.Linear(6, 3), what, 0
        if what == "hook":

            def swap(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
                output.register_hook(lambda gradient: gradient.flip(0))

            self.layer.register_forward_hook(swap)

    def forward(self, x: Tensor) -> Tensor:
        run_dir = self.layer(x)
        if self.what == "own function":
            return Doubled.apply(run_dir)
        if self.what == "branch" and run_dir.sum() > -1e9:
            return run_dir + 1
        if self.what == "numpy":
            return run_dir + float(np.abs(x.detach().numpy()).max())
        if self.what == "mask":
            return run_dir + x[x > 0].sum()
        if self.what == "counter":
            self.calls += 1
        if self.what == "16 bits":
            return self.layer.to(torch.float32)(x.bfloat16().float())
        return run_dir


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("own function", "not proved"),
        ("branch", ""),
        ("numpy", "reads values"),
        ("mask", ""),
        ("counter", "attributes"),
        ("16 bits", "16 bits"),
        ("hook", "not proved"),
    ],
)
def test_what_cannot_be_compiled_is_left_to_the_engine_with_a_word(what, reason, caplog):
    torch.manual_seed(0)
    model = Odd(what)
    case = Case(model, lambda n: (torch.randn(n, 6),))
    made = compiled(case, records=4)
    bound = torch.full((4,), 0.3, dtype=torch.float64)
    for _ in range(2):
        generator = torch.get_rng_state()
        if made.takes(4):
            assert made.sums(case.batch(4, seed=1), 4, bound, bound) is None
        assert torch.equal(generator, torch.get_rng_state())
    said = [r.message for r in caplog.records if r.message.startswith("Chunks are not compiled")]
    assert len(said) == 1
    assert reason in said[0]
    assert not made.takes(4)


def test_a_loss_that_brings_the_first_chunks_data_along_is_found_out_at_the_second(caplog):
    """A closure over targets that change from chunk to chunk: recorded, they would be those of the first for ever."""
    case = build("linear")
    targets = {}
    made = Compiled(
        case.model,
        case.parameters,
        lambda m, x: F.cross_entropy(m(x), torch.ones(4).long(), reduction="none") * (1 + 1e-4 * targets["now"]),
        4,
    )
    bound = torch.full((4,), 1e3, dtype=torch.float64)
    for number in range(2):
        (x,), targets["now"] = case.batch(4, seed=number)
        found = made.sums(x, 4, bound, bound)
        assert (found is None) == (number == 1)
    assert "differs from the engine's" in caplog.text


def test_no_contribution_is_above_its_clip_norm_where_rounding_is_most_of_the_gradient():
    """Saturated outputs, large features: gradients are small differences, and norm and sum must see the same ones."""
    records = 16
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.GELU(), nn.Linear(40, 3), nn.Softplus(), nn.Linear(3, 3))
    x = 40 * torch.randn(records, 6)

    def losses(model: nn.Module, batch: Tensor) -> Tensor:
        return -torch.log_softmax(3 * model(batch), 1).amax(1) + torch.erf(model(batch)).sum(1)

    made = Compiled(model, list(model.parameters()), losses, records)
    bound = torch.full((records,), 1e-9, dtype=torch.float64)
    for record in range(records):
        only = torch.zeros(records, dtype=torch.float64)
        only[record] = 1.0
        found = made.sums(x, records, bound, only)
        assert found is not None, made.refused
        assert length(found) <= 1e-9


def test_a_sum_that_differs_from_the_engines_is_not_used(monkeypatch):
    """Compiled, rounding may send a maximum's gradient elsewhere, so only what was recorded must agree closely."""
    real = compiling._Program.run
    bound = torch.full((4,), 0.3, dtype=torch.float64)
    for is_wrong, factor, is_used in [(True, 1.1, False), (True, 1.001, True), (False, 1.001, False)]:

        def run(self, given, is_compiled=True, is_wrong=is_wrong, factor=factor):
            *sums, is_finite = real(self, given, is_compiled)
            return [factor * t if is_compiled == is_wrong else t for t in sums] + [is_finite]

        monkeypatch.setattr(compiling._Program, "run", run)
        case = build("linear")
        made = compiled(case, records=4)
        assert (made.sums(case.batch(4, seed=1), 4, bound, bound) is not None) == is_used
        assert ("differs from the engine's" in made.refused) != is_used


def test_an_index_is_proved_only_if_no_chunk_can_change_it(caplog):
    """x[arange(n), last] belongs to records in order, always; x[given, last] does in this chunk."""

    class Picked(nn.Module):
        def __init__(self, is_given: bool) -> None:
            super().__init__()
            self.layer, self.is_given = nn.Linear(6, 3), is_given

        def forward(self, x: Tensor, last: Tensor, place: Tensor) -> Tensor:
            return self.layer(x)[place if self.is_given else torch.arange(len(x)), last]

    bound = torch.full((4,), 0.3, dtype=torch.float64)
    for is_given in (False, True):
        torch.manual_seed(0)
        model = Picked(is_given)
        case = Case(model, lambda n: (torch.randn(n, 5, 6), torch.randint(5, (n,)), torch.arange(n)))
        made = compiled(case, records=4)
        found = made.sums(case.batch(4, seed=1), 4, bound, bound)
        assert (found is None) == is_given
    assert "is not proved for every chunk to come" in caplog.text


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(4, 6), ["a"] * 4), "a str arrived"),
        ((torch.zeros(4, 6), torch.zeros(3)), r"one of shape \(3,\) arrived"),
        ((torch.zeros(6, 4), torch.zeros(())), "arrived"),
    ],
)
def test_batches_that_are_not_rows_of_tensors_are_refused(batch, message):
    model = nn.Linear(6, 3)
    made = Compiled(model, list(model.parameters()), lambda m, b: m(b[0]).sum(1), 4)
    ones = torch.ones(4)
    with pytest.raises(ModelError, match=message):
        made.sums(batch, 4, ones, ones)


@pytest.mark.parametrize("engine", ["loop", "vmap"])
def test_other_engines_are_not_compiled(engine):
    with pytest.raises(InputError, match="compile=True records the engine ghost"):
        made(engine=engine)


def test_a_machine_without_a_compiler_is_told_at_the_door(monkeypatch):
    from torch._inductor import cpp_builder, exc

    def nothing() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", nothing)
    with pytest.raises(InputError, match="needs a C\\+\\+ compiler"):
        made()


def test_nothing_of_torchs_settings_is_left_changed():
    from torch._inductor import config

    before = config.fallback_random, config.deterministic, torch.are_deterministic_algorithms_enabled()
    case = build("linear")
    ones = torch.ones(4, dtype=torch.float64)
    assert compiled(case, records=4).sums(case.batch(4, seed=1), 4, ones, ones) is not None
    assert before == (config.fallback_random, config.deterministic, torch.are_deterministic_algorithms_enabled())
    assert torch.is_grad_enabled()


# -- what a program takes for granted -----------------------------------------------------------------------


class Smoothed(nn.Module):
    """A loss that is a module, with a number that somebody changes."""

    def __init__(self) -> None:
        super().__init__()
        self.smoothing = 0.0

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none", label_smoothing=self.smoothing)


class Cooled(Smoothed):
    """One that reads its number out of a tensor, which is nobody's attribute."""

    def __init__(self) -> None:
        super().__init__()
        temperature = torch.tensor(1.0)
        self.read = lambda: temperature

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]) / float(self.read()), batch[1], reduction="none")


def smoothing(model: nn.Module, loss: Smoothed) -> None:
    loss.smoothing = 0.5


def another_hook(model: nn.Module, loss: Smoothed) -> None:
    model[1]._forward_hooks.clear()
    model[1].register_forward_hook(lambda module, inputs, output: 3 * output)


def another_layer(model: nn.Module, loss: Smoothed) -> None:
    model[1] = nn.SiLU()


def another_number_in_a_list(model: nn.Module, loss: Smoothed) -> None:
    model.factors[0] = 0.2


def written_to(model: nn.Module, loss: Smoothed) -> None:
    loss.read().fill_(0.2)


class Listed(nn.Sequential):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.factors = [1.0]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factors[0]


@pytest.mark.parametrize("change", [smoothing, another_hook, another_layer, another_number_in_a_list, written_to])
def test_whatever_is_changed_under_a_program_has_it_made_anew(change):
    torch.manual_seed(0)
    model = Listed(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    model[1].register_forward_hook(lambda module, inputs, output: 1.0 * output)
    loss = Cooled() if change is written_to else Smoothed()
    batch, bound = (torch.randn(6, 5), torch.randint(0, 3, (6,))), torch.full((6,), 0.3, dtype=torch.float64)
    made = Compiled(model, list(model.parameters()), loss, 6)

    def both() -> tuple[list[Tensor] | None, list[Tensor]]:
        engine = Ghost()
        engine.attach(model, list(model.parameters()))
        engine.begin(6)
        return made.sums(batch, 6, bound, bound), engine.clipped_sum(loss(model, batch), bound, bound)

    for _ in range(3):
        ours, before = both()
        assert away(ours, before) <= 1e-6 * length(before)
    change(model, loss)
    ours, after = both()
    assert away(after, before) > 0.01 * length(before)
    assert ours is None or away(ours, after) <= 1e-6 * length(after)
    assert not made.refused


def test_what_changes_again_and_again_is_left_to_the_engine(monkeypatch, caplog):
    monkeypatch.setattr(compiling, "_compile", lambda graph, example: graph)  # what it costs is not the point
    model, loss = nn.Linear(5, 3), Smoothed()
    batch, bound = (torch.randn(6, 5), torch.randint(0, 3, (6,))), torch.ones(6, dtype=torch.float64)
    made = Compiled(model, list(model.parameters()), loss, 6)
    found = []
    for number in range(2 * compiling.MOST_PROGRAMS):
        loss.smoothing = number / 100
        found.append(made.takes(6) and made.sums(batch, 6, bound, bound) is not None)
    assert found == [True] * compiling.MOST_PROGRAMS + [False] * compiling.MOST_PROGRAMS
    assert ["change again and again" in message for message in warnings(caplog)] == [True]


def test_a_loss_that_is_a_module_is_a_part_of_the_step_in_fit_too():
    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.smoothing = 0.0

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=self.smoothing)

    def trained_with(**options) -> Tensor:
        torch.manual_seed(0)
        model, loss = nn.Linear(4, 3), Annealed()
        budgets = epsilons.Budgets([4.0] * 40)
        plan = epsilons.plan(budgets, epsilons.Recipe(steps=6, batch_size=20, clip_norm=1.0), accountant="rdp")
        data = torch.randn(40, 4), torch.randint(0, 3, (40,))

        def anneal(private: epsilons.Private) -> None:
            loss.smoothing = 0.0 if private.updates < 3 else 0.6

        epsilons.fit(model, data, plan, budgets=budgets, loss=loss, seed=0, callbacks=[anneal], **split(options))
        return model.weight.detach()

    torch.testing.assert_close(trained_with(compile=True), trained_with(), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("time", [1, 16])
def test_no_norm_vanishes_where_32_bits_end(time):
    """One side of each product is so small that its squares are 0, the other as large as the gradient needs."""
    signs = torch.randn(4, time, 256).sign(), torch.randn(4, time, 256).sign()
    model, factor = nn.Linear(256, 256, bias=False), torch.full((4,), 1e-3, dtype=torch.float64)
    for small, large in ((2.6e-23, 8e17), (8e17, 2.6e-23)):

        def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return (model(batch[0]) * batch[1]).flatten(1).sum(1)

        batch = small * signs[0][:, :1].expand(4, time, 256), large * signs[1][:, :1].expand(4, time, 256)
        with torch.no_grad():
            model.weight.fill_(1e-9)
        engine = Ghost()
        engine.attach(model, list(model.parameters()))
        ones = torch.ones(4, dtype=torch.float64)
        for record in range(4):
            only = torch.arange(4) == record
            engine.begin(4)
            sums = engine.clipped_sum(losses(model, batch), factor, ones * only)
            assert length(sums) <= 1e-3
            ours = Compiled(model, list(model.parameters()), losses, 4).sums(batch, 4, factor, ones * only)
            assert ours is not None
            assert length(ours) <= 1e-3
