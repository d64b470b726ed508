"""JAX's cuDNN attention for packed sequences: rows of a sequence without keys hold what was in memory.

Exit code 2 where the defect shows, 0 where it does not.
"""

import os
import sys

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

ROWS, HEADS, LANES = 128, 1, 64


def integers(*values):
    return jnp.asarray([values], jnp.int32)


@jax.jit
def attention(q, k, v, q_lengths, kv_lengths, q_offsets, kv_offsets):
    given = (q, k, v, None, None, q_lengths, kv_lengths, q_offsets, kv_offsets)
    return dot_product_attention(*given, scale=0.125, mask_type=MaskType.PADDING, return_residual=True)


def leave(value):
    """Fills much memory, and gives it back: results will lie in it."""
    shapes = [(1, ROWS, HEADS, LANES)] * 1000 + [(1 << 23,)] * 64
    old = [jnp.full(shape, value, jnp.bfloat16) for shape in shapes]
    for array in old:
        array.block_until_ready()
    for array in old:
        array.delete()


rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.normal(size=(1, ROWS, HEADS, LANES)), jnp.bfloat16) for _ in range(3))
# Five queries and five keys, then three queries without a key.
lengths = integers(5, 3), integers(5, 0), integers(0, 5), integers(0, 5)
shows = False
for value in (0.0, 3.0, float("nan")):
    leave(value)
    out = np.asarray(attention(q, k, v, *lengths)[0], np.float32)[0, 5:8]
    print(f"memory of {value} before: out of the rows without keys begins {out[0, 0, :4]} (must be 0)")
    shows |= bool((out != 0).any())
sys.exit(2 if shows else 0)
