"""Looks at the engine's stats once a second, for metrics, log and autoscaling: no step waits for any of them."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from app.serve.activity_log import log_activity
from app.serve.metric import Stats
from app.serve.metrics import ReplicaMetrics, difference

logger = logging.getLogger("ray.serve")

REPORT_PERIOD_S = 1.0


class StatsReporter:
    """Reports until the engine ends or `close` is called."""

    def __init__(
        self,
        read_stats: Callable[[], Awaitable[dict[str, Any]]],
        metrics: ReplicaMetrics,
        log_interval_s: float,  # 0: no line
    ) -> None:
        self._read_stats = read_stats
        self._metrics = metrics
        self._log_interval_s = log_interval_s
        self._recorded: Stats = {}
        self._logged: Stats = {}
        self._log_time = time.monotonic()
        self._task = asyncio.create_task(self._run())

    @property
    def latest(self) -> Stats:
        """At most about a second old; empty before the first look."""
        return self._recorded

    def close(self) -> None:
        self._task.cancel()

    async def report(self) -> None:
        stats = await self._read_stats()
        self._metrics.record(stats, difference(stats, self._recorded))
        self._recorded = stats
        elapsed_s = time.monotonic() - self._log_time
        if self._log_interval_s and elapsed_s >= self._log_interval_s:
            log_activity(stats, difference(stats, self._logged), elapsed_s)
            self._logged, self._log_time = stats, time.monotonic()

    async def _run(self) -> None:
        try:
            while True:
                await self.report()
                await asyncio.sleep(REPORT_PERIOD_S)
        except Exception as error:  # the health check tells Serve; this line tells why the numbers stand still
            logger.error("Metrics are reported no longer: %s", error)
