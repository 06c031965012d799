"""The largest changes alone: of all values together the k of the largest magnitude, as they are, and where they are.

Of the d values of all floating leaves, taken as one vector in the tree's order,

    k = max(1, ⌈share · d⌉)

travel, as in HCEF (Zhang, Gao, Guo, Gong, https://arxiv.org/abs/2409.04022, equation 7), whose bound holds:
|Q(x) - x|² <= (1 - k / d) |x|². Of equal magnitudes those at lower positions go first, so that equal trees give equal
bytes. What was not sent is zero where it is decoded. Zeros never travel: where fewer than k values are none, so many.
Running statistics of BatchNorm (`running_mean`, `running_var`), integers and leaves of `exact` travel as they are.

Values of 32 bits and their positions take at most `topk_bytes` bytes: 4 k and what `shared.codecs.positions` takes, or
4 d without positions where that is less. On top come the header, some 30 bytes a leaf, and leaves as they are.

`error_feedback`: what was not sent is kept as the codec's memory, on a device in its state of the run, and added to
what it encodes next, be that rounds later (S. U. Stich, J.-B. Cordonnier, M. Jaggi, Sparsified SGD with Memory, NeurIPS
2018, https://arxiv.org/abs/1809.07599). What was sent counts as sent, whatever becomes of the update. A leaf of another
shape than that which is remembered begins anew.

`random_k`: k positions drawn at random in place of the largest, values as they are, so that the bound above holds in
mean. Every position draws a number of 31 bits and the largest win; they come from a generator seeded by the XXH3-128 of
the values and by `seed`: as with `quantize` encoding is pure, and devices, rounds and steps draw apart.

Own entries: `values`, of the floats that hold all leaves', in the order of their positions; and of `bitmap`,
`positions` and `gaps` the one that is there, or none where all values are. A few bytes may stand for any number of
zeros: ask for the outline before decoding.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from shared.codecs import masked_entries
from shared.codecs.base import DTYPES, Codec, Coded, Memory, to_blob
from shared.codecs.content_draws import draw_from, read_seed
from shared.codecs.largest import find_largest
from shared.codecs.masked_entries import Entries
from shared.codecs.positions import FORMS, MOST, Positions, most_bytes, pack_positions, unpack_positions
from shared.errors import WireError
from shared.protocol.messages import Payload
from shared.tensors.counts import ceil_share
from shared.tensors.tree import Tree

STATISTICS = frozenset({"running_mean", "running_var"})
"""Last parts of the names of leaves that are no change of a parameter."""
_INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def sent_values(coordinates: int, share: float) -> int:
    """Return k, how many of so many values are sent at the most."""
    return min(coordinates, max(1, ceil_share(share, coordinates)))


def topk_bytes(coordinates: int, share: float, value_bytes: int = 4) -> int:
    """Return what the values and their positions take at most, wherever they are; scattered ones are near it.

    Leaves that travel as they are, and the header, come on top: they do not depend on the share.

    Args:
        coordinates: d, how many values the leaves have that do not travel as they are.
        share: Of them that is sent.
    """
    count = sent_values(coordinates, share)
    return min(value_bytes * coordinates, value_bytes * count + most_bytes(coordinates, count))


def topk(
    *, share: float = 1.0, error_feedback: bool = False, random_k: bool = False, seed: int = 0, exact: str = ""
) -> Codec:
    """Build the codec.

    Args:
        share: Of the values, that is sent: above 0, at most 1. A device whose assignment says `sent` takes that.
        error_feedback: Whether what was not sent is added to what is sent next.
        random_k: Whether positions are drawn, in place of those of the largest values.
        seed: Goes into what is drawn.
        exact: Names of leaves that travel as they are, parted by commas; running statistics do so anyhow.

    Raises:
        ValueError: An option is none of these.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1; it is {share}")
    if not (isinstance(error_feedback, bool) and isinstance(random_k, bool)):
        raise ValueError("error_feedback and random_k must be true or false")  # noqa: TRY004 - the value is a plan's
    seed, names = read_seed(seed), masked_entries.read_names(exact)

    def encode(tree: Tree, memory: Memory) -> tuple[Payload, Memory]:
        leaves = _leaves_in_part(tree, names)
        vector = _join([_corrected(key, leaf, memory if error_feedback else None) for key, leaf in leaves.items()])
        found = _choose(vector, sent_values(len(vector), share), seed if random_k else None)
        blobs = masked_entries.outline_leaves(tree, leaves.keys())
        blobs |= {name: to_blob(held) for name, held in _pack_values(vector, found).items()}
        if error_feedback:
            memory = {**(memory or {}), **_rest(leaves, vector, found)}
        return Payload(codec="topk", blobs=blobs), memory

    return Codec(encode, _decode, lambda payload: masked_entries.read_entries(payload, "topk").hollow())


