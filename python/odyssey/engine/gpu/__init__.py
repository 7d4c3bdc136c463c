"""Training on GPUs: what a worker holds on its device, and how a step becomes launches."""
