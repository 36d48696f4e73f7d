"""A run of `epsilons train` that is charged to a registry: who takes part, their budgets, its reservation."""

from __future__ import annotations

import secrets
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..budgets.budgets import Budgets
from ..budgets.ids import BLANKS, Rule
from ..core.disclosure import how_many
from ..core.mechanism import IntArray
from ..errors import EpsilonsError, InputError, RegistryError, RegistryRefusedError
from ..ledger.run_folder import RunFolder
from ..planning import Plan
from ..registry import Accounts, Registry, Reservation, evidence
from ..registry.registry import Keeper, roster_digest
from ..training.distributed import Ranks
from .config import Config
from .config_training import ROSTER
from .config_training import VARIABLE as VARIABLE

# -- Open a registry for a command: its URL, which may hold a password, is in no message

#: What comes after a settlement.
NEXT = "Next: epsilons registry verify URL; then epsilons registry export URL -o FILE, to keep FILE elsewhere."


@contextmanager
def opened(
    url: str, pepper: Path | None, spelling: str | Sequence[str] | None = None, is_new: bool = False
) -> Iterator[Registry]:
    """An open registry, perhaps a new one. Errors of its database become RegistryError."""
    try:
        with (Registry.create if is_new else Registry)(url, pepper, spelling) as registry:
            yield registry
    except Exception as error:
        if isinstance(error, sqlite3.Error) or type(error).__module__.partition(".")[0] == "psycopg":
            # The text of the error may repeat the URL or a row.
            raise RegistryError(
                f"The registry's database failed ({type(error).__name__}). Nothing was changed by this command, or "
                "all of it: repeat it."
            ) from None
        raise


def id_of(person: str | None) -> str:
    """The id on the command line, or the first line of the standard input. Raises InputError for an empty one."""
    text = (sys.stdin.readline() if person == "-" else person or "").strip(BLANKS)
    if not text:
        raise InputError("--id needs an id of a person. With --id - it is read from the standard input.")
    return text


# -- A run of `epsilons train` that is charged to a registry: who takes part, their budgets, its reservation


@dataclass
class _Elsewhere:
    """The registry of another rank: only rank 0 speaks with the database."""

    id: str

    def begin(self, run: str, key: str, previous: str | None, ledger: str) -> None:
        raise RegistryError("Only rank 0 begins a run.")

    def settle(self, run: str, charged: Sequence[int], ledger: str, key: str) -> None:
        raise RegistryError("Only rank 0 settles a run.")

    def leavers(self, numbers: IntArray) -> IntArray:
        raise RegistryError("Only rank 0 asks who left.")


@dataclass
class Members:
    """The people of one run, and its reservation. On ranks other than 0 there is no registry.

    id        of the registry
    share     of what people have left
    resumed   (name of the run in the registry, its plan), of a run that continues
    begins    True for a run to resume of which nothing had begun: it is planned, reserved and begins now
    left_out  how many are left out, in words by the rule of 20; None if none
    rule      how ids are made equal, in the registry and the files
    """

    id: str
    registry: Registry | None
    ranks: Ranks
    share: float
    project: str
    resumed: tuple[str, Plan] | None = None
    begins: bool = False
    left_out: str | None = None
    rule: Rule = ()
    _accounts: Accounts | None = field(default=None, init=False)
    _numbers: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64), init=False)

    def choose(self, ids: list[str]) -> tuple[npt.NDArray[np.bool_], Budgets]:
        """(people,) who takes part, and the budgets of these. Raises RegistryRefusedError."""
        found = None
        with self.ranks.collective("reading the registry"):
            if self.registry is not None:
                found = self._again(self.registry, ids) if self.resumed else self._new(self.registry, ids)
        chosen = self.ranks.broadcast(found)
        assert chosen is not None
        out = int((~chosen[0]).sum())
        if out and not self.resumed:
            self.left_out = (
                f"{how_many(out, len(ids))} persons of the training data are left out: they withdrew, or have "
                f"nothing left of their lifetime budgets. {ROSTER}"
            )
        return chosen

    def _new(self, registry: Registry, ids: list[str]) -> tuple[npt.NDArray[np.bool_], Budgets]:
        accounts = registry.account(ids)
        takes_part = accounts.can_take_part
        if not takes_part.any():
            raise RegistryRefusedError("All people of these data withdrew, or have nothing left to spend.")
        self._accounts = accounts.subset(takes_part)
        self._numbers = self._accounts.numbers
        return takes_part, self._accounts.budgets(self.share)

    def _again(self, registry: Registry, ids: list[str]) -> tuple[npt.NDArray[np.bool_], Budgets]:
        assert self.resumed is not None
        takes_part, budgets = registry.again(self.resumed[0], self.resumed[1], ids)
        self._numbers = registry.numbers(budgets.ids)
        return takes_part, budgets

    def states(self, ids: list[str]) -> npt.NDArray[np.int64]:
        """(people,) of different ids: 0 can take part, 1 withdrew, 2 has nothing left; −1 has no account."""
        found = None
        with self.ranks.collective("reading the registry"):
            if self.registry is not None:
                found = self.registry.are_enrolled(ids).astype(np.int64) - 1
                known = np.flatnonzero(found == 0)
                if len(known):
                    accounts = self.registry.account([ids[i] for i in known])
                    found[known] = np.where(accounts.withdrawn, 1, np.where(accounts.can_take_part, 0, 2))
        out = self.ranks.broadcast(found)
        assert out is not None
        return out

    def withdrawn(self, ids: list[str]) -> npt.NDArray[np.bool_]:
        """(people,) True for those who are enrolled and withdrew, so that no test data hold them either."""
        return np.asarray(self.states(ids) == 1)

    @contextmanager
    def reserved(self, folder: Path, plan: Plan, budgets: Budgets) -> Iterator[Reservation]:
        """The reservation of this run. It is given back if the body fails before the run has begun."""
        own = self.resumed[0] if self.resumed else f"{folder.resolve().name}-{secrets.token_hex(4)}"
        run = self.ranks.broadcast(own)
        keeper: Keeper = self.registry or _Elsewhere(self.id)
        try:
            with self.ranks.collective("reserving"):
                if self.registry is not None and not self.resumed:
                    self._reserve(self.registry, run, folder, plan, budgets)
            rows = budgets.group
            lifetimes = [] if self._accounts is None else self._accounts.lifetimes(rows)
            yield Reservation(keeper, run, plan.digest, roster_digest(rows), self._numbers, lifetimes)
        except BaseException:
            if self.registry is not None and not self.resumed:
                with suppress(EpsilonsError):  # it may have begun, or the registry be away
                    self.registry.cancel(run, missing_ok=True)
                    evidence.remove(folder)
            raise
        if self.registry is not None:
            evidence.remove(folder)

    def _reserve(self, registry: Registry, run: str, folder: Path, plan: Plan, budgets: Budgets) -> None:
        assert self._accounts is not None
        evidence.note(folder, registry.id, run)
        registry.reserve(run, plan, self._accounts, budgets=budgets, project=self.project)


