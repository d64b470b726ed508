"""torch's context parallelism: a merged out is lost beside a block whose out is much larger.

Exit code 2 where the defect shows, 0 where it does not.
"""

import math
import sys

import torch
from torch.distributed.tensor.experimental._context_parallel import _attention

# Two blocks of keys for one query: [batch, heads, rows, dim] and [batch, heads, rows].
first, first_lse = torch.full((1, 1, 1, 1), 1e4), torch.zeros(1, 1, 1)
second, second_lse = torch.full((1, 1, 1, 1), 1e-4), torch.full((1, 1, 1), 40.0)

merger = _attention._SDPAMerger(convert_to_f32=True, seq_dim=2)
merger.step(first, first_lse, False)
merger.step(second, second_lse, False)
out, lse = merger.results()

total = math.exp(0) + math.exp(40)
exact = (1e4 * math.exp(0) + 1e-4 * math.exp(40)) / total
print(f"out: got {out.item()}, exact {exact}")
print(f"lse: got {lse.item()}, exact {math.log(total)}")
sys.exit(2 if abs(out.item() - exact) > 1e-3 * exact else 0)
