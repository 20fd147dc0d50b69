"""The ledger: what vgpud has promised and changed, in one SQLite file.

The order of every outside effect is intent, effect, commit. What must be on disk before an effect
(an intent, an original that is about to change) is written with synchronous=FULL: "an additional
sync operation of the WAL file happens after each transaction commit". What only records that an
effect is done (commit, forget) is written with synchronous=NORMAL, which in WAL mode syncs at
checkpoints alone. SQLite's documentation (pragma.html, "PRAGMA synchronous") says of that mode:
"A transaction committed in WAL mode with synchronous=NORMAL might roll back following a power loss
or system crash. Transactions are durable across application crashes regardless of the synchronous
setting or journal mode."

So kill -9 loses nothing that was acknowledged at either level. After a power cut the ledger is
consistent and holds at least every intent: the log is played back up to its first bad frame, and a
sync covers all frames before it, so what can be missing is a run of finishing writes at the very
end. Then an allocation whose commit is missing is found as an intent, and undone or finished as
after any crash; one whose forget is missing is found as RELEASING, and released again, which is
idempotent. Its tenants are gone with the power in either case, and so is all that lives in /run.
What could be seen from outside is a revision given out twice, and a new boot skips ahead of that.

Each writing method takes `durability`, so a caller that needs a commit to survive a power cut says so.
"""

from vgpud.ledger.batch import Durability
from vgpud.ledger.store import Ledger
from vgpud.ledger.tables import LedgerState, Original

__all__ = ["Durability", "Ledger", "LedgerState", "Original"]
