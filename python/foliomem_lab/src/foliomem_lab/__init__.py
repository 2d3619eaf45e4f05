"""Runs of foliomem's lab on the machines of a Ray cluster.

`foliomem lab sweep --ray ADDRESS` is the front end: it checks the scenario, starts this package (`python3 -m foliomem_lab`)
with a request on standard input, and makes tables and files of the runs that come back. Here is only what carries a
combination of settings to a machine and its result back.
"""
