"""Nearline: serverless serving of many language models and LoRA adapters from few machines."""

__version__ = "0.1.0"
