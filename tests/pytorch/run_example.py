"""Runs a program that imports torchvision: run_example.py PROGRAM [ARGUMENTS].

A torchvision that was built for GPUs does not find its compiled operators beside a torch for CPUs, and then its import
fails for want of names that the examples do not use. They are declared here.
"""

import runpy
import sys

import torch

try:
    import torchvision  # noqa: F401
except RuntimeError as e:
    if "torchvision::nms does not exist" not in str(e):
        raise
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
