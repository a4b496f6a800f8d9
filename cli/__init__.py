"""The `tokenloom` command.

Owns: the local mesh's processes (serve), and the tools that look at a running mesh (trace).
Does not own: anything that a service does; it starts services as processes and talks to them as any client would.
"""
