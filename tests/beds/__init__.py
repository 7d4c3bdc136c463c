"""Test beds: faults in ranks and from outside, four hosts in one machine, a small SLURM.

Used by tests only.
"""
