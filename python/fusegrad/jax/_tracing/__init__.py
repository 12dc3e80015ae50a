"""From a JAX function of scalars to a graph of the score_mod language."""
