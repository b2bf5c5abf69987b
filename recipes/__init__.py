"""Makes the checkpoints of this repository: the embedded reader, its draft, and AWQ checkpoints for measurements.

`train` and `train_draft` train the embedded models, `evaluate` and `evaluate_draft` print the tables of their model
cards, and `awq` writes AWQ checkpoints for tests and benchmarks. Nothing here is part of the released package.
"""
