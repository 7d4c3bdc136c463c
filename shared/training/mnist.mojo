"""`from shared.training.mnist import mnist`."""

from .face.mnist import mnist
