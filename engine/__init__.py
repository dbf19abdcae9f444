"""Tokens: sequences, their KV blocks, steps and adapters; one process per instance (`python -m nearline.engine`).

Words and minds only, so importing it loads no torch.
"""

from nearline.engine.adapters import AdapterTable, FreeAdapter, ReadAdapter
from nearline.engine.block_manager import BlockManager
from nearline.engine.config import EngineConfig, PolicyName
from nearline.engine.core import EngineCore, EngineLoad
from nearline.engine.scheduler import Scheduler
from nearline.engine.sequence import Sequence, SequenceState
from nearline.engine.types import Batch, BatchItem, SampledToken

__all__ = [
    "AdapterTable",
    "Batch",
    "BatchItem",
    "BlockManager",
    "EngineConfig",
    "EngineCore",
    "EngineLoad",
    "FreeAdapter",
    "PolicyName",
    "ReadAdapter",
    "SampledToken",
    "Scheduler",
    "Sequence",
    "SequenceState",
]
