"""The small shared state of the mesh: a registry with leases, counters that only grow, records, and the buckets of quotas.

    base (protocol, errors) <- buckets (their arithmetic) <- sqlite | redis | local (buckets of one process) <- opening (by URL)

On one machine it is SQLite in the run directory; in a cluster Redis takes its place behind the same protocol. Serving does not depend on
it: whoever uses it says what goes on without it.
"""

from libs.store.base import Entry, Store, StoreError, StoreObserver, When
from libs.store.buckets import Balance, Charge, Spending
from libs.store.opening import open_store

__all__ = ["Balance", "Charge", "Entry", "Spending", "Store", "StoreError", "StoreObserver", "When", "open_store"]
