"""Top-k codec: send the k largest values, and their positions.

Of the d values of all floating leaves, taken as one vector in the tree's order,

    k = max(1, ⌈share · d⌉)

travel, as in HCEF (Zhang, Gao, Guo, Gong, https://arxiv.org/abs/2409.04022, equation 7), whose bound holds:
|Q(x) - x|² <= (1 - k / d) |x|². Of equal magnitudes those at lower positions go first, so that equal trees give equal
bytes. Other values decode to zero. Zeros never travel: with fewer than k nonzero values, only these do. Running
statistics of BatchNorm (`running_mean`, `running_var`), integers and leaves of `exact` travel unchanged.

Values of 32 bits and their positions take at most `topk_bytes` bytes: 4 k and the bytes of `shared.codecs.positions`,
or 4 d without positions where that is less. In addition there are the header, some 30 bytes a leaf, and unchanged
leaves.

`error_feedback`: values that are not sent are stored as the codec's memory, on a device in its state of the run, and
added to the next encoded tree, even if that is rounds later (S. U. Stich, J.-B. Cordonnier, M. Jaggi, Sparsified SGD
with Memory, NeurIPS 2018, https://arxiv.org/abs/1809.07599). Sent values count as delivered, even if the update is
lost. The memory of a leaf restarts when its shape changes.

`random_k`: k random positions instead of the largest, with unscaled values, so that the bound above holds in mean.
Every position draws a number of 31 bits and the largest win; they come from a generator seeded by the XXH3-128 of the
values and by `seed`: as with `quantize`, encoding is pure, and draws differ between devices, rounds and steps.

Entries: `values`, of a float type that holds all leaves', in the order of their positions; and one of `bitmap`,
`positions` and `gaps`, or none where all values are sent. A few bytes may decode to any number of zeros: check the
outline before decoding.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from shared.codecs import masked_entries
from shared.codecs.base import Codec, Coded, Memory
from shared.codecs.content_draws import read_seed, seed_from_content
from shared.codecs.dense import DTYPES, to_blob
from shared.codecs.largest import find_largest
from shared.codecs.masked_entries import Entries
from shared.codecs.positions import FORMS, MOST, Positions, most_bytes, pack_positions, unpack_positions
from shared.errors import WireError
from shared.protocol.messages import Payload
from shared.tensors.counts import ceil_share
from shared.tensors.tree import Tree

STATISTICS = frozenset({"running_mean", "running_var"})
"""Last part of the names of leaves that are not parameters."""
_INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def sent_values(coordinates: int, share: float) -> int:
    """Return k, the maximum number of values sent."""
    return min(coordinates, max(1, ceil_share(share, coordinates)))


def topk_bytes(coordinates: int, share: float, value_bytes: int = 4) -> int:
    """Return the maximum bytes of values and positions, wherever they are; scattered ones are close to it.

    Unchanged leaves and the header are not included: they do not depend on the share.

    Args:
        coordinates: d, number of values in the encoded leaves.
        share: Share of these values that is sent.
    """
    count = sent_values(coordinates, share)
    return min(value_bytes * coordinates, value_bytes * count + most_bytes(coordinates, count))


def topk(
    *, share: float = 1.0, error_feedback: bool = False, random_k: bool = False, seed: int = 0, exact: str = ""
) -> Codec:
    """Build the codec.

    Args:
        share: Share of the values that is sent: above 0, at most 1. `sent` of a device's assignment takes precedence.
        error_feedback: Whether values that are not sent are added to the next update.
        random_k: Whether positions are random instead of those of the largest values.
        seed: Additional seed of the random draws.
        exact: Names of leaves that travel unchanged, separated by commas; running statistics always do.

    Raises:
        ValueError: An option is out of range.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1; it is {share}")
    if not (isinstance(error_feedback, bool) and isinstance(random_k, bool)):
        raise ValueError("error_feedback and random_k must be true or false")  # noqa: TRY004 - the value is a plan's
    seed, names = read_seed(seed), masked_entries.read_names(exact)

    def encode(tree: Tree, memory: Memory) -> tuple[Payload, Memory]:
        leaves = _leaves_in_part(tree, names)
        unsent = memory if error_feedback else None
        vector = _concatenate([_add_memory(key, leaf, unsent) for key, leaf in leaves.items()])
        positions = _select_positions(vector, sent_values(len(vector), share), seed if random_k else None)
        blobs = masked_entries.outline_leaves(tree, leaves.keys())
        blobs |= {name: to_blob(tensor) for name, tensor in _pack_values(vector, positions).items()}
        if error_feedback:
            memory = {**(memory or {}), **_unsent_values(leaves, vector, positions)}
        return Payload(codec="topk", blobs=blobs), memory

    return Codec(encode, _decode, lambda payload: masked_entries.read_entries(payload, "topk").hollow())


