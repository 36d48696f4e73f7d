"""The door for Flower: messages, refusals that FedAvg leaves out, and Flower's own simulation of three sites."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.app.metadata import Metadata
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg, FedAvgM

from epsilons.doors import rounds
from epsilons.flower import client, initial_arrays
from hospitals import NAMES, a_model, a_site, averaged, farthest, first_weights, same_weights

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]


def a_context(**config: Any) -> Context:
    return Context(run_id=7, node_id=1, node_config=config, state=RecordDict(), run_config={})


def a_message(number: Any = 1, arrays: Any = None, run: int = 7, **config: Any) -> Message:
    arrays = initial_arrays(a_model()) if arrays is None else arrays
    settings = ConfigRecord(({} if number is None else {"server-round": number}) | config)
    return message_of(RecordDict({"arrays": arrays, "config": settings}), run=run)


def message_of(content: RecordDict, kind: str = "train", run: int = 7) -> Message:
    """As the server sends it."""
    about = Metadata(
        run_id=run, message_id="1", src_node_id=0, dst_node_id=1, reply_to_message_id="", group_id="",
        created_at=time.time(), ttl=3600.0, message_type=kind,
    )  # fmt: skip
    return Message(content=content, metadata=about)


def sent_by(app: Any, message: Message) -> Message:
    reply: Message = app(message, a_context())
    return reply


def weights_in(reply: Message) -> dict[str, np.ndarray]:
    return {name: array.numpy() for name, array in reply.content["arrays"].items()}


def test_a_reply_holds_what_the_site_answers_and_nothing_else(tmp_path):
    reply = sent_by(client(a_site(tmp_path / "door", draws=2)), a_message())
    answer = a_site(tmp_path / "core", draws=2).answer("7", 1, first_weights())
    assert list(reply.content.keys()) == ["arrays", "metrics", "epsilon-spent"]
    assert same_weights(weights_in(reply), answer.weights)
    assert dict(reply.content["metrics"]) == {"num-examples": answer.num_examples}
    assert dict(reply.content["epsilon-spent"]) == answer.spent


def test_what_a_server_sets_in_its_config_changes_nothing(tmp_path):
    plain = sent_by(client(a_site(tmp_path / "a")), a_message())
    wishes = {"lr": 9.0, "clip_norm": 1e9, "batch_size": 1, "local-epochs": 100, "draws": 50, "noise": 0.0}
    wished = sent_by(client(a_site(tmp_path / "b")), a_message(**wishes))
    assert same_weights(weights_in(plain), weights_in(wished))


def test_a_client_may_keep_its_site_open(tmp_path):
    closed = client(a_site(tmp_path / "a"))
    with a_site(tmp_path / "b").kept_open() as site:
        for number in (1, 2):
            kept, expected = sent_by(client(site), a_message(number)), sent_by(closed, a_message(number))
            assert same_weights(weights_in(kept), weights_in(expected))


BROKEN = Array(dtype="float32", shape=(4,), stype="numpy.ndarray", data=b"no array")
REFUSED = {
    "no round": (a_message(None), rounds.NO_ROUND),
    "a round in words": (a_message("one"), rounds.NO_ROUND),
    "other arrays": (a_message(arrays=ArrayRecord({"0.bias": Array(np.zeros(4))})), rounds.OTHER_WEIGHTS),
    "no arrays in it": (
        a_message(arrays=ArrayRecord(dict.fromkeys(first_weights(), BROKEN))),
        rounds.OTHER_WEIGHTS,
    ),
}


@pytest.mark.parametrize(("message", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_message_that_cannot_be_used_is_answered_by_an_error(tmp_path, message, reason):
    reply = sent_by(client(a_site(tmp_path)), message)
    assert reply.has_error()
    assert reply.error.reason == reason


def test_a_site_that_cannot_be_opened_tells_the_server_no_reason(caplog):
    def no_site(context):
        raise ConnectionError("postgresql://clerk:secret@registry is away")

    reply = sent_by(client(no_site), a_message())
    assert reply.error.reason == rounds.FAILED
    assert "secret" in caplog.text  # in the site's own log


def test_a_site_is_made_from_the_nodes_context(tmp_path):
    app = client(lambda context: a_site(tmp_path, NAMES[context.node_config["partition-id"]]))
    reply = app(a_message(), a_context(**{"partition-id": 2}))
    assert same_weights(weights_in(reply), a_site(tmp_path / "own", "south").answer("7", 1, first_weights()).weights)


def test_evaluation_of_records_is_not_answered(tmp_path):
    message = message_of(RecordDict({"arrays": initial_arrays(a_model())}), "evaluate")
    with pytest.raises(ValueError, match="evaluate"):
        sent_by(client(a_site(tmp_path)), message)


@pytest.mark.parametrize("strategy", [FedAvg, FedAvgM])
def test_a_strategy_leaves_out_a_site_that_is_spent_and_averages_the_others(tmp_path, strategy):
    """Its own code, on our replies."""
    sites = {name: a_site(tmp_path, name, steps=1 if name == "south" else 3) for name in NAMES}
    apps, server = {name: client(site) for name, site in sites.items()}, strategy(fraction_evaluate=0.0)
    if strategy is FedAvgM:
        server.current_arrays = initial_arrays(a_model())
    for number in (1, 2):
        replies = [sent_by(app, a_message(number)) for app in apps.values()]
        assert [reply.has_error() for reply in replies] == [False, False, number == 2]
        arrays, _ = server.aggregate_train(number, replies)
        if strategy is FedAvg:
            answers = [sites[name].answer("7", number, first_weights()) for name in NAMES[: 4 - number]]
            assert farthest({name: array.numpy() for name, array in arrays.items()}, averaged(answers)) <= 1e-6
    assert replies[2].error.reason == rounds.SPENT


class Watched(FedAvg):
    """FedAvg that keeps what it was sent."""

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.seen = [*getattr(self, "seen", []), replies]
        return super().aggregate_train(server_round, replies)


def simulated(folder: Path, steps: dict[str, int], number_of_rounds: int) -> tuple[Any, list[list[Message]]]:
    """(result, replies per round) of Flower's simulation of three sites, each answer in some process of Ray."""
    from flwr.simulation import run_simulation

    found: list[Any] = []
    server = ServerApp()

    @server.main()
    def main(grid, context):
        strategy = Watched(fraction_evaluate=0.0, min_train_nodes=3, min_available_nodes=3)
        result = strategy.start(grid=grid, initial_arrays=initial_arrays(a_model()), num_rounds=number_of_rounds)
        found.extend([result, strategy.seen])

    def site(context):
        name = NAMES[int(context.node_config["partition-id"])]
        return a_site(folder, name, steps=steps[name], draws=2)

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2, "logging_level": 40}}
    run_simulation(server_app=server, client_app=client(site), num_supernodes=3, backend_config=backend)
    return found[0], found[1]


def test_flowers_simulation_equals_its_sites_and_goes_on_without_one_that_is_spent(tmp_path):
    steps = {"north": 6, "east": 6, "south": 2}
    result, replies = simulated(tmp_path / "flower", steps, 3)
    assert [sum(reply.has_error() for reply in one) for one in replies] == [0, 1, 1]
    assert {reply.error.reason for one in replies for reply in one if reply.has_error()} == {rounds.SPENT}
    sites = {name: a_site(tmp_path / "core", name, steps=steps[name], draws=2) for name in NAMES}
    weights = first_weights()
    for number, taking_part in [(1, NAMES), (2, NAMES[:2]), (3, NAMES[:2])]:
        weights = averaged([sites[name].answer("run", number, weights) for name in taking_part])
    assert farthest({name: array.numpy() for name, array in result.arrays.items()}, weights) <= 1e-6
    for one in replies:
        for reply in one:
            assert reply.has_error() or set(reply.content["metrics"]) == {"num-examples"}
            assert reply.has_error() or isinstance(reply.content["metrics"], MetricRecord)
