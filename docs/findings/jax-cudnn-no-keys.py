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

ROWS, HEADS, LANES = 512, 1, 64


def integers(*values):
    """Returns values of the first sequences; there are no more."""
    return jnp.asarray([[*values] + [-1] * (8 - len(values))], jnp.int32)


@jax.jit
def attention(q, k, v, q_lengths, kv_lengths, q_offsets, kv_offsets):
    given = (q, k, v, None, None, q_lengths, kv_lengths, q_offsets, kv_offsets)
    return dot_product_attention(*given, scale=0.125, mask_type=MaskType.PADDING, return_residual=True)


rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.normal(size=(1, ROWS, HEADS, LANES)), jnp.bfloat16) for _ in range(3))
offsets = integers(0, 5), integers(0, 5)
shows = False
for attempt in range(8):
    # Memory that was used before: what is not written holds this.
    stale = [jnp.full((1, ROWS, HEADS, LANES), 7.0 + attempt, jnp.bfloat16) for _ in range(256)]
    jax.block_until_ready(stale)
    for array in stale:
        array.delete()
    # Five queries and five keys, then three queries without keys, whose outs must be 0.
    out = np.asarray(attention(q, k, v, integers(5, 3), integers(5, 0), *offsets)[0], np.float32)[0, 5:8]
    print(f"attempt {attempt}: out of the rows without keys begins {out[0, 0, :4]} (must be 0)")
    shows |= bool((out != 0).any())
sys.exit(2 if shows else 0)
