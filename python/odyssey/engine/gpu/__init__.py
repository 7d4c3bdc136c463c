"""Training on GPUs: what a worker holds on its device, and how a step becomes launches.

native   the compiled library and a device (the only file that loads it)
plan     in which pieces a worker computes its shards, and how workers' sums meet: pure functions
mirror   arrays on the host and on devices at once
offloaded  optimizer state that stays on the host
rewrite  a recorded program as GPUs run it: launches made one, operands found
group     the devices of a process, the parameters and optimizer state on them
runner   a step: launches, the sums between devices and processes
"""
