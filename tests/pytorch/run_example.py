"""Runs a program that imports torchvision: run_example.py PROGRAM [ARGUMENTS]."""

import os
import runpy
import sys

import vision  # noqa: F401

sys.argv = sys.argv[1:]
# as for a program that Python is given
sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
runpy.run_path(sys.argv[0], run_name="__main__")
