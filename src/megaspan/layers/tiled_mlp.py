"""The MLP of a layer that runs whole under checkpointing, in tiles of tokens.

A layer that does not stream runs again in its backward, and its MLP then holds four to seven tensors of its width for the whole
row: 76 GB for a 4B model at 1,048,576 tokens, more than all the rest of the layer. But an MLP works token by token. So its
forward is set to one that goes over tiles (`tokenwise.py`): the MLP's wide tensors are there for one tile at a time, forward
and backward, and its weight gradients are summed in fp32. It costs nothing where nothing behind the MLP is needed again (most
families): the layer's second run stops before the MLP, whose tiles then run a second time each, as they would have in it.

A part of a layer is taken if it holds two matrices and no attention, and if the live module is found to work token by token
(`tokentrial.py`; experts are chosen once for each run, so a mixture of experts stays whole). Weights are gathered once for each
run of the layer, whatever the tiles are.

Source: the tiled MLP of ALST, arXiv 2506.13996.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn

from megaspan.attention.seam import is_attention
from megaspan.layers.dropout import DropoutHandle
from megaspan.layers.reuse import Reuse
from megaspan.layers.tile import hooks_inside
from megaspan.layers.tokentrial import why_not
from megaspan.layers.tokenwise import by_tiles


@final
class Tiling:
    """What the tiled MLPs of one model share.

    Args:
        tile_tokens: most tokens of a tile.
        dropout: tells dropouts where they are.

    Attributes:
        allowed: False while a layer runs that draws random numbers in its own code, which a second run of a tile would not
            draw again.
    """

    def __init__(self, tile_tokens: int, dropout: DropoutHandle) -> None:
        self.tile_tokens, self.dropout, self.reuse, self.allowed = tile_tokens, dropout, Reuse(), True

    def __deepcopy__(self, memo: dict[int, Any]) -> Tiling:
        return self  # a copied model runs its own modules, one after the other with these


@final
class TiledForward:
    """The forward of a module that works token by token, for its `__dict__`.

    Args:
        module: takes hidden states and nothing else.
        tiling: how.
    """

    def __init__(self, module: nn.Module, tiling: Tiling) -> None:
        self._module, self._tiling = module, tiling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output: in tiles for one row [1, T, E] that is longer than a tile, else as always."""
        module, tiling = self._module, self._tiling
        own = type(module).forward
        given = [*args, *kwargs.values()]
        x = given[0] if len(given) == 1 and tiling.allowed else None
        tiled = isinstance(x, Tensor) and x.ndim == 3 and x.shape[0] == 1 and x.shape[1] > tiling.tile_tokens
        if not tiled or hooks_inside(module) is not None:
            return own(module, *args, **kwargs)
        assert x is not None
        place = tiling.dropout.here

        def on_tile(tile: Tensor, tokens: slice) -> Tensor:
            with tiling.dropout.at_tile(place, tokens):
                result: Tensor = own(module, tile)
            return result

        # Read anew: a sharded layer's parameters are gathered ones now.
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return by_tiles(x, on_tile, tiling.tile_tokens, trained, tiling.reuse)


def find_mlps(layer: nn.Module, width: int, tried: set[str] | None = None) -> tuple[list[str], list[str]]:
    """Parts of a layer that can run in tiles, by name, and why other parts like them cannot.

    A sharded layer's weights are to be gathered.

    Args:
        layer: a decoder layer.
        width: of its hidden states.
        tried: see `tokentrial.why_not`.
    """
    tried = set() if tried is None else tried
    found, reasons = [], []
    for name, part in layer.named_children():
        matrices = [parameter for parameter in part.parameters() if parameter.ndim >= 2 and parameter.is_floating_point()]
        if len(matrices) < 2 or any(is_attention(module) for module in part.modules()):
            continue
        reason = why_not(part, width, matrices[0], tried)
        if reason is None:
            found.append(name)
        else:
            reasons.append(f"{name} ({type(part).__name__}) {reason}")
    if not found and not reasons:
        reasons.append(f"{type(layer).__name__} has no part with two matrices beside its attention")
    return found, reasons
