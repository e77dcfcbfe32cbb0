"""toastkit: language models on one's own machine, as a Unix pipeline."""

__version__ = "0.1.0"
