"""Whether a process of ours stands back behind others on its machine."""

import logging
import os


def warn_if_held_back(logger: logging.Logger) -> None:
    """A gang is as fast as the slowest of its ranks, and Ray starts its workers at nice 15."""
    if (nice := os.getpriority(os.PRIO_PROCESS, 0)) > 0:
        logger.warning(
            "This process runs at nice %d: others on this machine go first. If that is Ray's default, "
            "RAY_worker_niceness=0, set before Ray starts on this node, ends it",
            nice,
        )
