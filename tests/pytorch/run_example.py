"""Runs a program that imports torchvision: run_example.py PROGRAM [ARGUMENTS]."""

import runpy
import sys

import vision  # noqa: F401

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
