"""The session store of `k3`: whole model state on disk after every turn, bit for bit, shared between forks.

This package never imports torch and knows nothing of models; see sessions/README.md for promises and formats.
"""

from k3_sessions.checking import Problem, VerifyReport
from k3_sessions.config import StoreConfig, ThinningPolicy
from k3_sessions.errors import (
    BadDraft,
    BadName,
    Damaged,
    FormatUnsupported,
    IdentityMismatch,
    IOFailure,
    NetworkFilesystem,
    SessionChanged,
    SessionExists,
    SessionLocked,
    SessionMissing,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreReadOnly,
)
from k3_sessions.identity import layout_digest
from k3_sessions.portable import ExportReport, ImportReport
from k3_sessions.repairing import RepairReport, SessionRepair
from k3_sessions.room import SessionUsage, TreeUsage, Usage
from k3_sessions.store import Store
from k3_sessions.types import (
    DTYPES,
    HASH_BLOCK,
    CommitReport,
    FieldSpec,
    Identity,
    RestoredState,
    RestorePlan,
    Session,
    StateLayout,
    StateSource,
    StreamedState,
    Turn,
    TurnDraft,
)
from k3_sessions.upkeep import GcReport, RemoveReport
from k3_sessions.writer import SessionWriter

__all__ = [
    "DTYPES",
    "HASH_BLOCK",
    "BadDraft",
    "BadName",
    "CommitReport",
    "Damaged",
    "ExportReport",
    "FieldSpec",
    "FormatUnsupported",
    "GcReport",
    "IOFailure",
    "Identity",
    "IdentityMismatch",
    "ImportReport",
    "NetworkFilesystem",
    "Problem",
    "RemoveReport",
    "RepairReport",
    "RestorePlan",
    "RestoredState",
    "Session",
    "SessionChanged",
    "SessionExists",
    "SessionLocked",
    "SessionMissing",
    "SessionRepair",
    "SessionUsage",
    "SessionWriter",
    "StateLayout",
    "StateSource",
    "Store",
    "StoreBusy",
    "StoreConfig",
    "StoreError",
    "StoreFull",
    "StoreReadOnly",
    "StreamedState",
    "ThinningPolicy",
    "TreeUsage",
    "Turn",
    "TurnDraft",
    "Usage",
    "VerifyReport",
    "layout_digest",
]
