"""Partition a data set among devices (Dirichlet, shards, even, by client), reproducibly.

All functions are pure: labels, numbers and a seed in, a list of indices out. Every device computes the same disjoint
shares, provided that their numpy versions have the same generators, which numpy does not promise across major versions.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shared.data.sources.arrays import Arrays, Labels
from shared.data.spec import Client, Dirichlet, Drawn, Even, Partition, Shards
from shared.errors import ConfigError

MAX_DRAWS = 1000
"""Draws of class shares before `min_examples` counts as impossible; each takes microseconds."""
MAX_LISTED = 8
"""Clients that an error lists."""

Index: TypeAlias = NDArray[np.int64]
"""Indices of examples, of shape (M,); or their labels."""
Shares: TypeAlias = list[Index] | dict[str, Index]
"""Every device's examples: by part, or by client."""


def take_share(examples: Arrays, partition: Partition) -> Arrays:
    """Return one device's share of the examples.

    Raises:
        ConfigError: The partition does not fit the examples, or the share would be empty.
    """
    return examples.subset(select_share(split(examples, partition), partition))


def split(examples: Arrays, partition: Partition) -> Shares:
    """Return every device's share, as ascending indices: a list by part, or a mapping by client.

    Raises:
        ConfigError: The partition does not fit the examples.
    """
    labels = examples.labels
    if isinstance(partition, Dirichlet | Shards) and (labels.ndim > 1 or labels.dtype != np.int64):
        raise ConfigError(
            f"partition {partition.__struct_config__.tag}: deals examples by class, but their targets are "
            f"{labels.dtype} of shape {labels.shape[1:]}; use even or client"
        )
    match partition:
        case Dirichlet(alpha=alpha, parts=parts, seed=seed, min_examples=least):
            return split_dirichlet(labels, alpha=alpha, parts=parts, seed=seed, min_examples=least)
        case Shards(shards_per_device=several, parts=parts, seed=seed):
            return split_shards(labels, parts=parts, shards_per_device=several, seed=seed)
        case Even(parts=parts, seed=seed):
            return split_evenly(labels, parts=parts, seed=seed)
        case Client():
            return _split_by_client(examples)


def select_share(shares: Shares, partition: Partition) -> Index:
    """Return the share that a partition selects.

    Raises:
        ConfigError: It does not exist, or it is empty.
    """
    if isinstance(partition, Client):
        assert isinstance(shares, dict)
        return _pick_client(shares, partition.client)
    assert isinstance(shares, list)
    return _pick_part(shares, partition.index)


def split_dirichlet(labels: Index, *, alpha: float, parts: int, seed: int, min_examples: int = 0) -> list[Index]:
    r"""Split every class among the parts by its own Dirichlet draw.

    For each class k, p_k ~ Dir(alpha 1_J) over the J parts, and part j gets the share p_kj of the n_k examples of class
    k, which are shuffled first. The shares of all classes are drawn again, with the next numbers of the same generator,
    until every part has `min_examples`.

    After T.-M. H. Hsu, H. Qi, M. Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", 2019, https://arxiv.org/abs/1909.06335, who draw each *device's* class shares at equal sizes. This
    form, which draws each *class's* device shares, so that sizes differ too and every example is used, is of M.
    Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks", ICML 2019,
    https://arxiv.org/abs/1905.12022.

    Args:
        labels: int64 of shape (N,).
        alpha: Concentration, above zero; the smaller, the fewer classes a part has.
        parts: J, the number of parts.
        min_examples: Lower bound of every part's size.

    Returns:
        J ascending indices; each of 0 .. N - 1 is in exactly one.

    Raises:
        ConfigError: The examples are too few, alpha is out of range, or no draw gave every part enough.
    """
    _require_enough(len(labels), parts, max(1, min_examples))
    if not (alpha > 0 and math.isfinite(alpha * parts)):  # the sum of the parts' gammas
        raise ConfigError(f"partition dirichlet: alpha must be above zero and finite, not {alpha}; correct it")
    _, class_of, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)
    generator = np.random.default_rng(seed)
    for _ in range(MAX_DRAWS):
        shares = generator.dirichlet(np.full(parts, alpha), size=len(class_sizes))  # (classes, parts)
        ends = np.rint(np.cumsum(shares, axis=1) * class_sizes[:, None]).astype(np.int64)
        ends[:, -1] = class_sizes
        sizes = np.diff(ends, axis=1, prepend=0)
        if sizes.sum(axis=0).min() >= min_examples:
            break
    else:
        raise ConfigError(
            f"partition dirichlet: {MAX_DRAWS} draws with alpha {alpha} left some of the {parts} parts below "
            f"min_examples {min_examples}, of {len(labels)} examples; raise alpha, or lower parts or min_examples"
        )
    owner = np.empty(len(labels), dtype=np.int64)
    for number, row in enumerate(sizes):
        owner[generator.permutation(np.flatnonzero(class_of == number))] = np.repeat(np.arange(parts), row)
    return [np.flatnonzero(owner == part) for part in range(parts)]


