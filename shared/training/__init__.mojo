"""The training engine: op table and executor, used by the Python package through mojo/capi.mojo and by Mojo programs."""

from .arena import Arena, aligned_zeros
from .executor import ADD, RUN, Step, run_program, run_step
from .lenet5 import LeNet5
from .ops import Context, NAMES, RECORD, ROWS, Record, STATS, code, execute
from .optimizers import Adam, SGD
from .plan import Plan
from .program import Program, float_bits, operand
