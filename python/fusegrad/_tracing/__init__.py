"""How Python functions become texts of the score_mod language: docs/design/score_mod.md, "Tracing"."""
