"""The scripts of the findings: each stands alone, so what they share is copied, and the copies must not part."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

FINDINGS = Path(__file__).parents[2] / "docs" / "findings"


def test_copied_classes_are_equal():
    copies = defaultdict(dict)
    for path in sorted(FINDINGS.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                copies[node.name][path.name] = ast.get_source_segment(text, node)
    assert len(copies["Graph"]) >= 3, "the scripts about cuDNN have one each"
    for name, sources in copies.items():
        assert len(set(sources.values())) == 1, (
            f"{name} differs between {', '.join(sources)}: change all copies"
        )
