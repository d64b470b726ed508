"""The recorder: keeps one call of attention inside of a program, on each rank, and writes it as a recorded run.

```python
with seamproof.record("run", model.layers[3].attention, group=cp_group, causal=True, balance="dual-chunk"):
    loss = step(batch)                              # forward and backward, as always
```

Then `seamproof judge-recording run` judges it, on any machine. A *group* is what the ranks of context parallelism talk
through: a process group of torch, or an object with `ranks`, `rank` and `gather(value)`.
`seamproof.record_transformer_engine` and `seamproof.record_torch` need no word about the call: TransformerEngine's
module and torch's function say it all.
"""

from .recorder import Recorder, record
from .torch_attention import record_torch
from .transformer_engine import record_transformer_engine

__all__ = ["Recorder", "record", "record_torch", "record_transformer_engine"]
