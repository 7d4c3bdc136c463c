"""The program scripts/gpu-check: everything that needs a GPU, in one command.

main.py      options, the order of work, what is printed
check.py     the commands of a part: their time, their log, and how they end
results.py   DIR/gpu-check.json, and the rules for skipping a part that passed before
prepare.py   a folder for a machine without a compiler
parts/       one file for each part
"""
