"""Mixed precision of a training step: 16-bit forward pass and gradients, 32-bit parameters.

Micikevicius et al. Mixed Precision Training. ICLR 2018. https://arxiv.org/abs/1710.03740

Used only where the processor computes in the type: emulation is slower than 32 bits. In `float16`, small gradients
would vanish, so the loss is multiplied by a scale before the backward pass. A step whose gradients are not finite is
left out and halves the scale; as in `torch.amp.GradScaler`, which needs an optimizer of torch.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared.protocol.messages import StepOptions

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PRECISION_BITS = "precision_bits"
"""Metric of an update whose plan asks for 16 bits: 16, or 32 where the device cannot."""
X86 = ("x86_64", "AMD64")
FIRST_SCALE, GROWTH_STEPS = 2.0**10, 2000
"""Scale before a task's first step, and steps without overflow after which it doubles. `torch.amp.GradScaler` begins
with 2^16 and leaves out the first steps of a training; of a task, these may be a large share."""


def cpu_multiplies_bfloat16() -> bool:
    """Check a CPU for AVX512_BF16, or for the BF16 extension of ARM; false where torch does not say."""
    if platform.machine() in X86:
        return bool(getattr(torch.cpu, "_is_avx512_bf16_supported", bool)())
    kernels = torch.ops.mkldnn if torch.backends.mkldnn.is_available() else None
    return bool(getattr(kernels, "_is_mkldnn_bf16_supported", bool)())


def computes_in(precision: str, device: torch.device) -> bool:
    """Check whether a device has instructions for a precision; every device computes in `float32`."""
    if precision == "float32":
        return True
    if device.type == "cuda":
        return precision == "float16" or torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and precision == "bfloat16" and cpu_multiplies_bfloat16()


@dataclass
class MixedPrecision:
    """Precision of one task's steps.

    Attributes:
        device_type: Type of a `torch.device`, such as `cuda`.
        dtype: Type of the forward pass; None for the parameters' own.
        scale: Factor of the loss.
        forward: Context of each forward pass and its loss.
    """

    device_type: str
    dtype: torch.dtype | None = None
    scale: float = 1.0
    _steps: int = 0
    forward: AbstractContextManager[object] = field(init=False)

    def __post_init__(self) -> None:
        """Make the context, which a task enters at each step."""
        self.forward = nullcontext() if self.dtype is None else torch.autocast(self.device_type, self.dtype)

    @classmethod
    def of(cls, options: StepOptions, device: torch.device) -> MixedPrecision:
        """Return the precision that a plan asks for, or 32 bits if the device cannot compute in it."""
        dtype = DTYPES.get(options.precision) if computes_in(options.precision, device) else None
        return cls(device.type, dtype, FIRST_SCALE if dtype == torch.float16 else 1.0)

    def backward(self, loss: Tensor, weights: Sequence[tuple[str, Tensor]]) -> bool:
        """Compute the gradients of a mean loss; return False, without gradients, if the step must be left out."""
        if self.dtype != torch.float16:
            loss.backward()
            return True
        (loss * self.scale).backward()
        gradients = [weight.grad for _, weight in weights if weight.grad is not None]
        for gradient in gradients:
            gradient.mul_(1 / self.scale)
        if not gradients or bool(torch.stack([gradient.isfinite().all() for gradient in gradients]).all()):
            self._steps += 1
            if self._steps % GROWTH_STEPS == 0:
                self.scale *= 2
            return True
        for _, weight in weights:
            weight.grad = None
        self.scale, self._steps = max(1.0, self.scale / 2), 0
        return False
