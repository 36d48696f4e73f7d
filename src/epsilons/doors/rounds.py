"""One site of federated training: in each round some draws of its plan, and what may leave the site afterwards.

A site is a run like any other, with its own people, plan, ledger, key and registry. In a round it loads the server's
weights, makes the next draws from its run folder, and sends the weights after the last noisy update. DP-SGD keeps its
budgets whatever weights it starts from, so those of the server cost nothing, and what leaves is computed from noisy
updates and from what the server knows. No framework is imported here; `flower.py` speaks with Flower.

A round is noted in the ledger before its first charge, and charged before its first update. The checkpoint at its end
names it, so its answer can be repeated, and never its draws. A process may end anywhere: what it paid for stays charged
and is left out, so no noise is used twice, and the next round goes on behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..budgets.budgets import Budgets
from ..errors import InputError
from ..ledger.plan_folder import PlanFolder
from ..planning import Plan, display
from ..training import Performance, Private, make_private
from ..training.values import Randomness, RunFolder, as_folder

Arrays = Mapping[str, npt.NDArray[Any]]

#: What a server is told. Everything else that may go wrong is FAILED: an error's text may depend on records.
SPENT = "This site has spent its budgets: every step of its plan is charged. It takes part in no further round."
REPEATED = "This site has begun this round, or a later one, before. It draws once per round."
FAILED = "This site could not make the round. Its own log says why."
NO_ROUND = "A round needs a whole number from 1 on."
OTHER_WEIGHTS = "The weights are not those of this site's model: their names, shapes or types differ."
NOT_FINITE = "The weights are not finite."

#: No number of updates; a round ends with a checkpoint, and needs none within.
NEVER = 10**9


class RoundRefused(Exception):
    """A round that a site does not answer; the text may leave the site. Only one that FAILED may be charged."""


@dataclass(frozen=True)
class Answer:
    """What leaves a site after a round.

    weights       name -> values of each trained parameter, or what the round changed in them
    num_examples  the site's weight in an average of sites; public
    spent         row -> epsilon charged so far, by the rule of 20
    """

    weights: dict[str, npt.NDArray[Any]] = field(repr=False)
    num_examples: float
    spent: dict[str, str]


@contextmanager
def refusing() -> Iterator[None]:
    """Turn every error into a refusal that says nothing about it: the site's log does."""
    try:
        yield
    except RoundRefused:
        raise
    except Exception:
        logging.getLogger("epsilons.federated").exception("The round failed. What it charged stays charged.")
        raise RoundRefused(FAILED) from None


