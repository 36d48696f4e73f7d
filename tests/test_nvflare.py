"""The door for NVIDIA FLARE, in its own simulator. Runs where nvflare is installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("nvflare")

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.job_config.api import FedJob

from epsilons.doors import rounds
from epsilons.nvflare import Site, SiteExecutor
from hospitals import NAMES, a_site, averaged, farthest, first_weights, same_weights

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]


class Hospital(SiteExecutor):
    """As a site would have it; `south` runs out after its second draw."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def site(self, name: str) -> Site:
        return a_site(Path(self.folder), name, steps=2 if name == "south" else 6, draws=2)


class Watched(FedAvg):
    """FedAvg from our first weights that writes down what it ends with. A job keeps arguments of plain types."""

    def __init__(self, file: str) -> None:
        self.file = file
        super().__init__(model=first_weights(), num_clients=3, num_rounds=3, ignore_result_error=True)

    def save_model(self, model: Any) -> None:
        Path(self.file).write_text(json.dumps({name: value.tolist() for name, value in model.params.items()}))


class North(FLContext):
    """Of a client of this name, in one job."""

    def get_identity_name(self, default: str = "") -> str:
        return "north"

    def get_job_id(self, default: Any = None) -> Any:
        return "job"


def told(executor: SiteExecutor, task: str = "train", number: int = 0, params: Any = None) -> Any:
    """The reply to a message of the server."""
    message = FLModel(params=first_weights() if params is None else params, current_round=number, total_rounds=9)
    return executor.execute(task, FLModelUtils.to_shareable(message), North(), None)


def test_an_executor_answers_what_the_site_answers_and_refuses_what_it_refuses(tmp_path):
    executor = Hospital(str(tmp_path / "door"))
    found = FLModelUtils.from_shareable(told(executor))
    answer = a_site(tmp_path / "core", draws=2).answer("job", 1, first_weights())
    assert same_weights(found.params, answer.weights)
    assert found.metrics is None
    assert (found.meta["NUM_STEPS_CURRENT_ROUND"], found.meta["epsilon_spent"]) == (answer.num_examples, answer.spent)
    told(executor, number=2)
    older = told(executor, number=1)
    assert (older.get_return_code(), older.get_header("reason")) == (ReturnCode.EXECUTION_RESULT_ERROR, rounds.REPEATED)
    wrong = told(executor, number=3, params={"0.bias": np.zeros(4, np.float32)})
    assert wrong.get_header("reason") == rounds.OTHER_WEIGHTS
    assert told(executor, task="validate").get_return_code() == ReturnCode.TASK_UNKNOWN


def test_its_simulator_equals_the_sites_and_goes_on_without_one_that_is_spent(tmp_path):
    job = FedJob(name="hospitals", min_clients=2)
    job.to_server(Watched(str(tmp_path / "end.json")))
    job.to_clients(Hospital(str(tmp_path / "sites")), tasks=["train"])
    job.simulator_run(str(tmp_path / "work"), clients=list(NAMES), threads=3)
    found = {name: np.array(v, np.float32) for name, v in json.loads((tmp_path / "end.json").read_text()).items()}

    steps = {"north": 6, "east": 6, "south": 2}
    sites = {name: a_site(tmp_path / "core", name, steps=steps[name], draws=2) for name in NAMES}
    weights = first_weights()
    for number, taking_part in [(1, NAMES), (2, NAMES[:2]), (3, NAMES[:2])]:
        weights = averaged([sites[name].answer("job", number, weights) for name in taking_part])
    assert farthest(found, weights) <= 1e-6
