"""Kills of a process at a file operation, for scripts that fork."""

import os
import signal


def arm(die_at: int) -> list[int]:
    """Kill this process at its ``die_at``-th fsync, rename or replace; returns a list with the number of calls left."""
    left = [die_at]

    def guarded(call):
        def maybe(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return maybe

    for name in ("fsync", "rename", "replace"):
        setattr(os, name, guarded(getattr(os, name)))
    return left
