"""Seamproof for kernels that Python can call: declare a function, check it.

```python
@seamproof.flash_varlen(arrays="torch", formats=["bf16"])
def attention(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None, causal=False,
              window_size=(-1, -1)):
    ...

def test_attention():
    seamproof.check(attention, budget="60s")
```

`docs/python.md` has the rest.
"""

from .checking import Report, check
from .declare import both_alignments, bottom_right, multiples, packed, top_left
from .errors import (
    CannotJudge,
    DeclarationError,
    DeviceLost,
    DirectoryTaken,
    MaximumTooSmall,
    NotHere,
    OtherRankFailed,
    PaddingDenied,
    ProgramMissing,
    ProtocolError,
    Refused,
    SeamproofError,
    TooLittleRun,
    WrongSetting,
)
from .loading import options
from .lse import LseForm, lse
from .problem import Problem, Run, Sequence, Side
from .recorder import Recorder, record, record_torch, record_transformer_engine
from .subject import Result, Subject, autograd, subject
from .varlen import flash_varlen

__version__ = "0.1.0"

__all__ = [
    "CannotJudge",
    "DeclarationError",
    "DeviceLost",
    "DirectoryTaken",
    "LseForm",
    "MaximumTooSmall",
    "NotHere",
    "OtherRankFailed",
    "PaddingDenied",
    "Problem",
    "ProgramMissing",
    "ProtocolError",
    "Recorder",
    "Refused",
    "Report",
    "Result",
    "Run",
    "SeamproofError",
    "Sequence",
    "Side",
    "Subject",
    "TooLittleRun",
    "WrongSetting",
    "autograd",
    "both_alignments",
    "bottom_right",
    "check",
    "flash_varlen",
    "lse",
    "multiples",
    "options",
    "packed",
    "record",
    "record_torch",
    "record_transformer_engine",
    "subject",
    "top_left",
]
