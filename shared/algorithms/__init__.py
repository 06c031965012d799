"""Registry of learning algorithms: builders by wire name."""

from collections.abc import Callable

from shared.algorithms.base import Algorithm
from shared.algorithms.fedavg import fedavg
from shared.algorithms.fedprox import fedprox
from shared.algorithms.fedselect import fedselect
from shared.algorithms.flower import flower
from shared.algorithms.hcef import hcef
from shared.algorithms.local_only import local_only
from shared.algorithms.personal.pruned_personalization import VARIANTS as PERSONALIZED
from shared.algorithms.personal.pruned_personalization import pruned_personalization
from shared.algorithms.scaffold import scaffold
from shared.algorithms.semisupervised.full_model.fedmatch import fedmatch
from shared.algorithms.semisupervised.full_model.fedswitch import fedswitch
from shared.algorithms.semisupervised.full_model.semifl import semifl
from shared.algorithms.semisupervised.semisfl import VARIANTS as SEMISFL
from shared.algorithms.semisupervised.semisfl import semisfl
from shared.algorithms.semisupervised.supervised_only import supervised_only
from shared.algorithms.server_optimizers.fedadagrad import fedadagrad
from shared.algorithms.server_optimizers.fedadam import fedadam
from shared.algorithms.server_optimizers.fedavgm import fedavgm
from shared.algorithms.server_optimizers.fedyogi import fedyogi
from shared.algorithms.split.fedsl import VARIANTS, fedsl
from shared.algorithms.subnetwork.fedmp import fedmp
from shared.algorithms.subnetwork.fedspu import fedspu
from shared.algorithms.subnetwork.fjord import fjord
from shared.algorithms.subnetwork.fjord_fixed import fjord_fixed
from shared.algorithms.subnetwork.hermes import hermes
from shared.algorithms.subnetwork.prunefl import prunefl
from shared.algorithms.subnetwork.random_dropout import random_dropout
from shared.registry import Registry

ALGORITHMS: Registry[Callable[..., Algorithm]] = Registry(
    "algorithm",
    "algorithms",
    {
        "fedavg": fedavg,
        "fedprox": fedprox,
        "fedavgm": fedavgm,
        "fedadam": fedadam,
        "fedyogi": fedyogi,
        "fedadagrad": fedadagrad,
        "scaffold": scaffold,
        "fedsl": fedsl,
        "fedspu": fedspu,
        "flower": flower,
        "hcef": hcef,
        "local_only": local_only,
        "random_dropout": random_dropout,
        "pruned_personalization": pruned_personalization,
        "fedmp": fedmp,
        "fedselect": fedselect,
        "fjord": fjord,
        "fjord_fixed": fjord_fixed,
        "hermes": hermes,
        "prunefl": prunefl,
        "semifl": semifl,
        "fedmatch": fedmatch,
        "fedswitch": fedswitch,
        "semisfl": semisfl,
        "supervised_only": supervised_only,
        **VARIANTS,
        **PERSONALIZED,
        **SEMISFL,
    },
    product=Algorithm,
)
