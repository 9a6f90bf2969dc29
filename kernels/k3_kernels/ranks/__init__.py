"""What ranks have computed in parts, put together."""

from k3_kernels.ranks.add import add
from k3_kernels.ranks.embed import embed, embed_choice

__all__ = ["add", "embed", "embed_choice"]
