"""When to connect again: soon after a broker's restart, seldom to one that throws us out, never in step with others.

Exponential back-off with full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015,
https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/): sleep = random between 0 and
min(cap, base * 2^attempt). Here an attempt that connects counts as failed too, unless the connection lasts.
"""

from __future__ import annotations

FIRST_S, LAST_S = 0.5, 30.0
STEADY_S = 5.0
"""A connection that lasted this long was a success; two clients of one id throw each other out much sooner."""


def longest_wait(before_s: float, *, anew: bool) -> float:
    """Return the upper end of the next wait.

    Args:
        before_s: The upper end of the wait before, 0 at first.
        anew: Whether there was a connection since then that lasted, or whose end has a cause that is mended now.
    """
    return FIRST_S if anew else min(LAST_S, max(FIRST_S, 2 * before_s))
