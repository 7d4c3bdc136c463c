"""Batch systems: scripts for SLURM, manifests for Kubernetes."""
