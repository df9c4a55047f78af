"""``poseidon bench``: variants of a training, run in turn and compared by the ratios of neighbouring runs.

``suite`` reads what is to be compared, ``plan`` makes runs of it, ``runner`` runs them and keeps each one's record,
``figures`` and ``statistics`` make ratios with their intervals, ``table`` shows them. docs/bench.md defines all of it.
"""
