"""The ledger: allocations, events, and what vgpud changed on devices, in one SQLite file.

The order of every outside effect is intent, effect, commit. What must be on disk before an effect (an intent,
an original setting that is about to change) is written with synchronous=FULL: "an additional sync operation
of the WAL file happens after each transaction commit". What only records that an effect is done (commit,
forget) is written with synchronous=NORMAL, which in WAL mode syncs at checkpoints alone. SQLite's
documentation (pragma.html, "PRAGMA synchronous") says of that mode: "A transaction committed in WAL mode with
synchronous=NORMAL might roll back following a power loss or system crash. Transactions are durable across
application crashes regardless of the synchronous setting or journal mode."

So kill -9 loses no acknowledged write at either level. After a power cut the ledger is consistent and holds
at least every intent: the log is played back up to its first bad frame, and a sync covers all frames before
it, so what can be missing is a run of finishing writes at the very end. An allocation whose commit is missing
is then found as an intent, and is undone or finished as after any crash. An allocation whose forget is
missing is found as RELEASING and is released again, which is idempotent. In both cases its processes ended
with the power cut, and /run is empty. Watchers could only notice a revision that is given out twice, so a new
boot skips revisions.

Each writing method takes `durability`, for callers whose commit must survive a power cut.
"""

from vgpud.ledger.batch import Durability
from vgpud.ledger.rows import RowTable
from vgpud.ledger.store import Ledger
from vgpud.ledger.tables import LedgerState

__all__ = ["Durability", "Ledger", "LedgerState", "RowTable"]
