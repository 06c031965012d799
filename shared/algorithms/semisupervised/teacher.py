"""SemiSFL's teacher: exponential moving average of the student, running statistics included.

Y. Xu et al. SemiSFL; https://github.com/littlefishe/Capsule. The average is that of A. Tarvainen and H. Valpola, Mean
teachers are better role models, NeurIPS 2017, https://arxiv.org/abs/1703.01780:

    w~ <- g w~ + (1 - g) w        g = min(1 - 1/(t + 1), gamma)

at step t, from 0: the plain mean of all students so far, until that is slower than gamma.
"""

from __future__ import annotations

from torch import Tensor

from shared.tensors.tree import Tree


def ema_decay(step: int, most: float) -> float:
    """Return g at a step, counted from 0 over the whole run; at most gamma."""
    return min(1 - 1 / (step + 1), most)


def update_teacher(teacher: Tree, student: Tree, share: float) -> Tree:
    """Return the teacher after a step of the student; counters, such as BatchNorm's, are the student's.

    Args:
        teacher: Its leaves; not changed.
        student: At least leaves of the same names and shapes.
        share: g, the weight of the teacher.
    """
    return {name: _follow_leaf(leaf, student[name].detach(), share) for name, leaf in teacher.items()}


def _follow_leaf(teacher: Tensor, student: Tensor, share: float) -> Tensor:
    return teacher.lerp(student, 1 - share) if teacher.is_floating_point() else student.clone()