class _Answered:
    """The last round that was made to its end, kept in the checkpoint after it."""

    def __init__(self) -> None:
        self.round: tuple[str, int] = ("", 0)

    def state_dict(self) -> dict[str, Any]:
        return {"of": self.round[0], "round": self.round[1]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.round = state["of"], state["round"]


@dataclass(frozen=True)
class Site:
    """One site of federated training: its people, their budgets, and how it trains. The server chooses none of this.

    run_dir       the run's folder, which the first round makes; each later one goes on from it, in any process. As a
                  `RunFolder` it may have metadata and a reservation
    model         makes the model; each round starts from the server's weights
    loss          (model, batch) -> (batch,) one loss per record
    optimizer     makes the optimizer of these parameters; its momentum stays at the site
    data          of this site, as of `make_private`
    plan          made for `budgets`; its steps are the draws of all rounds together
    draws         draws per round
    num_examples  the site's weight in the average; it is public. By default the expected number of records in a draw
    sends         "weights", as FedAvg expects them, or "difference" from those of the server
    seed, performance   as of `make_private`

    Raises InputError if a round has no draw, or for a weight that is not positive and finite.

    >>> import torch, epsilons
    >>> budgets = epsilons.Budgets([1.0, 2.0] * 50, delta=1e-3)
    >>> plan = epsilons.plan(budgets, epsilons.Recipe(steps=6, batch_size=10, clip_norm=1.0), accountant="rdp")
    >>> north = Site(
    ...     "north", lambda: torch.nn.Linear(3, 2),
    ...     lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none"),
    ...     lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ...     (torch.zeros(100, 3), torch.zeros(100, dtype=torch.long)), plan, budgets, draws=2,
    ... )
    >>> north.draws
    2
    """

    run_dir: str | Path | RunFolder
    model: Callable[[], nn.Module] = field(repr=False)
    loss: Callable[[nn.Module, Any], Tensor] = field(repr=False)
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = field(repr=False)
    data: Any = field(repr=False)
    plan: Plan | PlanFolder = field(repr=False)
    budgets: Budgets = field(repr=False)
    draws: int = 1
    num_examples: float | None = None
    sends: Literal["weights", "difference"] = "weights"
    seed: int | Randomness | None = field(default=None, repr=False)
    performance: Performance | None = None

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise InputError(f"A round needs at least one draw, got {self.draws}.")
        if self.num_examples is not None and not 0 < self.num_examples < float("inf"):
            raise InputError(f"num_examples must be positive and finite, got {self.num_examples}.")
        if self.sends not in ("weights", "difference"):
            raise InputError(f"A site sends its weights or their difference, got {self.sends!r}.")

    def answer(self, of: str, number: Any, weights: Arrays) -> Answer:
        """Make a round, once: a round that was made is answered again, and never drawn again.

        of       names the federated run; numbers rise within it
        number   of the round, from 1 on
        weights  name -> the server's values of each trained parameter

        Raises RoundRefused, with a text that may leave the site, whatever went wrong. The site's log has the error.
        """
        with self.kept_open() as site:
            return site.answer(of, number, weights)

    def kept_open(self) -> OpenSite:
        """The site for many rounds in this process, which keeps its folder locked until `close`, or `with` ends."""
        return OpenSite(self)

    def run(self) -> Private:
        """Its run, as it is in the folder, or a new one."""
        model = self.model()
        return make_private(
            model,
            self.optimizer(model.parameters()),
            self.data,
            self.plan,
            budgets=self.budgets,
            run_dir=replace(as_folder(self.run_dir), resume=True, checkpoint_every=NEVER),
            seed=self.seed,
            performance=self.performance,
        )


class OpenSite:
    """A site whose run stays open between rounds; each answer is that of `Site.answer`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._run: tuple[Private, _Answered] | None = None

    def answer(self, of: str, number: Any, weights: Arrays) -> Answer:
        """As `Site.answer`."""
        with refusing():
            try:
                return self._answer(of, number, weights)
            except BaseException:
                self.close()  # a draw may be broken; the next round begins from the folder
                raise

    def _answer(self, of: str, number: Any, weights: Arrays) -> Answer:
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise RoundRefused(NO_ROUND)
        private, answered = self._opened()
        given = _checked(weights, trained(private.model, private.optimizer))
        if answered.round != (of, number):
            self._make(private, of, number, given)
            answered.round = of, number
            private.checkpoint()  # durable with the ledger, before the answer leaves
        return self._sent(private, given)

    def _opened(self) -> tuple[Private, _Answered]:
        if self._run is None:
            private = self._site.run()
            self._run = private, _Answered()
            private.register_for_checkpointing(federated_round=self._run[1])
        return self._run

    def _make(self, private: Private, of: str, number: int, given: Mapping[str, Tensor]) -> None:
        """The draws of a new round, from the server's weights; fewer where the plan ends."""
        private._skip_paid()
        if private.is_finished:
            raise RoundRefused(SPENT)
        if not private.ledger.is_new_round(of, number):
            raise RoundRefused(REPEATED)
        private.ledger.begin_round(of, number)
        private._noisy_update.forget_contents()
        for name, value in trained(private.model, private.optimizer).items():
            value.copy_(given[name])
        for left, draw in zip(range(self._site.draws, 0, -1), private.draws, strict=False):
            private.ledger.reserve_at_most(left)
            for batch in draw:
                private.backward(self._site.loss(private.model, batch))
                private.step()

    def _sent(self, private: Private, given: Mapping[str, Tensor]) -> Answer:
        after = trained(private.model, private.optimizer)
        is_whole = self._site.sends == "weights"
        _, rows = display.spend_table(private.plan, private.ledger.charged)
        return Answer(
            weights={name: as_array(value if is_whole else value - given[name]) for name, value in after.items()},
            num_examples=float(self._site.num_examples or private.plan.batch_size),
            spent={row[0]: row[2] for row in rows},  # no counts
        )

    def close(self) -> None:
        """Let other processes use the folder; a run that has made its last step is settled."""
        run, self._run = self._run, None
        if run is not None:
            run[0].close()

    def __enter__(self) -> OpenSite:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Name -> value of each parameter that is trained. Buffers and frozen weights stay where they are.

    optimizer   None: all parameters that require a gradient
    """
    own = None if optimizer is None else {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = {name: p for name, p in model.named_parameters() if p.requires_grad and (own is None or id(p) in own)}
    return {name: p.detach() for name, p in named.items()}


def as_array(values: Tensor) -> npt.NDArray[Any]:
    """A copy; NumPy has no bfloat16, whose values are those of some 32-bit numbers."""
    return np.array((values.float() if values.dtype == torch.bfloat16 else values).numpy(force=True))


def _checked(weights: Arrays, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The server's weights as tensors. Raises RoundRefused for others than those of the model."""
    if weights.keys() != own.keys():
        raise RoundRefused(OTHER_WEIGHTS)
    found: dict[str, Tensor] = {}
    for name, value in own.items():
        array = np.asarray(weights[name])
        if array.shape != tuple(value.shape) or array.dtype.kind != "f":
            raise RoundRefused(OTHER_WEIGHTS)
        found[name] = torch.tensor(array).to(value)
        if not found[name].isfinite().all():
            raise RoundRefused(NOT_FINITE)
    return found
