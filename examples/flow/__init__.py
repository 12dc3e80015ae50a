"""What examples/meanflow.py is made of."""
