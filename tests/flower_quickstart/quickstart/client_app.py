"""ClientApp of the quickstart, with Flower's NumPyClient."""

from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from torch import nn
from torch.utils.data import DataLoader

from quickstart.task import Net, get_weights, load_data, set_weights, test, train


class FlowerClient(NumPyClient):
    """One device."""

    def __init__(
        self, net: nn.Module, loaders: tuple[DataLoader, DataLoader], epochs: int, learning_rate: float
    ) -> None:
        self.net, self.epochs, self.learning_rate = net, epochs, learning_rate
        self.train_loader, self.test_loader = loaders

    def get_parameters(self, config: dict) -> list:
        """Return the network's parameters."""
        return get_weights(self.net)

    def fit(self, parameters: list, config: dict) -> tuple[list, int, dict]:
        """Train from the received parameters."""
        set_weights(self.net, parameters)
        loss = train(self.net, self.train_loader, self.epochs, self.learning_rate)
        return get_weights(self.net), len(self.train_loader.dataset), {"train_loss": loss}

    def evaluate(self, parameters: list, config: dict) -> tuple[float, int, dict]:
        """Evaluate the received parameters."""
        set_weights(self.net, parameters)
        loss, accuracy = test(self.net, self.test_loader)
        return loss, len(self.test_loader.dataset), {"accuracy": accuracy}


def client_fn(context: Context) -> Client:
    """Build the client of one partition."""
    config, node = context.run_config, context.node_config
    loaders = load_data(int(node["partition-id"]), int(node["num-partitions"]), int(config["batch-size"]))
    return FlowerClient(Net(), loaders, int(config["local-epochs"]), float(config["learning-rate"])).to_client()


app = ClientApp(client_fn)
