"""Training neural networks from Mojo, alone and under mpirun, over the engine that the Python package uses too.

    from shared.training import DistributedTrainer, LeNet5, SGD

Layers, tensors and models have their sizes and places in their types (docs/mojo.md). Below that is the engine: op table,
programs, executor, and how ranks are connected.
"""

from .arena import aligned_zeros
from .arguments import argument, check_options, flag, number
from .communicator import Communicator, ReduceOp, Solo
from .compile import compiled
from .composition import PipelineParallel, Sequential, Stage
from .data import Batch, DataLoader, Dataset, permutation
from .engine import Engine
from .executor import ADD, RUN, Step, run_program, run_step
from .history import EpochRecord, Evaluation, History
from .layers import Conv2d, Layer, Linear, Shape
from .losses import CrossEntropyLoss, Loss, NLLLoss
from .models import LeNet5, MLP
from .module import Module
from .mpi import Mpi
from .ops import NAMES, code, execute
from .record import Context, RECORD, ROWS, Record, STATS
from .optimizers import Adam, AdamW, Optimizer, SGD
from .parameter import Parameter, Parametric
from .plain_layers import (
    AvgPool2d,
    Dropout,
    Flatten,
    LogSoftmax,
    MaxPool2d,
    ReLU,
    Sigmoid,
    Softmax,
    Tanh,
)
from .plan import Plan
from .program import Program, float_bits, operand
from .runner import Layout, Sums
from .schedules import (
    Schedule,
    constant,
    cosine,
    linear_warmup,
    schedule,
    step_decay,
)
from .tensor import (
    AnyTensor,
    Tensor,
    avg_pool2d,
    dropout,
    flatten,
    log_softmax,
    max_pool2d,
    relu,
    sigmoid,
    softmax,
    tanh,
)
from .trainer import DistributedTrainer
from .world import World, connect, stop
