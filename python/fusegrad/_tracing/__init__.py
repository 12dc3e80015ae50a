"""How Python functions become texts of the score_mod language: docs/score_mod.md, "Tracing"."""
