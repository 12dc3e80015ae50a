"""The parts of `examples/graph_transformer.py`: molecules as graphs, and a Graphormer-like model."""
