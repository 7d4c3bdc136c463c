"""torchvision.

One that was built for GPUs does not find its compiled operators beside a torch for CPUs, and then
its import fails for want of names that nothing here uses: they are declared.
"""

import sys

import torch

try:
    import torchvision
except RuntimeError as e:
    if "torchvision::nms does not exist" not in str(e):
        raise
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

__all__ = ["torchvision"]
