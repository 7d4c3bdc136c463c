"""Knowing what every rank does, and ending a job that cannot go on.

| file | what it is |
|---|---|
| slot.py | this process's status slot, written by comm and the trainer, read by the watcher |

docs/watch.md explains it. What it is not: a way to steer a training.
"""
