"""What the launcher does on a node. Its modules are sent there as text and run by the node's own ``python3``.

So each needs nothing but the standard library of Python 3.9, and imports nothing of dgpp: a node on which nothing is
installed can be looked at and installed to. Arguments and results are JSON.
"""
