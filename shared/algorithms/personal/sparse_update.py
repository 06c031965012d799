"""Sparse update: which weights a device holds, and how they travel.

After Liu, Ratnarajah, Sellathurai, Eldar, https://arxiv.org/abs/2309.01816, whose traffic (25) contains no mask. With N
weights, the leaves concatenated in order of name, of which n are held, an update has

    values     n numbers
    mask       u8, ceil(N / 8) bytes, lowest bit of a byte first; or, where that is smaller,
    index      i32, the n positions in ascending order: 4 n bytes, smaller from a pruned share of 31/32 on

and neither of the two where n = N. Other leaves travel unchanged beside them; where n = 0, nothing travels.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shared.errors import WireError
from shared.tensors import bits
from shared.tensors.counts import floor_share
from shared.tensors.pruning import find_smallest
from shared.tensors.tree import Tree, check_like

VALUES, MASK, INDEX = "values", "mask", "index"
INDEX_BYTES, BYTE_BITS = 4, 8


def flatten_weights(weights: Tree) -> Tensor:
    """Return all weights as one vector, of shape (N,), in order of name.

    The network's own order differs from that of a checkpoint or a payload once it has more than ten layers.
    """
    return torch.cat([leaf.flatten() for _, leaf in sorted(weights.items())])


def view_shaped(vector: Tensor, like: Tree) -> Tree:
    """Return views of a `flatten_weights` vector in the shapes of the leaves."""
    leaves = sorted(like.items())
    parts = vector.split([leaf.numel() for _, leaf in leaves])
    return {key: part.view(leaf.shape) for (key, leaf), part in zip(leaves, parts, strict=True)}


def count_held(count: int, share: float) -> int:
    """Return n = N - floor(rho N), the number of weights that remain of `count`."""
    return count - floor_share(share, count)


def most_important(importance: Tensor, count: int) -> Tensor:
    """Return the mask of the `count` most important weights; of equal ones, the first.

    Args:
        importance: Of shape (N,), without NaN.
        count: From 0 to N.
    """
    ranks, device = importance.numpy(force=True), importance.device
    if count == len(ranks):
        return torch.ones(count, dtype=torch.bool, device=device)
    if not count:
        return torch.zeros(len(ranks), dtype=torch.bool, device=device)
    bound = find_smallest(ranks, len(ranks) - count)
    mask = ranks > bound
    mask[np.flatnonzero(ranks == bound)[: count - np.count_nonzero(mask)]] = True
    return torch.from_numpy(mask).to(device)


def pack_sparse(weights: Tensor, mask: Tensor | None) -> Tree:
    """Return the tensors of an update from weights and mask of shape (N,); a mask of None means all."""
    if mask is None:
        return {VALUES: weights}
    if INDEX_BYTES * int(mask.count_nonzero()) < bits.packed_bytes(len(mask), 1):
        return {VALUES: weights[mask], INDEX: mask.nonzero().flatten().to(torch.int32)}
    return {VALUES: weights[mask], MASK: torch.from_numpy(bits.pack(mask.numpy(force=True), 1))}


def unpack_sparse(up: Tree, count: int) -> tuple[Tensor, Tensor | None]:
    """Return all weights, of shape (N,), zero where not held, and the mask of those held.

    Raises:
        WireError: The numbers of values and positions differ, or a position is invalid.
    """
    values = up[VALUES]
    if MASK not in up and INDEX not in up:
        return values, None
    mask = torch.zeros(count, dtype=torch.bool)
    if MASK in up:
        mask = torch.from_numpy(bits.unpack(up[MASK].numpy(), count, 1).view(bool))
    else:
        positions = up[INDEX].to(torch.int64)
        if len(positions) and (
            int(positions[0]) < 0 or int(positions[-1]) >= count or bool((positions.diff() <= 0).any())
        ):
            raise WireError(f"positions of weights are not ascending within 0 to {count - 1}", reason="index")
        mask[positions] = True
    if int(mask.count_nonzero()) != len(values):
        raise WireError(f"{len(values)} values for {int(mask.count_nonzero())} places", reason="shape")
    vector = torch.zeros(count, dtype=values.dtype)
    vector[mask] = values
    return vector, mask


def require_update(up: Tree, shared: Tree, weights: Tree, share: float) -> None:
    """Reject an update that does not match its share of pruned weights.

    Args:
        up: Upload; its leaves may have no storage.
        share: Share of these weights that was to be pruned.

    Raises:
        WireError: It does not match.
    """
    count = sum(leaf.numel() for leaf in weights.values())
    held, values = count_held(count, share), up.get(VALUES)
    if values is not None and values.numel() == (binary_count := count - int(share * count)):
        held = binary_count  # older agents round floor(rho N) in binary: 72 of 100 at rho = 0.29
    like = outline_update(shared, weights, held)
    if up.keys() != like.keys():
        raise WireError(f"tensors {sorted(up)[:BYTE_BITS]}, not {sorted(like)[:BYTE_BITS]}", reason="unknown-tensor")
    check_like(up, like)
    if up and not up[VALUES].is_meta:
        unpack_sparse(up, count)


def outline_update(shared: Tree, weights: Tree, number: int) -> Tree:
    """Return an update of `number` weights without storage.

    Args:
        weights: The prunable leaves of `shared`.
    """
    if not number:
        return {}
    count, dtype = sum(leaf.numel() for leaf in weights.values()), next(iter(weights.values())).dtype
    like = {key: leaf for key, leaf in shared.items() if key not in weights}
    like[VALUES] = torch.empty(number, dtype=dtype, device="meta")
    if number == count:
        return like
    if INDEX_BYTES * number < bits.packed_bytes(count, 1):
        return like | {INDEX: torch.empty(number, dtype=torch.int32, device="meta")}
    return like | {MASK: torch.empty(bits.packed_bytes(count, 1), dtype=torch.uint8, device="meta")}
