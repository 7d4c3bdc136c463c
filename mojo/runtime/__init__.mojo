"""What runs records: the op tables, the executor and its threads, GPUs, sums in shared memory. No Python."""
