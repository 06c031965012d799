"""ServerApp of the quickstart; fieldfleet's server takes its place."""

from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg

from quickstart.task import Net, get_weights


def server_fn(context: Context) -> ServerAppComponents:
    """Return FedAvg over all clients."""
    config = context.run_config
    strategy = FedAvg(
        fraction_fit=config["fraction-fit"], initial_parameters=ndarrays_to_parameters(get_weights(Net()))
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=config["num-server-rounds"]))


app = ServerApp(server_fn=server_fn)
