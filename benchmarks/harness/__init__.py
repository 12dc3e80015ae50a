"""What every benchmark shares: running implementations side by side, judging them, and writing down the result."""
