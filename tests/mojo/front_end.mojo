"""All examples of examples/mojo in one program, so that one is compiled: the name it is called by picks one.
"""

from std.sys import argv

from example_accumulation import accumulation
from example_gpt import gpt
from example_large_model import large_model
from example_lenet import lenet
from example_manual_multi_device import manual_multi_device
from example_own_layer import own_layer
from example_own_op import own_op
from example_pipeline import pipeline
from refusals import refusals
from settings import ends, settings, uncaught
from shared.training import stop
from zoo import elsewhere, zoo


def main() raises:
    if String(argv()[0]).endswith("/uncaught"):
        uncaught()
        return
    try:
        var path = String(argv()[0])
        var name = path[byte = path.rfind("/") + 1 : path.byte_length()]
        if name == "lenet":
            lenet()
        elif name == "gpt":
            gpt()
        elif name == "large_model":
            large_model()
        elif name == "pipeline":
            pipeline()
        elif name == "own_layer":
            own_layer()
        elif name == "own_op":
            own_op()
        elif name == "accumulation":
            accumulation()
        elif name == "manual_multi_device":
            manual_multi_device()
        elif name == "zoo":
            zoo()
        elif name == "elsewhere":
            elsewhere()
        elif name == "refusals":
            refusals()
        elif name == "settings":
            settings()
        elif name == "ends":
            ends()
        else:
            raise Error("[usage] there is no example ", name)
    except e:
        stop(e)
