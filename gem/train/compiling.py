"""torch.compile for the blocks of the model that see nothing jagged."""

from torch import nn

from gem.model.heads import TaskHeads
from gem.model.wukong import WukongLayer

# Their inputs are plain tensors whose batch size alone changes. The jagged blocks run custom
# operators on cached layouts, in which there is nothing for a compiler to fuse.
_BLOCKS = (WukongLayer, TaskHeads)


def compile_dense(model: nn.Module, backend: str = "inductor") -> int:
    """Compiles the dense blocks in place, for any batch size; their parameters keep their names.

    Returns:
        How many blocks there were.
    """
    blocks = [module for module in model.modules() if isinstance(module, _BLOCKS)]
    for block in blocks:
        block.compile(dynamic=True, backend=backend)
    return len(blocks)
