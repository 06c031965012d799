"""Tensors that claim to lie on a device of their own, to find what is left behind on the CPU.

They are computed by the CPU all the same: what runs with them shows that everything was placed, not that any GPU
gives these results, or any at all. As on a GPU, an operation on tensors of both kinds is refused, but for numbers
without axes and for indices; so are numpy, and whatever draws at random in place. torch has no kernels for the device
that is claimed ("lazy"), so that nothing can reach it but through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

APART = torch.device("lazy")
_ATEN = torch.ops.aten
_TAKE_INDICES = {_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN._index_put_impl_.default, _ATEN.index_put.default}
_MOVE = {_ATEN._to_copy.default, _ATEN.copy_.default}
_DRAW = {_ATEN.bernoulli_.float, _ATEN.uniform_.default, _ATEN.normal_.default, _ATEN.native_dropout.default}


class Apart(Tensor):
    """A tensor that claims to lie elsewhere; `held` has its numbers."""

    held: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        """Wrap a tensor of the CPU."""
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=APART,
            requires_grad=False,
        )

    def __init__(self, inner: Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.tolist:  # which torch refuses of every subclass, as it does `numpy`
            return args[0].held.tolist()
        if func is Tensor.numpy and kwargs.get("force"):
            return args[0].held.detach().numpy().copy()
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute with what the tensors hold; raise RuntimeError where they lie in two places."""
    tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
    apart = any(isinstance(one, Apart) for one in tensors)
    device = kwargs.get("device")
    if apart and func not in _MOVE and (left := [one for one in tensors if _is_left(func, one, args)]):
        raise RuntimeError(f"{func}: a tensor of shape {tuple(left[0].shape)} was left on {left[0].device}")
    if apart and func in _DRAW:
        raise RuntimeError(f"{func}: drawn elsewhere than on the CPU")
    there = apart if device is None and func is not _ATEN.copy_.default else device == APART
    if func is _ATEN.copy_.default:
        there = isinstance(args[0], Apart)
    inner = tree_map(lambda one: one.held if isinstance(one, Apart) else one, (args, kwargs))
    if device == APART:
        inner[1]["device"] = torch.device("cpu")
    given = func(*inner[0], **inner[1])
    given = tree_map(lambda one: Apart(one) if there and isinstance(one, Tensor) and one.is_cpu else one, given)
    return return_and_correct_aliasing(func, args, kwargs, given) if apart else given


def _is_left(func: Any, one: Tensor, args: Any) -> bool:
    """Tell whether a tensor is where a GPU's kernel could not read it."""
    if isinstance(one, Apart) or one.is_meta or not one.ndim:
        return False
    return not (func in _TAKE_INDICES and any(one is index for index in args[1]))


class _Factories(TorchDispatchMode):
    """Have tensors made elsewhere where that is said of them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def watched() -> Iterator[torch.device]:
    """Have torch place tensors on the device that is yielded, and refuse what mixes them with others."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # `parameter.data = ...` leaves `held` as it is
    try:
        with _Factories():
            yield APART
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
