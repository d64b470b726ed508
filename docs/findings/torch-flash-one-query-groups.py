"""FlashAttention 2 in torch: with at most one query in each sequence and grouped heads, queries meet the keys of
another sequence, or the call raises an error.

Exit code 2 where the defect shows, 0 where it does not.
"""

import sys

import torch


def offsets(*lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device="cuda")


def attend(q, k, v, queries, keys):
    ends = offsets(*queries), offsets(*keys), 1, max(keys)
    return torch.ops.aten._flash_attention_forward(q, k, v, *ends, 0.0, False, False, scale=1.0)[:2]


def shows(queries, keys, slack):
    """Whether results are wrong; the query tensor has `slack` rows behind its last sequence."""
    torch.manual_seed(0)
    q = torch.randn(sum(queries) + slack, 6, 32, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(sum(keys), 2, 32, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    try:
        out, _ = attend(q, k, v, queries, keys)
    except RuntimeError as error:
        print(f"queries {queries}, {slack} rows of slack: {error}")
        return "is invalid for input" in str(error)
    ends_q, ends_k, wrong = offsets(*queries).tolist(), offsets(*keys).tolist(), 0
    for index in range(len(queries)):
        of = slice(ends_k[index], ends_k[index + 1])
        for row in range(ends_q[index], ends_q[index + 1]):
            for head in range(6):
                logits = k[of, head // 3].double() @ q[row, head].double()
                right = torch.softmax(logits, 0) @ v[of, head // 3].double()
                wrong += bool((out[row, head].double() - right).abs().max() > 0.05)
    of_all = f"{6 * sum(queries)} rows and heads of out"
    print(f"queries {queries}, {slack} rows of slack: {wrong} of {of_all} are wrong")
    return bool(wrong)


found = [
    shows(*case) for case in (((1, 1), (8, 12), 0), ((1, 0, 1), (8, 9, 12), 1), ((1, 0, 1), (8, 9, 12), 0))
]
sys.exit(2 if any(found) else 0)
