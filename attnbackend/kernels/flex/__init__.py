"""What stands around torch's ``flex_attention``: packing, block masks, and the two forms in which it runs.

`visibility` says which keys a query sees, `packing` lays a batch's queries and keys out in tiles, `tiles`
lists the key tiles of each query tile, `forms` calls ``flex_attention``.
"""

from .forms import FormKey, math_form, run_compiled, tile_sizes
from .packing import PackedKeys, Packing, TileSizes, pack
from .spans import Span, host_spans
from .tiles import TileLists
from .visibility import Visibility

__all__ = [
    "FormKey",
    "PackedKeys",
    "Packing",
    "Span",
    "TileLists",
    "TileSizes",
    "Visibility",
    "host_spans",
    "math_form",
    "pack",
    "run_compiled",
    "tile_sizes",
]
