"""Settings of a training, declared once, and recipes of the models."""

from ..base.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__, {"settings.declarations": "Training declarations declared of_checkpoint option"}
)
