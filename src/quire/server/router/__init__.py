"""Router: one address for several servers. `quire serve --data-parallel-size N` and `quire route` run it.

A request's way: the gate → `routes.py` → `proxy.py` → `fleet.py`, which chooses with `placement.py` → `replica.py`.
"""
