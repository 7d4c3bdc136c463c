"""Typed tensors, layers, models, data and trainers over the objects of the Python package (docs/mojo.md)."""

from .arguments import argument, check_options, flag, number
from .bridge import Value, stop
from .composition import Module, PipelineParallel, Repeated, Sequential, Stage
from .data import Batch, DataLoader, Dataset, shakespeare
from .engine import Engine, Sums
from .history import EpochRecord, Evaluation, History
from .layers import AvgPool2d, Conv2d, Dropout, Flatten, GELU, Layer, Linear
from .layers import LogSoftmax, MaxPool2d, ReLU, Sigmoid, Softmax, Tanh
from .models import LeNet5, MLP
from .optim import Adam, AdamW, CrossEntropyLoss, Loss, NLLLoss, Optimizer, RMSprop, SGD
from .optim import Schedule, constant, cosine, linear_warmup, schedule, step_decay
from .own_ops import Unary, load_ops
from .tensor import AnyTensor, Ids, Shape, Tensor, Tokens, avg_pool2d, dropout, flatten
from .tensor import gelu, log_softmax, max_pool2d, relu, sigmoid, softmax, tanh
from .tokens import Embedding, LayerNorm, MultiheadAttention
from .trainer import DistributedTrainer, mesh
from .world import World, connect
