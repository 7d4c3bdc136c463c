"""The training engine: op table and executor, used by the Python package through mojo/capi.mojo and by Mojo programs."""

from .executor import ADD, RUN, Step, run_program, run_step
from .ops import Context, NAMES, RECORD, ROWS, Record, STATS, code, execute
