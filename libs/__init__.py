"""What two or more services need, and nothing that only one does.

Owns: the error table, configuration base, clocks, packing of id lists, gRPC conventions, the shared store, the one text
authority, sampling parameters, telemetry, the model catalogue and GGUF import.
Does not own: any policy, any HTTP, any tensor. Never imports services or cli, torch or transformers.
"""

import os

# gRPC's "event engine" reads and writes in a pool of threads, from which a message goes to the completion queue's thread and from there to
# the event loop: two threads to wake, on cores that compute. Without it a message there and back over a Unix socket takes 140 and 120 us of
# the two processes' CPU instead of 220 and 213, and 191 us instead of 296 (decision 35). gRPC reads this as it is imported,
# so it stands where every service's first import comes by; a gRPC that knows the names no more says so in a line. An operator's own stands.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
