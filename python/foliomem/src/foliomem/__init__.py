"""Runs programs inside a memory limit that they do not fit in, and looks at the run that this program is in.

    foliomem.run(["python3", "analyse.py"], limit="1G")   # another program, as subprocess.run does
    foliomem.limit("2G")                                  # this program: at its start
    foliomem.status()["taken_bytes"]                      # what its run takes now
    foliomem.reclaim()                                    # compress now what has been unused for longest
    foliomem.on_pressure(callback)                        # to be told when memory gets short

The command `foliomem` does the work; this module only starts it. It needs Linux.
"""
from foliomem._command import FoliomemError, command
from foliomem._control import Level, Pressure, Watch, inside, on_pressure, reclaim, status
from foliomem._run import CompletedRun, limit, run

__all__ = [
    "CompletedRun", "FoliomemError", "Level", "Pressure", "Watch", "command", "inside", "limit", "on_pressure", "reclaim", "run",
    "status",
]
