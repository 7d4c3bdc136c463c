"""Taking a step: what was recorded is run, gradients are summed, the optimizer writes.

engine.py records and hands out; direct, bucketed and pipeline are one way of taking a step each; layout.py says what
lies where, owned.py what of it is this rank's (ZeRO); gpu/ takes a step on devices.
"""
