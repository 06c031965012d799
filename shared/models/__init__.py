"""Registry of models: builders by wire name."""

from collections.abc import Callable
from functools import partial

from shared.models.alexnet import alexnet
from shared.models.autoencoder import autoencoder
from shared.models.base import Model
from shared.models.cnn import cnn
from shared.models.cnn1d import cnn1d
from shared.models.conv_autoencoder import conv_autoencoder
from shared.models.ds_cnn import ds_cnn
from shared.models.gru import gru
from shared.models.lenet import lenet
from shared.models.mlp import mlp
from shared.models.mobilenet import mobilenet_v3_small
from shared.models.resnet import resnet20
from shared.models.spu import spu_cifar, spu_emnist, spu_speech
from shared.models.tcn import tcn
from shared.models.unet import unet
from shared.models.vgg import vgg
from shared.registry import Registry

MODELS: Registry[Callable[..., Model]] = Registry(
    "model",
    "models",
    {
        "alexnet": alexnet,
        "autoencoder": autoencoder,
        "cnn": cnn,
        "cnn1d": cnn1d,
        "conv_autoencoder": conv_autoencoder,
        "ds_cnn": ds_cnn,
        "gru": gru,
        "lenet": lenet,
        "mlp": mlp,
        "mobilenet_v3_small": mobilenet_v3_small,
        "resnet20": resnet20,
        "spu_cifar": spu_cifar,
        "spu_emnist": spu_emnist,
        "spu_speech": spu_speech,
        "tcn": tcn,
        "unet": unet,
        "vgg13": partial(vgg, 13),
        "vgg16": partial(vgg, 16),
        "vgg19": partial(vgg, 19),
    },
)
