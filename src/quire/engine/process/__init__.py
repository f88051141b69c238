"""The engine in a process of its own: `client.py` is the server's end, `child.py` the engine's, `messages.py` between.

A fault in the engine (a crash of native code, memory) ends that process and not the server, which can start another.
"""
