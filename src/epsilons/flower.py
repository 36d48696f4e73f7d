"""The door for Flower: `client(site)` is a ClientApp for a site that keeps its data, its budgets and its ledger.

The server's strategy stays as it is: FedAvg, FedAvgM and others average weights. See docs/federated.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from .doors.rounds import NO_ROUND, OTHER_WEIGHTS, Answer, OpenSite, RoundRefused, Site, as_array, refusing, trained

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, Context, Message
    from flwr.clientapp import ClientApp

__all__ = ["Site", "client", "initial_arrays"]

#: Of Flower's error codes, the one of a client that refuses: a strategy leaves its reply out and goes on.
REFUSED = 6


def client(site: Site | OpenSite | Callable[[Context], Site], mods: Sequence[Any] = ()) -> ClientApp:
    """A Flower client that trains this site. It answers train messages only: no evaluation of records leaves it.

    site  or what makes it from the node's Context. Read `context.node_config`, which the site sets, and nothing from
          `context.run_config`, which the server sets
    mods  of Flower, for messages of this client, such as secure aggregation

    A refusal is an error reply, which FedAvg leaves out. Of a message, the arrays, `server-round` and the id of the run
    are read; every other setting is ignored.

    >>> app = client(Site(...))  # doctest: +SKIP
    """
    from flwr.clientapp import ClientApp

    def train(message: Message, context: Context) -> Message:
        return _reply(message, lambda: site(context) if callable(site) else site)

    app = ClientApp(mods=list(mods))
    app.train()(train)
    return app


def initial_arrays(model: nn.Module) -> ArrayRecord:
    """The arrays that a server begins with, of the parameters that require a gradient: no buffers, no frozen weights.

    >>> initial_arrays(nn.Linear(3, 2)).keys()  # doctest: +SKIP
    dict_keys(['weight', 'bias'])
    """
    from flwr.app import Array, ArrayRecord

    return ArrayRecord({name: Array(as_array(value)) for name, value in trained(model).items()})


def _reply(message: Message, site: Callable[[], Site | OpenSite]) -> Message:
    from flwr.app import Error, Message

    try:
        return Message(content=_content(_answer(message, site)), reply_to=message)
    except RoundRefused as refusal:
        return Message(Error(code=REFUSED, reason=str(refusal)), reply_to=message)


def _answer(message: Message, site: Callable[[], Site | OpenSite]) -> Answer:
    arrays = list(message.content.array_records.values())
    numbers = [config["server-round"] for config in message.content.config_records.values() if "server-round" in config]
    if len(arrays) != 1:
        raise RoundRefused(OTHER_WEIGHTS)
    if len(numbers) != 1:
        raise RoundRefused(NO_ROUND)
    try:
        weights = {name: array.numpy() for name, array in arrays[0].items()}
    except Exception:  # bytes that are no array
        raise RoundRefused(OTHER_WEIGHTS) from None
    with refusing():  # a registry may be away
        return site().answer(str(message.metadata.run_id), numbers[0], weights)


def _content(answer: Answer) -> Any:
    """As FedAvg reads it: one ArrayRecord, and one MetricRecord with the same keys from every site."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

    return RecordDict(
        {
            "arrays": ArrayRecord({name: Array(values) for name, values in answer.weights.items()}),
            "metrics": MetricRecord({"num-examples": answer.num_examples}),
            "epsilon-spent": ConfigRecord(dict(answer.spent)),
        }
    )
