"""`quire explain`: the size, the work and the time of a model, computed from its own traced code.

Next to read: `subject.py`, then `explanation.py`.
"""