def _leaves_in_part(tree: Tree, exact: frozenset[str]) -> Tree:
    """Return the leaves of which a share of the values is sent."""
    floating = masked_entries.divisible_leaves(tree, 0, exact)
    return {key: leaf for key, leaf in floating.items() if key.rpartition(".")[2] not in STATISTICS}


def _corrected(key: str, leaf: Tensor, memory: Memory) -> Tensor:
    """Return a leaf's values and what of them was not sent before, of shape (values,)."""
    before = (memory or {}).get(key)
    flat = leaf.detach().flatten()
    return flat if before is None or before.shape != leaf.shape else flat + before.flatten().to(leaf.dtype)


def _join(flat: list[Tensor]) -> Tensor:
    """Return all values in one vector of its own, of floats that hold those of every leaf."""
    dtype = _common_dtype([leaf.dtype for leaf in flat])
    return torch.cat([torch.empty(0, dtype=dtype), *(leaf.to(dtype) for leaf in flat)])


def _common_dtype(dtypes: list[torch.dtype]) -> torch.dtype:
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


def _choose(vector: Tensor, count: int, seed: int | None) -> Positions | None:
    """Return where the values are that are sent: the largest, or with a seed drawn ones; None where all are."""
    if count == len(vector):
        return None
    keys = vector.view(_INTS[vector.itemsize]) if seed is None else _draw_keys(vector, seed)
    found = find_largest(keys.numpy(), count)
    sent: Positions = found[(vector[torch.from_numpy(found)] != 0).numpy()]
    return sent


def _draw_keys(vector: Tensor, seed: int) -> Tensor:
    """Return a number of 31 bits for every position, a function of the values and of the seed."""
    return torch.empty(len(vector), dtype=torch.int32).random_(generator=draw_from([vector], seed))


def _pack_values(vector: Tensor, found: Positions | None) -> dict[str, Tensor]:
    """Return the values at these positions, and where they are; all, zeros between them, where that is no more."""
    if found is None:
        return {"values": vector}
    values, where = vector[torch.from_numpy(found)], pack_positions(found, len(vector))
    if values.nbytes + sum(held.nbytes for held in where.values()) < vector.nbytes:
        return {"values": values, **where}
    spread = torch.zeros_like(vector)
    spread[torch.from_numpy(found)] = values
    return {"values": spread}


def _rest(leaves: Tree, vector: Tensor, found: Positions | None) -> Tree:
    """Return what was not sent, leaf by leaf; uses up the vector, unless all of it is sent."""
    if found is None:
        vector = torch.zeros_like(vector)
    else:
        vector[torch.from_numpy(found)] = 0
    parts = vector.split([leaf.numel() for leaf in leaves.values()])
    return {key: part.view(leaf.shape).to(leaf.dtype) for (key, leaf), part in zip(leaves.items(), parts, strict=True)}


def _decode(payload: Payload) -> Coded:
    held = masked_entries.read_entries(payload, "topk")
    held.hollow()
    outlines = held.outlines
    counts = [outline.count for outline in outlines.values()]
    if sum(counts) > MOST:
        raise WireError(f"{sum(counts)} values, at most {MOST} may be", reason="oversized")
    vector = _read_vector(held, sum(counts))
    filled: Tree = {}
    for (key, outline), part in zip(outlines.items(), vector.split(counts), strict=True):
        filled[key] = outline.filled(part.to(DTYPES[outline.dtype]))
    return Coded(held.tree(filled), {})


def _read_vector(held: Entries, total: int) -> Tensor:
    """Return all values of the outlined leaves, zeros where none came."""
    dtype = _common_dtype([DTYPES[outline.dtype] for outline in held.outlines.values()])
    form = next((name for name in FORMS if name in held.own), None)
    own = {"values": (to_blob(torch.empty(0, dtype=dtype)).dtype, 1)} | ({form: (FORMS[form], 1)} if form else {})
    mine = masked_entries.read_codec_blobs(held, own)
    values = mine["values"]
    if form is None:
        if len(values) != total:
            raise WireError(f"{len(values)} values for {total}, and no positions", reason="shape")
        return values
    found = unpack_positions(form, mine[form], total, len(values))
    vector = torch.zeros(total, dtype=dtype)
    vector[torch.from_numpy(found)] = values
    return vector
