"""Inference of mixture-of-experts checkpoints in numpy, float32, with outputs that no batch changes.

`prepare` converts a checkpoint once into a file that all processes of a machine map; `Model` runs it.
"""

from coterie.modeling.layers import RemoteExperts
from coterie.modeling.model import Model, StepOutput
from coterie.modeling.prepare import prepare
from coterie.modeling.step import StepBatch
from coterie.modeling.turns import PartError

__all__ = ["Model", "PartError", "RemoteExperts", "StepBatch", "StepOutput", "prepare"]
