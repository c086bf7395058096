"""Python's garbage collector, in a process that answers calls."""

import gc

_YOUNG = 50_000
_YOUNG_PASSES, _OLDER_PASSES = 20, 50


def collect_rarely() -> None:
    """Keep passes of the collector from holding up calls.

    What is there now is never looked at again: it was imported and stays. The requests in flight hold many objects that
    go away without the collector; by its usual count it would look through them twice per call and find nothing. Cycles
    live longer for it, some 50,000 objects of them.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG, _YOUNG_PASSES, _OLDER_PASSES)
