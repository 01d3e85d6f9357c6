"""Rates of the roles in this process: sampled tokens per second, idle share of each compute thread, loads.

Asked after each step; its metrics go where every step's metrics go.
"""

import time

from relax.services.assembly import Assembly

MEDIA_COUNTS = ("looked_at", "decoded", "memory_hits", "disk_hits")
MEDIA_SECONDS = ("fetch", "look", "decode", "features")


class Meter:
    """Differences since the last step, so that warm-up and evaluation do not blur later steps."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._at = time.monotonic()
        self._busy: dict[str, float] = {}
        self._tokens = 0

    async def measure(self) -> dict[str, float]:
        """Everything since the last call."""
        now = time.monotonic()
        elapsed, self._at = max(now - self._at, 1e-9), now
        metrics = {"step/seconds": elapsed}
        for name, compute in self._assembly.computes.items():
            busy = compute.busy_s - self._busy.get(name, 0.0)
            self._busy[name] = compute.busy_s
            metrics[f"idle/{name}"] = min(1.0, max(0.0, 1.0 - busy / elapsed))
        if "fleet" in self._assembly.__dict__:
            metrics |= await self._engines(elapsed)
        if "pool" in self._assembly.__dict__:
            pool = self._assembly.pool
            metrics |= {"pool/killed": pool.killed, "pool/crashed": pool.crashed}  # type: ignore[attr-defined]
        return {**metrics, **self._assembly.sharing.measures(), **self._media()}

    def _media(self) -> dict[str, float]:
        """What reading media took so far; nothing in a run that reads text only."""
        media = self._assembly.supply.media
        if media is None:
            return {}
        store, counts = media.store, media.store.counts
        metrics = {f"media/{name}": float(counts.get(name, 0)) for name in MEDIA_COUNTS}
        metrics |= {f"media/{what}_s": float(store.seconds.get(what, 0.0)) for what in MEDIA_SECONDS}
        engines = self._assembly.fleet.engines.values() if "fleet" in self._assembly.__dict__ else ()
        encoded = sum(getattr(engine, "encoded_media", 0) for engine in engines)
        return {**metrics, "media/refused": float(sum(store.refused.values())), "media/encoded": float(encoded)}

    async def _engines(self, elapsed: float) -> dict[str, float]:
        fleet = self._assembly.fleet
        tokens = sum([(await engine.status()).sampled_tokens for engine in fleet.engines.values()])
        metrics = {"rollout/tokens_per_second": (tokens - self._tokens) / elapsed}
        self._tokens = tokens
        for updater in fleet.updaters:
            for name, measure in updater.counters.measures().items():
                combined = max if measure.reduction == "max" else float.__add__
                metrics[name] = combined(metrics.get(name, 0.0), float(measure.value))
        return metrics
