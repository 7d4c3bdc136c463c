"""Training: `DistributedTrainer`, its session of epochs and steps, what it saves and resumes from.

docs/data-flow.md says what each file is. `python -m odyssey.train` is `odyssey train`.
"""
