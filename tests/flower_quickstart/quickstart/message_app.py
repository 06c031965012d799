"""ClientApp of the quickstart, with functions of Flower's messages."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import Net, load_data, test, train

app = ClientApp()


def _load(message: Message, context: Context) -> tuple:
    net, node = Net(), context.node_config
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return net, load_data(int(node["partition-id"]), int(node["num-partitions"]), int(context.run_config["batch-size"]))


@app.train()
def train_message(message: Message, context: Context) -> Message:
    """Train from the received parameters, and count the rounds of this device."""
    net, (loader, _) = _load(message, context)
    loss = train(net, loader, int(context.run_config["local-epochs"]), float(message.content["config"]["lr"]))
    before = context.state["rounds"]["count"] if "rounds" in context.state else 0
    context.state["rounds"] = MetricRecord({"count": before + 1})
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset), "rounds": before + 1})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)


@app.evaluate()
def evaluate_message(message: Message, context: Context) -> Message:
    """Evaluate the received parameters."""
    net, (_, loader) = _load(message, context)
    loss, accuracy = test(net, loader)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)
