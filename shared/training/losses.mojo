"""Losses: sums over the samples of a shard. A trainer divides once, by the samples of the global batch."""

from .tape import Arg
from .value import Value


trait Loss:
    """A loss of a model's output and labels."""

    @staticmethod
    def of(output: Value, labels: Arg) -> Value:
        """The sum over samples.

        Args:
            output: Of the model, (classes) per sample.
            labels: The memory of the labels.

        Returns:
            One number.
        """
        ...

    @staticmethod
    def name() -> String:
        """What a checkpoint calls it.

        Returns:
            The name.
        """
        ...


struct CrossEntropyLoss(Loss):
    """Cross-entropy of logits."""

    @staticmethod
    def of(output: Value, labels: Arg) -> Value:
        """The sum over samples of log sum exp(x) - x[label].

        Args:
            output: Of the model, (classes) per sample.
            labels: The memory of the labels.

        Returns:
            One number.
        """
        return output.cross_entropy(labels)

    @staticmethod
    def name() -> String:
        """What a checkpoint calls it.

        Returns:
            The name.
        """
        return "CrossEntropyLoss"


struct NLLLoss(Loss):
    """Negative log-likelihood of log-probabilities."""

    @staticmethod
    def of(output: Value, labels: Arg) -> Value:
        """The sum over samples of -x[label].

        Args:
            output: Of the model, (classes) per sample.
            labels: The memory of the labels.

        Returns:
            One number.
        """
        return output.nll(labels)

    @staticmethod
    def name() -> String:
        """What a checkpoint calls it.

        Returns:
            The name.
        """
        return "NLLLoss"
