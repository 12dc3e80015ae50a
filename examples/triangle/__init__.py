"""What examples/triangle_attention.py is made of."""
