"""`epsilons plan CONFIG --serve`: a page, on this machine alone, on which a plan can be moved.

Every number is that of `epsilons plan`. A request needs the token of the address, the host name of this server, and,
to change or compute something, its origin. The page gets tiers with counts, and no budget of one person.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import warnings
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..budgets.budgets import Budgets
from ..core.disclosure import has_small_cells, tier_of
from ..errors import BudgetError, EpsilonsError, EpsilonsWarning, InputError, MissingPackageError, json_text, printable
from ..planning import Plan, display, risk_profile
from ..planning.plan_numbers import SHARES
from ..planning.strategies import STRATEGIES
from ..reporting.html import check_replaceable, save_page, serve_page
from ..reporting.plan_page import MOST_ROWS, make_page, of_plan, of_tiers
from ..reporting.plan_words import compared
from .options import console
from .plan_inputs import Asked, RecipeFlags

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise MissingPackageError(
        f"{error.name} is not installed. It is in the extra `serve`: pip install '.[serve]' in a clone of epsilons"
    ) from None

MOVED = "These are not the consents of these people: tiers or shares were moved, so this plan cannot be saved."
_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True)
class Served:
    """What can be moved, and where it is saved.

    asked  of a config
    save   writes the plan; None where nothing is saved
    html   where the page of a saved plan goes
    """

    asked: Asked
    save: Callable[[Plan], None] | None
    html: Path | None
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)

    @cached_property
    def begin(self) -> Plan:
        """The plan as the config has it."""
        return self.asked.plan()

    @cached_property
    def movable(self) -> bool:
        """Whether tiers can be moved: a few, of one delta, none of them rare, and nothing else promised."""
        groups = self.begin.groups
        is_plain = groups.starts is None and groups.limits is None and self.begin.adjacency != SHARES
        few = len(groups) <= MOST_ROWS and not has_small_cells(groups)
        return is_plain and few and len(np.unique(groups.deltas)) == 1 == len(self.begin.phases)

    def values(self) -> dict[str, Any]:
        """What the page begins with."""
        plan, about = self.begin, self.asked.about
        names = [name for name in STRATEGIES if name not in ("exclude", plan.strategy)]
        pairs = zip(plan.epsilons.tolist(), plan.counts.tolist(), strict=True) if self.movable else ()
        tiers = [
            {"epsilon": epsilon, "people": count, "name": tier_of(about.tiers, epsilon)} for epsilon, count in pairs
        ]
        controls = {"tiers": tiers, "steps": plan.steps, "batch_size": plan.batch_size, "strategy": plan.strategy}
        return {
            "name": about.name,
            "unit": plan.unit,
            "controls": controls,
            "strategies": [plan.strategy, *names],
            "saves": self.save is not None,
            "moved": MOVED,
            "odds": risk_profile.ODDS,
        }

    def plan(self, controls: Mapping[str, Any], accountant: str | None = None) -> tuple[Plan, bool]:
        """The plan of these controls, and whether its tiers and shares are those of the people.

        accountant  in the place of the config's
        """
        begin = self.begin
        try:
            steps, batch, strategy = int(controls["steps"]), float(controls["batch_size"]), str(controls["strategy"])
            pairs = [(float(tier["epsilon"]), float(tier["people"])) for tier in controls["tiers"]]
        except (KeyError, TypeError, ValueError, OverflowError):
            raise InputError("Controls are tiers (epsilon, people), steps, batch_size and strategy.") from None
        if strategy not in (begin.strategy, *STRATEGIES):  # a request never names code
            raise InputError("The page offers no such strategy.")
        flags = RecipeFlags(
            steps=None if steps == begin.steps else steps,
            batch_size=None if batch == begin.batch_size else batch,
            strategy=None if strategy == begin.strategy else strategy,
            accountant=accountant if begin.groups.starts is None else None,
        )
        moved = self._moved(pairs) if self.movable else None
        assert self.asked.changed is not None
        return self.asked.changed(flags, moved), moved is None

    def _moved(self, pairs: list[tuple[float, float]]) -> Budgets | None:
        """Budgets by shares; None for those of the people."""
        begin, total = self.begin, sum(people for _, people in pairs)
        if not (len({epsilon for epsilon, _ in pairs}) == len(pairs) and total > 0):
            raise BudgetError("Each tier needs an epsilon of its own, and some people.")
        shares = {epsilon: people / total for epsilon, people in pairs}
        moved = Budgets.from_shares(shares, records=begin.records, delta=float(begin.delta[0]), unit=begin.unit)
        return None if moved.groups == begin.groups else moved

    def answer(self, controls: Mapping[str, Any], exact: bool) -> dict[str, Any]:
        """What `epsilons plan` prints of these controls, and what a comparison shows. exact: not by RDP alone."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", EpsilonsWarning)
            plan, is_own = self.plan(controls, None if exact else "rdp")
            about = replace(self.asked.about, tiers=self._tiers(controls))
            page = make_page(plan, about, alone=True)
        said = [str(one.message) for one in caught if issubclass(one.category, EpsilonsWarning)]
        tables = [[title, *table] for title, table in display.phase_tables(plan, about.tiers)]
        tiers = {title: list(cells.items()) for title, cells in of_tiers(page).items()}  # scripts reorder keys like "4"
        shown = {"title": plan.title, "tables": tables, "notes": [*plan.notes, *said], "guarantee": plan.guarantee}
        return shown | {"own": is_own, "facts": of_plan(page), "tiers": tiers, "verdict": page.verdict}

    def _tiers(self, controls: Mapping[str, Any]) -> Mapping[str, float] | None:
        """The names of tiers, each with the epsilon that it was moved to."""
        names = [tier_of(self.asked.about.tiers, epsilon) for epsilon in self.begin.epsilons.tolist()]
        if not (self.movable and len(controls["tiers"]) == len(names)):
            return self.asked.about.tiers
        return {name: float(tier["epsilon"]) for name, tier in zip(names, controls["tiers"], strict=True) if name}

    def compared(self, plans: Any) -> str:
        """What differs between plans that were kept. plans: of each, the `tiers` of an answer. Raises ValueError."""
        try:
            columns = [{title: dict(cells) for title, cells in tiers.items()} for tiers in plans]
            return compared([f"plan {name}" for name in "ABC"[: len(columns)]], columns, self.begin.unit)
        except (AttributeError, KeyError, TypeError, IndexError):
            raise ValueError from None

    def saved(self, controls: Mapping[str, Any]) -> str:
        """Write the plan and its page. Raises InputError where tiers or shares were moved."""
        plan, is_own = self.plan(controls)
        if self.save is None or self.html is None:
            raise InputError("Nothing is saved without -o plan.json.")
        if not is_own:
            raise InputError(MOVED)
        check_replaceable(self.html)
        self.save(plan)
        save_page(plan, self.asked.about, self.html)
        return f"Saved, with its page {printable(self.html)}. Both are internal, confidential."


