"""Settings of the store; each default is written here and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass, field

GIB = 1024**3


@dataclass(frozen=True)
class ThinningPolicy:
    """Which KDA checkpoints of a session stay. Forks, heads and marked turns always keep theirs.

    last: newest turns that keep one. log_spaced: also keep one for each doubling of age, in turns.
    max_kept: upper bound on the checkpoints kept by `last` and `log_spaced` together.
    """

    last: int = 2
    log_spaced: bool = True
    max_kept: int = 12


@dataclass(frozen=True)
class StoreConfig:
    """quota_bytes: allocated bytes everything under the root may take; None: only the free-space floor limits.
    free_floor_bytes, free_floor_share: leave at least min(bytes, share of the disk) free.
    zstd_level: level for planes that shrink; 1 is tuned for them (codec.py).
    threads: workers for one commit or restore, 0: one per core (at most 16).
    staging_bytes: raw state bytes on their way to or from the disk at any time; the memory a commit needs beyond its
    source is under twice this.
    lock_wait_seconds: how long an operation waits for one that has the whole store.
    force_network_fs: use a network file system all the same.
    """

    quota_bytes: int | None = None
    free_floor_bytes: int = 10 * GIB
    free_floor_share: float = 0.05
    zstd_level: int = 1
    threads: int = 0
    staging_bytes: int = GIB // 4
    lock_wait_seconds: float = 30.0
    force_network_fs: bool = False
    thinning: ThinningPolicy = field(default_factory=ThinningPolicy)
