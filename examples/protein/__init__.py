"""What examples/folding.py is made of."""
