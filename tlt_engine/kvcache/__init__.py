"""Where keys and values live: pages, who holds them, which are worth keeping, and the tensors behind them."""