@contextmanager
def members_of(
    url: str | None, pepper: Path | None, config: Config, folder: Path, resume: bool, ranks: Ranks
) -> Iterator[Members | None]:
    """The people of the run in `folder`, by the registry that it is charged to; None for a run without one.

    Raises InputError if URL, config and the run to resume do not fit together.
    """
    stored, noted = ranks.broadcast(_known(folder) if resume else (None, None))
    known = stored or noted
    if resume:
        _check_resumed(url, folder, known)
    if url is None:
        if config.registry is not None:
            raise InputError(
                f"The config has a section [registry]. Give the registry's URL: --registry URL, or set {VARIABLE}."
            )
        yield None
        return
    share, project = _share(config, stored is not None)
    with ExitStack() as stack:
        registry = None
        with ranks.collective("opening the registry"):
            if ranks.is_main:
                registry = stack.enter_context(opened(url, pepper, config.data.ids))
                _check_charged(registry, known)
                if resume and stored is None:
                    evidence.give_back(registry, folder)
        resumed = None if stored is None else (stored["run"], Plan.load(folder / "plan.json"))
        id_, rule = ranks.broadcast(("", ()) if registry is None else (registry.id, registry.spelling))
        yield Members(id_, registry, ranks, share, project, resumed, resume and stored is None, rule=rule)


def _share(config: Config, is_charged: bool) -> tuple[float, str]:
    """The part of what people have left that a run may use, and its project. Raises InputError for no part."""
    share, project = (None, "") if config.registry is None else (config.registry.share, config.registry.project)
    if share is None and not is_charged:
        raise InputError(
            "Say which part of what people have left this run may use: --share 0.25, or [registry] share. 1 leaves "
            "nothing for later runs."
        )
    return share or 1.0, project


def _check_charged(registry: Registry, known: dict[str, str] | None) -> None:
    if known is not None and known["id"] != registry.id:
        raise InputError(f"The run is charged to the registry {known['id']}, and this is {registry.id}.")


def _check_resumed(url: str | None, folder: Path, known: dict[str, str] | None) -> None:
    """Raise InputError for a run that began without a registry, or was charged to one, and now is continued without.

    known  what the run says about its registry; None if it says nothing
    """
    is_without = known is None and RunFolder(folder).settings.is_file()
    if url and is_without:
        raise InputError("The run began without a registry; leave out --registry.")
    if not url and known is not None:
        raise InputError(f"The run is charged to a registry. Give its URL: --registry URL, or set {VARIABLE}.")


def _known(folder: Path) -> tuple[dict[str, str] | None, dict[str, str] | None]:
    """What run.json says about the registry, or what is noted of a run without a ledger."""
    noted = evidence.noted(folder)
    return (stored_registry(folder) if noted is None else None), noted


def stored_registry(folder: Path) -> dict[str, str] | None:
    """What run.json says about the registry."""
    run = RunFolder(folder)
    found: Any = run.read_settings().get("registry") if run.settings.is_file() else None
    return found if isinstance(found, dict) and {"id", "run"} <= set(found) else None
