"""What every benchmark shares: running implementations side by side, judging and recording them."""
