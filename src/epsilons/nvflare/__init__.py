"""The door for NVIDIA FLARE: an Executor for a site that keeps its data, its budgets and its ledger.

The server's workflow stays as it is: FedAvg averages weights or differences. See docs/federated.md.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import FLMetaKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from ..doors.rounds import NO_ROUND, OTHER_WEIGHTS, RoundRefused, Site, refusing

__all__ = ["Site", "SiteExecutor"]


class SiteExecutor(Executor):
    """Trains a site in the task "train". Subclass it in a module of the site, and name that class in the job.

    A refusal is a reply with a return code and a `reason`, which FedAvg leaves out while enough other sites answer.
    """

    @abstractmethod
    def site(self, name: str) -> Site:
        """The site of the client with this name."""

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """A round of the job; its number is that of the message, counted from 1."""
        if task_name != "train":
            return make_reply(ReturnCode.TASK_UNKNOWN)
        try:
            return FLModelUtils.to_shareable(self._answer(shareable, fl_ctx))
        except RoundRefused as refusal:
            return make_reply(ReturnCode.EXECUTION_RESULT_ERROR, {"reason": str(refusal)})

    def _answer(self, shareable: Shareable, fl_ctx: FLContext) -> FLModel:
        with refusing():
            given: Any = FLModelUtils.from_shareable(shareable)
            if not isinstance(given.params, dict):
                raise RoundRefused(OTHER_WEIGHTS)
            if type(given.current_round) is not int:
                raise RoundRefused(NO_ROUND)
            site = self.site(fl_ctx.get_identity_name())
            answer = site.answer(str(fl_ctx.get_job_id()), given.current_round + 1, given.params)
        return FLModel(
            params_type=ParamsType.FULL if site.sends == "weights" else ParamsType.DIFF,
            params=answer.weights,
            meta={FLMetaKey.NUM_STEPS_CURRENT_ROUND: answer.num_examples, "epsilon_spent": answer.spent},
        )
