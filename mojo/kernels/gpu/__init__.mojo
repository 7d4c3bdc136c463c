"""The kernels for GPUs, under the names of the ones for the CPU; launch.mojo says how they are called."""
