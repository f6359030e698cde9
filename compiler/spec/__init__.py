"""The spec of a model, and what the compiler asks of it: tensors, shapes, bounds.

model_spec.py has the whole, blocks.py its parts, tensors.py the names and shapes of weights, sources.py how a weight
lies in its file, faults.py what does not hold together, fields.py strict reading and writing.
"""

from llmc.compiler.spec.blocks import (
    Attention,
    Convolution,
    Embedding,
    Encoder,
    Experts,
    Head,
    Latent,
    Mlp,
    Norm,
    Pooling,
    Position,
    Scaling,
    Sizes,
    Tokens,
    Window,
    Wiring,
)
from llmc.compiler.spec.faults import EOS_LIMIT, NAME_LIMIT, range_fault
from llmc.compiler.spec.layer_groups import LayerGroup, layer_groups, pool_layers, pools_of
from llmc.compiler.spec.limits import CHOICES, LIMITS, SWITCHES
from llmc.compiler.spec.model_spec import (
    BLOCKS,
    OPTIONAL_BLOCKS,
    ModelSpec,
    example,
    from_dict,
    from_toml,
    to_dict,
    to_toml,
)
from llmc.compiler.spec.tensors import cached_heads, expand, page_numbers, tensor_shapes, weight_count

__all__ = [
    "BLOCKS",
    "CHOICES",
    "EOS_LIMIT",
    "LIMITS",
    "NAME_LIMIT",
    "OPTIONAL_BLOCKS",
    "SWITCHES",
    "Attention",
    "Convolution",
    "Embedding",
    "Encoder",
    "Experts",
    "Head",
    "Latent",
    "LayerGroup",
    "Mlp",
    "ModelSpec",
    "Norm",
    "Pooling",
    "Position",
    "Scaling",
    "Sizes",
    "Tokens",
    "Window",
    "Wiring",
    "cached_heads",
    "example",
    "expand",
    "from_dict",
    "from_toml",
    "layer_groups",
    "page_numbers",
    "pool_layers",
    "pools_of",
    "range_fault",
    "tensor_shapes",
    "to_dict",
    "to_toml",
    "weight_count",
]