def split_shards(labels: Index, *, parts: int, shards_per_device: int = 2, seed: int) -> list[Index]:
    """Give every part a few equal runs of the examples sorted by label, so that most have only a few classes.

    B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas, "Communication-Efficient Learning of Deep Networks
    from Decentralized Data", AISTATS 2017, section 3, https://arxiv.org/abs/1602.05629: 200 shards of 300 digits of
    MNIST, two to each of 100 clients. Where the count does not divide, the first shards have one example more.

    Args:
        labels: int64 of shape (N,).

    Returns:
        Ascending indices, one a part; each of 0 .. N - 1 is in exactly one.

    Raises:
        ConfigError: There are more shards than examples.
    """
    if shards_per_device < 1:
        raise ConfigError(f"partition shards: shards_per_device must be >= 1, not {shards_per_device}; correct it")
    _require_enough(len(labels), parts, shards_per_device)
    runs = np.array_split(np.argsort(labels, kind="stable"), parts * shards_per_device)
    drawn = np.random.default_rng(seed).permutation(len(runs)).reshape(parts, shards_per_device)
    return [_sort_index(np.concatenate([runs[number] for number in row])) for row in drawn]


def split_evenly(labels: Labels, *, parts: int, seed: int) -> list[Index]:
    """Deal shuffled examples into parts whose sizes differ by one at most: the IID case.

    Args:
        labels: Of shape (N,); only their number counts.

    Returns:
        Ascending indices, one a part; each of 0 .. N - 1 is in exactly one.

    Raises:
        ConfigError: There are more parts than examples.
    """
    _require_enough(len(labels), parts, 1)
    return [_sort_index(part) for part in np.array_split(np.random.default_rng(seed).permutation(len(labels)), parts)]


def draw_balanced(labels: Index, drawn: Drawn) -> Index:
    """Draw the same number of examples of every class, or nearly; ascending indices, int64 of shape (M,).

    Raises:
        ConfigError: `count` is below the number of classes, or a class has too few examples.
    """
    sizes = np.bincount(labels)
    generator = np.random.default_rng(drawn.seed)
    each, more = (drawn.per_class, 0) if drawn.per_class else divmod(drawn.count, len(sizes))
    if not each:
        raise ConfigError(f"drawn: {drawn.count} examples are fewer than the {len(sizes)} classes; raise count")
    luckier = set(generator.permutation(len(sizes))[:more].tolist())
    chosen = []
    for number, size in enumerate(sizes.tolist()):
        target = each + (number in luckier)
        if size < target:
            raise ConfigError(f"drawn: class {number} has {size} examples, not {target}; draw fewer of each")
        chosen.append(generator.permutation(np.flatnonzero(labels == number))[:target])
    return _sort_index(np.concatenate(chosen))


def exclude_indices(count: int, index: Index) -> Index:
    """Return the indices 0 .. count - 1 without those of `index`, ascending."""
    mask = np.ones(count, dtype=np.bool_)
    mask[index] = False
    return np.flatnonzero(mask)


def _sort_index(index: NDArray[Any]) -> Index:
    return np.sort(index).astype(np.int64)


def _require_enough(count: int, parts: int, each: int) -> None:
    if parts < 1:
        raise ConfigError(f"partition: parts must be >= 1, not {parts}; correct it")
    if parts * each > count:
        raise ConfigError(f"partition: {count} examples cannot give {each} to each of {parts} parts; lower parts")


def _pick_part(shares: list[Index], index: int) -> Index:
    if not 0 <= index < len(shares):
        raise ConfigError(f"partition: index {index} is not from 0 to {len(shares) - 1}; correct index or parts")
    if not len(shares[index]):
        raise ConfigError(f"partition: part {index} of {len(shares)} is empty; raise min_examples or alpha")
    return shares[index]


def _split_by_client(examples: Arrays) -> dict[str, Index]:
    if examples.clients is None:
        raise ConfigError("partition client: the data set has no clients; set client_column")
    indices: defaultdict[str, list[int]] = defaultdict(list)
    for number, name in enumerate(examples.clients):
        indices[name].append(number)
    return {name: np.array(numbers, dtype=np.int64) for name, numbers in indices.items()}


def _pick_client(shares: dict[str, Index], client: str) -> Index:
    if client not in shares:
        names = sorted(shares)
        several = ", ".join([*names[:MAX_LISTED], "..."] if len(names) > MAX_LISTED else names)
        raise ConfigError(f"partition client: no example of client {client!r}; clients: {several}")
    return shares[client]
