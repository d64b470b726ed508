"""Packs that are too large to pass through pipes: inputs are drawn, and rows are judged, where the kernel runs.

`python -m seamproof.large FILE[:NAME]` answers the questions of `seamproof large`; `docs/large.md` describes them.
"""