def app(served: Served, host: str) -> Starlette:
    """The server. host: its name and port, "127.0.0.1:8000"."""

    async def check(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        token = request.headers.get("x-token") or request.query_params.get("token", "")
        is_ours = request.method == "GET" or request.headers.get("origin") == f"http://{host}"
        is_known = secrets.compare_digest(token.encode(), served.token.encode())
        if not (request.headers.get("host") == host and is_ours and is_known):
            return Response("Refused.", 403, _HEADERS)
        return await proceed(request)

    async def page(request: Request) -> Response:
        nonce = secrets.token_urlsafe(16)
        policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'"
        policy += "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        return HTMLResponse(serve_page(nonce, served.values()), headers=_HEADERS | {"Content-Security-Policy": policy})

    async def post(request: Request) -> Response:
        try:
            asked = await request.json()
            if not isinstance(asked, dict) or not isinstance(asked.get("controls"), dict):
                raise ValueError
            if request.url.path == "/compare":
                result: dict[str, Any] = {"verdict": served.compared(asked.get("plans"))}
            elif request.url.path == "/save":
                result = {"saved": served.saved(asked["controls"])}
            else:
                result = served.answer(asked["controls"], asked.get("exact") is True)
        except EpsilonsError as error:
            return Response(json_text({"error": str(error)}), 409, _HEADERS, "application/json")
        except ValueError:
            return Response("Not JSON.", 400, _HEADERS)
        return Response(json_text(result), 200, _HEADERS, "application/json")

    posts = [Route(path, post, methods=["POST"]) for path in ("/plan", "/save", "/compare")]
    return Starlette(routes=[Route("/", page), *posts], middleware=[Middleware(BaseHTTPMiddleware, dispatch=check)])


def serve_plan(asked: Asked, save: Callable[[Plan], None] | None, output: Path | None, html: Path | None) -> None:
    """Serve until Ctrl-C. The page of a plan goes to `html`, or beside the plan."""
    if asked.changed is None:
        raise InputError("--serve needs a config, e.g. epsilons plan people.toml --serve.")
    served = Served(asked, save, html or (output.with_suffix(".html") if output else None))
    if served.html:
        check_replaceable(served.html)
    served.answer(served.values()["controls"], exact=False)  # errors of the config end the command
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        out = console()
        out.print(f"http://{host}/?token={served.token}", soft_wrap=True)
        out.print("The page is internal, confidential. Ctrl-C ends it.")
        settings = uvicorn.Config(app(served, host), log_level="error", access_log=False, lifespan="off")
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(settings).run(sockets=[listener])