def _leaves_in_part(tree: Tree, exact: frozenset[str]) -> Tree:
    floating = masked_entries.divisible_leaves(tree, 0, exact)
    return {key: leaf for key, leaf in floating.items() if key.rpartition(".")[2] not in STATISTICS}


def _add_memory(key: str, leaf: Tensor, memory: Memory) -> Tensor:
    """Return a leaf's values plus those not sent before, of shape (values,)."""
    before = (memory or {}).get(key)
    flat = leaf.detach().flatten()
    return flat if before is None or before.shape != leaf.shape else flat + before.flatten().to(leaf.dtype)


def _concatenate(flat: list[Tensor]) -> Tensor:
    """Return a new vector of all values, in a float type that holds those of every leaf."""
    dtype = _common_dtype([leaf.dtype for leaf in flat])
    return torch.cat([torch.empty(0, dtype=dtype), *(leaf.to(dtype) for leaf in flat)])


def _common_dtype(dtypes: list[torch.dtype]) -> torch.dtype:
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


def _select_positions(vector: Tensor, count: int, seed: int | None) -> Positions | None:
    """Return the positions of the values to send: the largest, or with a seed random ones; None for all."""
    if count == len(vector):
        return None
    keys = vector.view(_INTS[vector.itemsize]) if seed is None else _draw_keys(vector, seed)
    positions = find_largest(keys.numpy(), count)
    sent: Positions = positions[(vector[torch.from_numpy(positions)] != 0).numpy()]
    return sent


def _draw_keys(vector: Tensor, seed: int) -> Tensor:
    return torch.empty(len(vector), dtype=torch.int32).random_(generator=seed_from_content([vector], seed))


def _pack_values(vector: Tensor, selected: Positions | None) -> dict[str, Tensor]:
    """Return values and positions; or all values, with zeros between them, if that is not larger."""
    if selected is None:
        return {"values": vector}
    values, where = vector[torch.from_numpy(selected)], pack_positions(selected, len(vector))
    if values.nbytes + sum(tensor.nbytes for tensor in where.values()) < vector.nbytes:
        return {"values": values, **where}
    spread = torch.zeros_like(vector)
    spread[torch.from_numpy(selected)] = values
    return {"values": spread}


def _unsent_values(leaves: Tree, vector: Tensor, selected: Positions | None) -> Tree:
    """Return the values that are not sent, leaf by leaf; overwrites the vector, unless all of it is sent."""
    if selected is None:
        vector = torch.zeros_like(vector)
    else:
        vector[torch.from_numpy(selected)] = 0
    parts = vector.split([leaf.numel() for leaf in leaves.values()])
    return {key: part.view(leaf.shape).to(leaf.dtype) for (key, leaf), part in zip(leaves.items(), parts, strict=True)}


def _decode(payload: Payload) -> Coded:
    entries = masked_entries.read_entries(payload, "topk")
    entries.hollow()
    outlines = entries.outlines
    counts = [outline.count for outline in outlines.values()]
    if sum(counts) > MOST:
        raise WireError(f"{sum(counts)} values, at most {MOST} are allowed", reason="oversized")
    vector = _read_vector(entries, sum(counts))
    filled: Tree = {}
    for (key, outline), part in zip(outlines.items(), vector.split(counts), strict=True):
        filled[key] = outline.fill_leaf(part.to(DTYPES[outline.dtype]))
    return Coded(entries.tree(filled), {})


def _read_vector(entries: Entries, total: int) -> Tensor:
    """Return all values of the outlined leaves, zeros where missing."""
    dtype = _common_dtype([DTYPES[outline.dtype] for outline in entries.outlines.values()])
    form = next((name for name in FORMS if name in entries.own), None)
    kinds = {"values": (to_blob(torch.empty(0, dtype=dtype)).dtype, 1)} | ({form: (FORMS[form], 1)} if form else {})
    blobs = masked_entries.read_codec_blobs(entries, kinds)
    values = blobs["values"]
    if form is None:
        if len(values) != total:
            raise WireError(f"{len(values)} values for {total}, and no positions", reason="shape")
        return values
    selected = unpack_positions(form, blobs[form], total, len(values))
    vector = torch.zeros(total, dtype=dtype)
    vector[torch.from_numpy(selected)] = values
    return vector
